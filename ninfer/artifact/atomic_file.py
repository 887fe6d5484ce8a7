"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ninfer.contract.errors import OutputError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """`replacement` for model files. Raises OutputError for what the file system refuses."""
    try:
        with replacement(path) as file:
            yield file
    except OSError as error:
        raise OutputError(path, f"cannot write: {error.strerror or error}") from None


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends without an exception.

    It lies beside `path` under a hidden name until then, reaches the disk before it is renamed, and
    is removed on any failure. A link stays and its target is replaced; a file that was there passes
    its mode on before anything is written. Raises OSError.
    """
    try:
        target = path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    temporary = target.with_name(f".ninfer-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            if target.is_file():
                shutil.copymode(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
