"""Files that commands write: whole or not at all, over regular files only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ninfer.artifact.atomic_file import replacement
from ninfer.contract.errors import OptionError


def check_writable(option: str, path: Path) -> None:
    """Find out before hours of work that `path` cannot be written. Raises OptionError."""
    _check_kind(option, path)
    if not path.parent.is_dir():
        raise OptionError(option, f"there is no directory {path.parent}")


def _check_kind(option: str, path: Path) -> None:
    if "\0" in str(path):
        raise OptionError(option, f"{str(path)!r} is no file name")
    if path.is_dir():
        raise OptionError(option, f"{path} is a directory")
    if path.exists() and not path.is_file():
        raise OptionError(option, f"{path} is not a regular file")


def write_file(option: str, path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Replace `path` by what `write` writes, at once and with the mode it had.

    A link stays and its target is replaced. Raises OptionError and leaves nothing behind.
    """
    _check_kind(option, path)
    try:
        with replacement(path) as file:
            write(file)
    except OSError as error:
        raise OptionError(option, f"cannot write {path}: {error.strerror or error}") from error
