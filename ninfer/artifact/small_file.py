"""Whole small files of a model, with typed errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ninfer.artifact.json_document import parse_object
from ninfer.contract.errors import ModelFileError


def read_bytes(path: Path) -> bytes:
    """Raises ModelFileError when the file cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelFileError(path, None, "no such file") from None
    except OSError as error:
        raise ModelFileError(path, None, error.strerror or str(error)) from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFileError."""
    return parse_object(read_bytes(path), path)
