"""The text of an XML parameter -> JSON, by the types its schema allows.

A string stays as it was written, and so does one that the schema lists. Any other value is read as
JSON; Python's spellings (None, True, quotes of either kind, a comma before the end) are mended.
What cannot be read for its type stays a string: the client sees what came and can say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from ninfer.frontend.tool_calls.json_scanner import is_json, without_lone_surrogates
from ninfer.frontend.tool_calls.parameter_types import STRING_ONLY, Types

_FIRST_TYPES: Final = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
_WORDS: Final = {"true": "true", "false": "false", "none": "null", "null": "null"}
_LEXICAL: Final = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\(?s:.))*+"|'(?:[^'\\]|\\(?s:.))*+')"""
    r"|(?P<word>[A-Za-z_][A-Za-z_0-9]*+)"
    r"|(?P<comma>,\s*+(?=[\]}]))"
    r"|(?P<other>(?s:.))"
)
_STRING_PART: Final = re.compile(
    r"""\\(?:x(?P<byte>[0-9a-fA-F]{2})|(?P<json>["\\/bfnrt]|u[0-9a-fA-F]{4})|(?P<other>(?s:.)))"""
    r"""|(?P<raw>["\x00-\x1f])"""
)
MAX_MENDED_LENGTH: Final = 2**16
"""Longer text is not mended but taken as it is."""


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str, types: Types, texts: frozenset[str] = frozenset()) -> str:
    """JSON of a parameter's text; `types` and `texts` as DeclaredTools says."""
    if types == STRING_ONLY or text in texts:
        return json_string(text)
    may_be_string = types is None or "string" in types
    value = _read(text.strip(), types, mends=not may_be_string)
    return json_string(text) if value is None else value


def _read(text: str, types: Types, *, mends: bool) -> str | None:
    """JSON of one of the types other than string, None when it is none."""
    word = _WORDS.get(text.lower())
    if word is not None and (types is not None or text == word):
        return word if _fits(word, types) else None
    if not is_json(text):
        mended = _mended(text) if mends else None
        if mended is None or not is_json(mended):
            return None
        text = mended
    return without_lone_surrogates(text) if _fits(text, types) else None


def _fits(json_text: str, types: Types) -> bool:
    """A string counts only where no string is declared: there it is a string in quotes."""
    kind = _FIRST_TYPES.get(json_text[0], "number")
    if types is None:
        return True
    if kind == "number":
        return "number" in types or "integer" in types
    return kind in types and kind != "string"


def _mended(text: str) -> str | None:
    if len(text) > MAX_MENDED_LENGTH or text[:1] not in ("{", "["):
        return None
    return "".join(_mended_parts(text))


def _mended_parts(text: str) -> Iterator[str]:
    for found in _LEXICAL.finditer(text):
        match found.lastgroup:
            case "string":
                yield '"' + _STRING_PART.sub(_json_escape, found[0][1:-1]) + '"'
            case "word":
                yield _WORDS.get(found[0].lower(), found[0])
            case "comma":
                pass
            case _:
                yield found[0]


def _json_escape(found: re.Match[str]) -> str:
    if found["byte"]:
        return "\\u00" + found["byte"]
    if found["json"]:
        return found[0]
    if found["other"]:
        return json_string(found["other"])[1:-1]
    return json_string(found["raw"])[1:-1]
