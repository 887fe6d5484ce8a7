"""Strict JSON: bytes to values, with every way a text can be wrong as `invalid_json`.

orjson reads what is right. The standard parser gets a second look at what orjson refuses, only
because of lone surrogate escapes: agents store history that was cut inside a character, so each
becomes U+FFFD instead of an error that would come back with every later turn.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ninfer.contract.errors import RequestError

MAX_DEPTH: Final = 128
_MAX_DIGITS: Final = 1000
_BOM: Final = b"\xef\xbb\xbf"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonText:
    """`surrogates_replaced` counts the lone surrogates that became U+FFFD."""

    value: Any
    surrogates_replaced: int = 0


def parse_json(data: bytes) -> JsonText:
    """Raises RequestError `invalid_json`. Duplicate keys: the last one wins; a BOM is skipped."""
    data = data.removeprefix(_BOM)
    if not data.strip():
        raise _invalid("the text is empty")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _parse_leniently(data)
    _check_depth(value)
    return JsonText(value)


def _parse_leniently(data: bytes) -> JsonText:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(
            text, parse_constant=_reject_constant, parse_float=_finite, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise _invalid(f"{what} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return _Scrubber().scrub(value)


class _Scrubber:
    """Replaces lone surrogates in every string, keys included."""

    def __init__(self) -> None:
        self.count = 0

    def scrub(self, value: Any) -> JsonText:
        return JsonText(self._clean(value), self.count)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            text, count = _SURROGATE.subn("\ufffd", value)
            self.count += count
            return text
        if isinstance(value, list):
            return [self._clean(item) for item in value]
        if isinstance(value, dict):
            return {self._clean(key): self._clean(item) for key, item in value.items()}
        return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
    if level:
        raise _too_deep()


def _reject_constant(name: str) -> None:
    raise _invalid(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is too large")
    return value


def _integer(text: str) -> int | float:
    """Outside 64 bits a float, as the fast parser has it: nothing else could write it again."""
    if len(text) > _MAX_DIGITS:
        raise _invalid("an integer has too many digits")
    value = int(text)
    return value if -(2**63) <= value < 2**64 else _finite(text)


def _too_deep() -> RequestError:
    return _invalid(f"nesting is deeper than {MAX_DEPTH}")


def _invalid(why: str) -> RequestError:
    return RequestError("invalid_json", f"The request body is not valid JSON: {why}.")
