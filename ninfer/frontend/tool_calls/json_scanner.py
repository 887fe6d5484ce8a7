"""Checks JSON text while it comes, a lexical unit at a time.

Strict: RFC 8259, and besides no number that overflows or has more than MAX_NUMBER_LENGTH
characters, no nesting beyond MAX_DEPTH. So whatever passes can be parsed by anybody.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

MAX_DEPTH: Final = 128
MAX_NUMBER_LENGTH: Final = 512

_SPACE: Final = re.compile(r"[ \t\n\r]*+")
_PLAIN: Final = r'[^"\\\x00-\x1f]*+'
_ESCAPE: Final = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_CHARACTERS: Final = re.compile(f"{_PLAIN}(?:{_ESCAPE}{_PLAIN})*+")
_ESCAPE_START: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS: Final = ("true", "false", "null")
_SURROGATE: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|\\."
)
_HIGH_SURROGATE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_LENGTH: Final = 6


class Expects(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or the end of the list
    FIRST_KEY = auto()  # a key or the end of the object
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma or the end of what is open
    CHARACTERS = auto()  # inside a string
    END = auto()  # the value is complete


class Step(Enum):
    MOVED = auto()  # a unit was read, maybe only a part of a string
    WAITS = auto()  # more text is needed
    WRONG = auto()  # no JSON can go on like this


@dataclass(slots=True)
class JsonScanner:
    """`place` is behind the last unit that was read; `opened` are the brackets open there.

    is_key     the string that is being read, or was read last, is a key
    """

    place: int
    expects: Expects = Expects.VALUE
    opened: str = ""
    is_key: bool = False

    def copy(self) -> JsonScanner:
        return JsonScanner(self.place, self.expects, self.opened, self.is_key)

    def step(self, text: str, *, is_last: bool = False) -> Step:
        """Read one unit. `is_last`: no text will follow, so a number at the end is complete."""
        if self.expects is Expects.CHARACTERS:
            return self._string(text)
        if self.expects is Expects.END:
            return Step.WAITS
        self.place = _space_end(text, self.place)
        if self.place == len(text):
            return Step.WAITS
        match self.expects:
            case Expects.VALUE | Expects.FIRST_ITEM:
                return self._value(text, is_last)
            case Expects.FIRST_KEY | Expects.KEY:
                return self._key(text)
            case Expects.COLON:
                return self._mark(text, ":", Expects.VALUE)
            case _:
                return self._next(text)

    def _value(self, text: str, is_last: bool) -> Step:
        character = text[self.place]
        if character in "{[":
            if len(self.opened) == MAX_DEPTH:
                return Step.WRONG
            self.opened += character
            self.expects = Expects.FIRST_KEY if character == "{" else Expects.FIRST_ITEM
            self.place += 1
            return Step.MOVED
        if character == '"':
            self.is_key = False
            return self._mark(text, '"', Expects.CHARACTERS)
        if character == "]" and self.expects is Expects.FIRST_ITEM:
            return self._close("]")
        return self._word(text, is_last)

    def _key(self, text: str) -> Step:
        if text[self.place] == "}" and self.expects is Expects.FIRST_KEY:
            return self._close("}")
        self.is_key = True
        return self._mark(text, '"', Expects.CHARACTERS)

    def _next(self, text: str) -> Step:
        character = text[self.place]
        if character in "}]":
            return self._close(character)
        return self._mark(text, ",", Expects.KEY if self.opened[-1] == "{" else Expects.VALUE)

    def _mark(self, text: str, mark: str, then: Expects) -> Step:
        if text[self.place] != mark:
            return Step.WRONG
        self.place += 1
        self.expects = then
        return Step.MOVED

    def _close(self, bracket: str) -> Step:
        if self.opened[-1] != ("{" if bracket == "}" else "["):
            return Step.WRONG
        self.opened = self.opened[:-1]
        self.place += 1
        self._has_value()
        return Step.MOVED

    def _has_value(self) -> None:
        self.expects = Expects.NEXT if self.opened else Expects.END

    def _string(self, text: str) -> Step:
        end = _match_end(_CHARACTERS, text, self.place)
        moved, self.place = end > self.place, end
        if end == len(text):
            return Step.MOVED if moved else Step.WAITS
        if text[end] == '"':
            self.place = end + 1
            if self.is_key:
                self.expects = Expects.COLON
            else:
                self._has_value()
            return Step.MOVED
        if moved:
            return Step.MOVED
        return Step.WAITS if _ESCAPE_START.fullmatch(text, end) else Step.WRONG

    def _word(self, text: str, is_last: bool) -> Step:
        end = _match_end(_WORD, text, self.place)
        word = text[self.place : end]
        if end == len(text) and not is_last:
            return Step.WAITS if _may_become_word(word) else Step.WRONG
        if word not in _LITERALS and not _is_number(word):
            return Step.WRONG
        self.place = end
        self._has_value()
        return Step.MOVED


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON value that JsonScanner passes."""
    scanner = JsonScanner(0)
    while scanner.expects is not Expects.END:
        if scanner.step(text, is_last=True) is not Step.MOVED:
            return False
    return _space_end(text, scanner.place) == len(text)


def without_lone_surrogates(json_text: str) -> str:
    """Escapes of half a surrogate pair become that of the replacement character."""
    if "\\u" not in json_text:
        return json_text
    return _SURROGATE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], json_text)


def whole_characters_end(text: str, end: int) -> int:
    """`end`, or the place before half a surrogate pair that text[:end] ends with."""
    start = end - _ESCAPE_LENGTH
    if start < 0 or not _HIGH_SURROGATE.fullmatch(text, start, end):
        return end
    num_slashes = start - len(text[:start].rstrip("\\"))
    return end if num_slashes % 2 else start


def _space_end(text: str, start: int) -> int:
    return _match_end(_SPACE, text, start)


def _match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The end of a pattern that matches everywhere, if only the empty text."""
    found = pattern.match(text, start)
    return found.end() if found else start


def _may_become_word(word: str) -> bool:
    if word[0].isalpha():
        return any(literal.startswith(word) for literal in _LITERALS)
    return len(word) <= MAX_NUMBER_LENGTH


def _is_number(word: str) -> bool:
    if len(word) > MAX_NUMBER_LENGTH or not _NUMBER.fullmatch(word):
        return False
    return not math.isinf(float(word))
