"""Strings of JSON: what the grammar library makes of patterns and formats, and names of members.

Patterns speak of what a string means, not of how it is spelled, so they are left to the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from llguidance import regex_to_lark

from ninfer.frontend.constraints.text_patterns import slashed, whole
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.constraints.vocabulary import quoted

_LONGEST_LEAST: Final = 8_192
"""Of a string with a pattern: the library has states for all of it where it is foreseen."""
_PLAIN: Final = r'[^"\\\x00-\x1F\x7F]'
_ESCAPE: Final = r"\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
_PAIR: Final = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
STRING: Final = slashed(rf'"(?:{_PLAIN}|\\["\\bfnrt]|{_ESCAPE}|{_PAIR})*"')
"""Any string; surrogates come in pairs."""
NAME: Final = slashed(rf'"(?:{_PLAIN}|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*"')
"""Any name of a member, in one spelling: so another member of the same name is told by its text."""
_PLAIN_NAME: Final = slashed(f'"{_PLAIN}*"')


def spelled(text: str) -> str:
    """A string of JSON in that spelling, as Lark writes it."""
    return quoted(json.dumps(text, ensure_ascii=False))


def string_schema(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a case says of strings, as a schema for the library. Raises Unenforceable."""
    least = case.get("minLength", 0)
    if "pattern" in case and least > _LONGEST_LEAST:
        raise Unenforceable(
            f"asks for more than {_LONGEST_LEAST} characters of a pattern", ("minLength", least)
        )
    schema: dict[str, Any] = {"type": "string"}
    for key in ("minLength", "maxLength", "format", "enum"):
        if key in case:
            schema[key] = case[key]
    patterns = case.get("pattern", [])
    if patterns:
        schema["pattern"] = patterns[0]
        schema["allOf"] = [{"pattern": pattern} for pattern in patterns[1:]]
    return schema


def pattern_name(pattern: str, taken: Iterable[str]) -> str:
    """The names with a pattern but those that are taken: a terminal's body. Only names that need no
    escapes."""
    return f"{_pattern(pattern)} & {_PLAIN_NAME}{_without(map(spelled, taken))}"


def other_name(taken: Iterable[str], patterns: Iterable[str]) -> str:
    """The names that are not taken and have none of the patterns: a terminal's body."""
    excluded = [_pattern(pattern) for pattern in patterns]
    name = _PLAIN_NAME if excluded else NAME
    return f"{name}{_without([*map(spelled, taken), *excluded])}"


def _pattern(pattern: str) -> str:
    return slashed(f'"(?:{whole(regex_to_lark(pattern, "dw"))})"')


def _without(excluded: Iterable[str]) -> str:
    texts = " | ".join(excluded)
    return f" & ~({texts})" if texts else ""
