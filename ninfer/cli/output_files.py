"""Files that commands write: whole or not at all, over regular files only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ninfer.artifact.atomic_file import replacement
from ninfer.contract.errors import OptionError, OutputError


def check_writable(option: str, path: Path) -> None:
    """Find out before hours of work that `path` cannot be written.

    Raises OutputError, or OptionError for what is no file name.
    """
    _check_kind(option, path)
    if not path.parent.is_dir():
        raise OutputError(option, f"cannot write {path}: there is no directory {path.parent}")


def _check_kind(option: str, path: Path) -> None:
    if "\0" in str(path):
        raise OptionError(option, f"{str(path)!r} is no file name")
    try:
        if path.is_dir():
            raise OutputError(option, f"cannot write {path}: it is a directory")
        if path.exists() and not path.is_file():
            raise OutputError(option, f"cannot write {path}: it is not a regular file")
    except OSError as error:
        raise cannot_write(option, path, error) from error


def write_file(option: str, path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` writes, at once and with the mode it had.

    A link stays and its target is replaced. Raises OutputError and leaves nothing behind.
    """
    _check_kind(option, path)
    try:
        with replacement(path) as file:
            write(file)
    except OSError as error:
        raise cannot_write(option, path, error) from error


def cannot_write(option: str, path: Path, error: OSError) -> OutputError:
    return OutputError(option, f"cannot write {path}: {error.strerror or error}")
