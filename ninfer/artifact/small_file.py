"""Files of a model directory: only regular ones are opened, and errors are typed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from ninfer.artifact.json_document import parse_object
from ninfer.contract.errors import ModelFileError

MAX_BYTES: Final = 2**27
"""Four times the largest tokenizer; parsing takes about ten times the memory."""


def check_regular(path: Path) -> None:
    """Raises ModelFileError for what is missing, or could block or never end when read."""
    if not path.exists():
        problem = "a link that leads nowhere" if path.is_symlink() else "no such file"
        raise ModelFileError(path, None, problem)
    if not path.is_file():
        raise ModelFileError(path, None, "not a regular file")


def read_bytes(path: Path) -> bytes:
    """Raises ModelFileError when the file cannot be read or is longer than MAX_BYTES."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise ModelFileError(path, None, f"longer than {MAX_BYTES // 2**20} MiB")
            return file.read()
    except OSError as error:
        raise ModelFileError(path, None, error.strerror or str(error)) from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFileError."""
    return parse_object(read_bytes(path), path)
