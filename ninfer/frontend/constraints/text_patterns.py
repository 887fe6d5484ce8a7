"""Regular expressions, in the grammar library's dialect, of a string that is written as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.unenforceable import Unenforceable

_ANY: Final = "(?s:.*)"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP: Final = r"[0-9a-fA-F]{1,4}"
_DAYS: Final = r"(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_CLOCK: Final = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_IPV6: Final = "|".join(
    [
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        *(
            rf"(?:{_GROUP}:){{{n}}}(?::{_GROUP}){{1,{7 - n}}}"
            if n
            else rf":(?::{_GROUP}){{1,7}}|::"
            for n in range(7)
        ),
        rf"(?:{_GROUP}:){{1,7}}:",
    ]
)
_FORMATS: Final[Mapping[str, str]] = {
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": _IPV6,
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,31}})?@{_HOST}",
    "duration": rf"P(?:[0-9]+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})+",
}
_SPECIAL: Final = re.compile(
    r"\\(?s:.)|\[\^?\]?(?:\\(?s:.)|[^\]\\])*+(?:\]|\\?\Z)|(?P<mark>[|^$()])"
)


def string_patterns(case: Mapping[str, Any]) -> list[str]:
    """Expressions that all hold for the whole string; none for any string. Raises
    Unenforceable."""
    patterns = [whole(pattern) for pattern in case.get("pattern", ())]
    if "format" in case:
        if case["format"] not in _FORMATS:
            raise Unenforceable("has a format without a grammar here")
        patterns.append(_FORMATS[case["format"]])
    least, most = case.get("minLength", 0), case.get("maxLength", "")
    if least or most != "":
        patterns.append(f"(?s:.{{{least},{most}}})")
    return patterns


def whole(pattern: str) -> str:
    """A pattern that is searched for -> one of the whole string. Anchors are known at its ends."""
    marks, depth = [], 0
    for found in _SPECIAL.finditer(pattern):
        mark = found["mark"]
        depth += (mark == "(") - (mark == ")")
        if mark in ("^", "$"):
            marks.append(found.start())
        elif mark == "|" and depth == 0:
            marks.append(-1)
    is_begun = pattern.startswith("^")
    is_ended = bool(marks) and pattern.endswith("$") and marks[-1] == len(pattern) - 1
    anchors = [*([0] if is_begun else []), *([len(pattern) - 1] if is_ended else [])]
    others = [place for place in marks if place not in anchors]
    if any(place >= 0 for place in others) or (others and anchors):
        return _alternatives(pattern)
    inner = pattern[is_begun : len(pattern) - is_ended]
    return f"{'' if is_begun else _ANY}(?:{inner}){'' if is_ended else _ANY}"


def _alternatives(pattern: str) -> str:
    """Of `^a$|^b$` each is anchored by itself."""
    parts, depth, start = [], 0, 0
    for found in _SPECIAL.finditer(pattern):
        mark = found["mark"]
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and depth == 0:
            parts.append(pattern[start : found.start()])
            start = found.end()
    if start == 0:
        raise Unenforceable("has a pattern with ^ or $ in the middle")
    return "|".join(f"(?:{whole(part)})" for part in [*parts, pattern[start:]])


def slashed(pattern: str) -> str:
    """As a Lark grammar writes a regular expression."""
    parts = re.findall(r"\\(?s:.)|(?s:.)", pattern)
    plain = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    return "/" + "".join(plain.get(part, part) for part in parts) + "/"
