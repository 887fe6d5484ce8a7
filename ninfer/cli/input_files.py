"""Files and pipes that options name: read whole, checked, with the option in each error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from ninfer.contract.errors import OptionError
from ninfer.options import INPUT_LIMIT_MIB

STDIN: Final = "-"
"""The name that means stdin where an option's help says so."""
LIMIT_BYTES: Final = INPUT_LIMIT_MIB << 20


def read_file(option: str, path: Path) -> str:
    """The UTF-8 text of a regular file. Raises OptionError, also for one above the limit."""
    try:
        if path.exists() and not path.is_file():
            raise OptionError(option, f"{path} is not a regular file")
        with path.open("rb") as file:
            data = _read_limited(option, file, str(path))
    except OSError as error:
        raise OptionError(option, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(option, f"{str(path)!r} is no file name: {error}") from error
    return _decoded(option, data, str(path))


def read_text(option: str, name: str) -> str:
    """The UTF-8 text of file `name`, or of stdin for `-`. Raises OptionError."""
    if name != STDIN:
        return read_file(option, Path(name))
    return _decoded(option, _read_limited(option, sys.stdin.buffer, STDIN), STDIN)


def read_prompt(option: str, stream: TextIO) -> str:
    """All of a text stream; broken bytes are replacements already. Raises OptionError."""
    text = stream.read(LIMIT_BYTES + 1)
    if len(text) > LIMIT_BYTES:
        raise too_long(option, "stdin")
    return text


def read_json(option: str, name: str) -> Any:
    """The JSON value in file `name`, or on stdin for `-`. Raises OptionError."""
    return parse_json(option, read_text(option, name), name)


def parse_json(option: str, text: str, name: str) -> Any:
    """The JSON value in `text`, which came from `name`. Raises OptionError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        what = error.msg.removesuffix(" at")
        raise OptionError(option, f"{name} is not JSON: {what} at {where}") from error
    except RecursionError as error:
        raise OptionError(option, f"{name} is nested too deeply") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits.
        raise OptionError(option, f"{name} has a number that is too long") from error


def too_long(option: str, name: str) -> OptionError:
    return OptionError(option, f"{name} is longer than {INPUT_LIMIT_MIB} MiB")


def _read_limited(option: str, file: BinaryIO, name: str) -> bytes:
    """By what is read and not by what the file claims: a device's file has no size."""
    data = file.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise too_long(option, name)
    return data


def _decoded(option: str, data: bytes, name: str) -> str:
    """Line ends become \\n, as when Python opens a text file."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise OptionError(option, f"{name} is not UTF-8 (byte {error.start})") from error
