"""The free text of a custom tool's call, out of the JSON arguments the model writes.

The model calls a custom tool like a function with one parameter, `input`. While its JSON is
`{"input": "...` the text is read as it comes; anything else is settled at the end.
"""

from __future__ import annotations

import json
import re
from typing import Final

from ninfer.contract.errors import RequestError
from ninfer.gateway.json_text import parse_json

INPUT_PARAMETER: Final = "input"
_OPENING: Final = re.compile(rf'\s*\{{\s*"{INPUT_PARAMETER}"\s*:\s*"')
_PLAIN: Final = re.compile(r'[^"\\]+')
_PAIR: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HIGH: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_UNICODE_LENGTH: Final = 6
_REPLACEMENT: Final = "\ufffd"


def input_of(arguments: str) -> str:
    """The parameter `input` of whole arguments; the arguments as they are when there is none."""
    try:
        value = parse_json(arguments.encode("utf-8", "replace")).value
    except RequestError:
        return arguments
    text = value.get(INPUT_PARAMETER) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class CallInput:
    """Feed pieces of the arguments in any cut; what `feed` and `end` return joins to the text."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_reading = False
        self._has_closed = False

    def feed(self, piece: str) -> str:
        """Text that became final."""
        if self._has_closed:
            return ""
        self._unread += piece
        if not self._is_reading:
            opening = _OPENING.match(self._unread)
            if opening is None:
                return ""
            self._unread = self._unread[opening.end() :]
            self._is_reading = True
        return self._read()

    def end(self) -> str:
        """What is left when the arguments are complete."""
        if self._is_reading:
            return ""
        return input_of(self._unread)

    def _read(self) -> str:
        texts: list[str] = []
        position = 0
        while position < len(self._unread):
            character = self._unread[position]
            if character == '"':
                self._has_closed = True
                position = len(self._unread)
                break
            plain = _PLAIN.match(self._unread, position)
            if plain is not None:
                texts.append(plain.group())
                position = plain.end()
                continue
            escape = _escape_at(self._unread, position)
            if escape is None:
                break
            texts.append(_decoded(escape))
            position += len(escape)
        self._unread = self._unread[position:]
        return "".join(texts)


def _escape_at(text: str, position: int) -> str | None:
    """The escape sequence there, both halves of a pair; None while more text may belong to it."""
    head = text[position : position + 2 * _UNICODE_LENGTH]
    if len(head) < 2:
        return None
    if head[1] != "u":
        return head[:2]
    if len(head) < _UNICODE_LENGTH:
        return None
    if _HIGH.match(head) is None or _PAIR.fullmatch(head):
        return head if _PAIR.fullmatch(head) else head[:_UNICODE_LENGTH]
    rest = head[_UNICODE_LENGTH:]
    may_pair = len(rest) < _UNICODE_LENGTH and rest[:2] in ("", "\\", "\\u")
    return None if may_pair else head[:_UNICODE_LENGTH]


def _decoded(escape: str) -> str:
    """The character; U+FFFD for half a pair and for what is no escape."""
    try:
        text: str = json.loads(f'"{escape}"')
        text.encode()
    except ValueError:
        return _REPLACEMENT
    return text
