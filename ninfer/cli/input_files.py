"""Files and pipes that options name: read whole, checked, with the option in each error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ninfer.contract.errors import OptionError


def read_text(option: str, name: str) -> str:
    """The UTF-8 text of file `name`, or of stdin for `-`. Raises OptionError."""
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(option, f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(option, f"{name} is not UTF-8 (byte {error.start})") from error


def read_json(option: str, name: str) -> Any:
    """The JSON value in file `name`, or on stdin for `-`. Raises OptionError."""
    text = read_text(option, name)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise OptionError(option, f"{name} is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise OptionError(option, f"{name} is nested too deeply") from error


def check_writable(option: str, path: Path) -> None:
    """Find out before hours of work that `path` cannot be written. Raises OptionError."""
    if path.is_dir():
        raise OptionError(option, f"{path} is a directory")
    if not path.parent.is_dir():
        raise OptionError(option, f"there is no directory {path.parent}")
