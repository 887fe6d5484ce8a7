"""Tool calls in a model's text: how they are written, how they are read while it is written."""
