"""What there is no grammar for."""

from __future__ import annotations


class Unenforceable(Exception):
    """The text says what there is no grammar for, without a subject."""
