"""Files of a model directory: only regular ones are opened, and errors are typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ninfer.artifact.json_document import parse_object
from ninfer.contract.errors import ModelFileError


def check_regular(path: Path) -> None:
    """Raises ModelFileError for what is missing, or could block or never end when read."""
    if not path.exists():
        raise ModelFileError(path, None, "no such file")
    if not path.is_file():
        raise ModelFileError(path, None, "not a regular file")


def read_bytes(path: Path) -> bytes:
    """Raises ModelFileError when the file cannot be read."""
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(path, None, error.strerror or str(error)) from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFileError."""
    return parse_object(read_bytes(path), path)
