"""NInfer: an LLM server for one GPU. See docs/architecture.md for the parts and their owners."""

__version__ = "0.1.0"
