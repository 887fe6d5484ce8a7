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
        path = Path(name)
        if path.exists() and not path.is_file():
            raise OptionError(option, f"{name} is not a regular file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(option, f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(option, f"{name} is not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise OptionError(option, f"{name!r} is no file name: {error}") from error


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
    except ValueError as error:
        # Python refuses integers of thousands of digits.
        raise OptionError(option, f"{name} has a number that is too long") from error
