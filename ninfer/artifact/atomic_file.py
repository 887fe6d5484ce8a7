"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ninfer.contract.errors import ModelFileError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends without an exception.

    It lies beside `path` under a hidden name until then, reaches the disk before it is renamed, and
    is removed on any failure. Raises ModelFileError for what the file system refuses.
    """
    temporary = path.with_name(f".ninfer-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise ModelFileError(path, None, f"cannot write: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
