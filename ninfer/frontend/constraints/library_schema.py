"""Schemas of strings and of multiples, which the grammar library turns into grammars itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher

from ninfer.frontend.constraints.unenforceable import Unenforceable

WHITE_SPACE: Final = r"( |\n{1,2} {0,32})"
"""Between two tokens of JSON at most this: a model must not write blanks for ever."""
_LAYOUT: Final = {"whitespace_pattern": WHITE_SPACE, "json_allow_general_unicode_escapes": True}
_UNSATISFIABLE: Final = "nsatisfiable"
_NOTHING_LEFT: Final = "NoExtensionBias"
"""The library's name for a mask without a token."""
_UNDECIDED: Final = "Unable to determine"
_LONGEST_MESSAGE: Final = 200
_REGEX_ERROR: Final = re.compile(rf"^error: (.{{1,{_LONGEST_MESSAGE}}})", re.MULTILINE)


def library_values(schema: Mapping[str, Any]) -> str | None:
    """A rule's body for the values of a schema that the library knows how to write, None when there
    are none. Raises Unenforceable."""
    body = f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"
    complaint = LLMatcher.validate_grammar(
        json.dumps({"grammars": [{"json_schema": dict(schema)}]})
    )
    if not complaint:
        return body
    if _UNSATISFIABLE in complaint:
        return None
    raise Unenforceable(
        f"has what the grammar library does not take: {cause_of(complaint)}",
        ("pattern", schema["pattern"]) if "pattern" in schema else None,
    )


def matches(pattern: str, name: str) -> bool:
    """Whether a name has a pattern."""
    return library_values({"type": "string", "pattern": pattern, "enum": [name]}) is not None


def has_strings(schema: Mapping[str, Any]) -> bool:
    """Whether anything keeps to the rules for strings together, as far as there is telling. Raises
    Unenforceable for a wrong pattern."""
    try:
        return library_values(schema) is not None
    except Unenforceable as error:
        if _UNDECIDED in str(error):
            return True
        raise


def overlap(one: str, other: str) -> bool:
    """Whether a string may have both patterns."""
    both = {"type": "string", "pattern": one, "allOf": [{"pattern": other}]}
    return library_values(both) is not None


def cause_of(message: str) -> str:
    """The first line of a complaint; of a regular expression also what is wrong with it, which is
    some lines below."""
    if _NOTHING_LEFT in message:
        return "there is a place where no text keeps to it"
    first_line = message.strip().split("\n", 1)[0][:_LONGEST_MESSAGE]
    found = _REGEX_ERROR.search(message)
    return f"{first_line} {found[1]}" if found and first_line.endswith(":") else first_line
