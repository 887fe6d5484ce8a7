"""Reads `<function=f><parameter=key>value</parameter></function>` into JSON arguments.

A value is all text between its marks but for one line break at each end. Marks may occur in it: a
`</parameter>` ends it only if, after white space, another parameter or `</function>` follows, or
`</tool_call>` and the next call, or the text ends. Inside a string of a JSON list or object it does
not, unless nothing else ends the value. So what has begun as a call can only be broken
by the end of the text.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from ninfer.frontend.tool_calls.call_body import (
    STREAMED_LENGTH,
    Ending,
    Verdict,
    may_become,
    prefix_length,
    shallow_copy,
    skip_space,
)
from ninfer.frontend.tool_calls.call_format import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
)
from ninfer.frontend.tool_calls.json_scanner import Expects, JsonScanner, Step
from ninfer.frontend.tool_calls.parameter_types import STRING_ONLY, DeclaredTools, Types
from ninfer.frontend.tool_calls.parameter_values import json_string, json_value

_FUNCTION: Final = re.compile(r"<function=([^<>\n]{1,160})>")
_FUNCTION_START: Final = re.compile(r"<function=[^<>\n]{0,160}")
_PARAMETER: Final = re.compile(r"<parameter=([^<>\n]{1,256})>")
_PARAMETER_START: Final = re.compile(r"<parameter=[^<>\n]{0,256}")


class _Stage(Enum):
    NAME = auto()
    GAP = auto()  # between parameters
    VALUE_LEAD = auto()  # behind a parameter's mark, maybe before a line break
    VALUE = auto()
    DONE = auto()


class _Next(Enum):
    """What follows at a place where a parameter or the end of the function may stand."""

    PARAMETER = auto()
    FUNCTION_CLOSE = auto()
    NEXT_CALL = auto()  # behind this call's closing mark
    NOTHING = auto()  # the text ends there, maybe with the call's closing mark
    UNKNOWN = auto()
    OTHER = auto()


class XmlCallBody:
    """See CallBody. The text has the function's mark at `place` when reading begins.

    needs_close   a function without parameters is none before its closing mark
    """

    def __init__(self, tools: DeclaredTools, place: int, *, needs_close: bool) -> None:
        self.name: str | None = None
        self.place = place
        self.begun = False
        self.ready = ""
        self._tools = tools
        self._needs_close = needs_close
        self._stage = _Stage.NAME
        self._key = ""
        self._types: Types = None
        self._value_start = 0
        self._scanner: JsonScanner | None = None
        """Of a value that is JSON so far; begun where a mark may end it."""
        self._first_skipped: int | None = None
        """The first mark of the value that stands in a JSON string."""
        self._takes_all = False
        """Marks in JSON strings end the value: nothing else does."""
        self._num_shown = 0
        """Characters of the value that were shown already."""
        self._parameters: dict[str, str] = {}
        """Complete ones that were not shown; replaced, never changed."""
        self._has_shown = False

    def copy(self) -> XmlCallBody:
        body = shallow_copy(self)
        if self._scanner is not None:
            body._scanner = self._scanner.copy()
        return body

    def read(self, text: str, ending: Ending | None) -> Verdict:
        """Go on reading in `text`; see CallBody."""
        verdict = None
        while verdict is None:
            match self._stage:
                case _Stage.NAME:
                    verdict = self._read_name(text)
                case _Stage.GAP:
                    verdict = self._read_gap(text, ending)
                case _Stage.VALUE_LEAD:
                    verdict = self._read_lead(text)
                case _Stage.VALUE:
                    verdict = self._read_value(text, ending)
                case _Stage.DONE:
                    verdict = Verdict.COMPLETE
        return verdict

    def _read_name(self, text: str) -> Verdict | None:
        found = _FUNCTION.match(text, self.place)
        if found is None:
            is_start = may_become(text, self.place, FUNCTION_OPEN) or _FUNCTION_START.fullmatch(
                text, self.place
            )
            return Verdict.OPEN if is_start else Verdict.BROKEN
        name = found[1].strip()
        if not self._tools.declares(name):
            return Verdict.BROKEN
        self.name, self.place, self._stage = name, found.end(), _Stage.GAP
        return None

    def _read_gap(self, text: str, ending: Ending | None) -> Verdict | None:
        self.place = skip_space(text, self.place)
        match _what_follows(text, self.place):
            case _Next.PARAMETER:
                self._open_parameter(text, self.place)
            case _Next.FUNCTION_CLOSE:
                self._close_function(self.place + len(FUNCTION_CLOSE))
            case _Next.NEXT_CALL if not self._needs_close:
                self._close_function(self.place)
            case _Next.NOTHING if ending is Ending.NATURAL and not self._needs_close:
                self._close_function(self.place)
            case _Next.OTHER | _Next.NEXT_CALL:
                return Verdict.BROKEN
            case _:
                return Verdict.OPEN
        return None

    def _open_parameter(self, text: str, place: int) -> None:
        found = _PARAMETER.match(text, place)
        if found is not None and self.name is not None:
            self._key = found[1].strip()
            self._types = self._tools.types(self.name, self._key)
            self.place = found.end()
            self._stage = _Stage.VALUE_LEAD

    def _read_lead(self, text: str) -> Verdict | None:
        if self.place == len(text):
            return Verdict.OPEN
        self.place += text[self.place] == "\n"
        self._value_start, self._num_shown = self.place, 0
        self._scanner, self._first_skipped, self._takes_all = None, None, False
        self._stage = _Stage.VALUE
        return None

    def _read_value(self, text: str, ending: Ending | None) -> Verdict | None:
        """`place` is where the search for the closing mark goes on."""
        while True:
            stop = text.find(PARAMETER_CLOSE, self.place)
            if stop < 0:
                stop = len(text) - prefix_length(text, self.place, PARAMETER_CLOSE)
                self.place = stop
                if ending is not None and self._first_skipped is not None:
                    self.place, self._first_skipped = self._first_skipped, None
                    self._takes_all = True
                    continue
                break
            self.place = stop
            behind = skip_space(text, stop + len(PARAMETER_CLOSE))
            follows = _what_follows(text, behind)
            if follows is _Next.OTHER:
                self.place += 1
                continue
            if self._is_in_string(text, stop):
                if self._first_skipped is None:
                    self._first_skipped = stop
                self.place += 1
                continue
            if follows is _Next.PARAMETER:
                self._close_parameter(text, stop)
                self._open_parameter(text, behind)
                return None
            if follows is _Next.FUNCTION_CLOSE:
                self._close_parameter(text, stop)
                self._close_function(behind + len(FUNCTION_CLOSE))
                return None
            if follows is _Next.NEXT_CALL or (
                follows is _Next.NOTHING and ending is Ending.NATURAL
            ):
                self._close_parameter(text, stop)
                self._close_function(behind)
                return None
            break
        self._show_value(text, self._value_end(text, stop))
        return Verdict.OPEN

    def _is_in_string(self, text: str, stop: int) -> bool:
        """Whether the value before `stop` is a JSON list or object inside one of its strings."""
        if self._types == STRING_ONLY or self._takes_all:
            return False
        if self._scanner is None:
            if text[skip_space(text, self._value_start)] not in "[{":
                return False
            self._scanner = JsonScanner(self._value_start)
        value = text[:stop]
        while self._scanner.step(value) is Step.MOVED and self._scanner.place < stop:
            pass
        return self._scanner.expects is Expects.CHARACTERS and self._scanner.place == stop

    def _value_end(self, text: str, stop: int) -> int:
        """Where a value before `stop` ends: a line break at its end is none of it."""
        return stop - (stop > self._value_start and text[stop - 1] == "\n")

    def _show_value(self, text: str, stop: int) -> None:
        """Show what is known of a string, if it is long or the call is shown already."""
        if self._types != STRING_ONLY:
            return
        self.begun |= stop - self._value_start >= STREAMED_LENGTH
        if self.begun and stop - self._value_start > self._num_shown:
            if self._num_shown == 0:
                self._show_parameters()
                self.ready += f'{self._lead()}{json_string(self._key)}:"'
            start = self._value_start + self._num_shown
            self.ready += json_string(text[start:stop])[1:-1]
            self._num_shown = stop - self._value_start

    def _close_parameter(self, text: str, stop: int) -> None:
        stop = self._value_end(text, stop)
        self._show_value(text, stop)
        if self._num_shown:
            self.ready += '"'
            self._num_shown = 0
        else:
            texts = self._tools.texts(self.name or "", self._key)
            value = json_value(text[self._value_start : stop], self._types, texts)
            self._parameters = {**self._parameters, self._key: value}
            if self.begun:
                self._show_parameters()

    def _close_function(self, place: int) -> None:
        self._show_parameters()
        self.ready += "}" if self._has_shown else "{}"
        self.place, self._stage = place, _Stage.DONE

    def _show_parameters(self) -> None:
        for key, value in self._parameters.items():
            self.ready += f"{self._lead()}{json_string(key)}:{value}"
        self._parameters = {}

    def _lead(self) -> str:
        mark = "," if self._has_shown else "{"
        self._has_shown = True
        return mark


def _what_follows(text: str, place: int) -> _Next:
    if text.startswith(FUNCTION_CLOSE, place):
        return _Next.FUNCTION_CLOSE
    if _PARAMETER.match(text, place):
        return _Next.PARAMETER
    is_closed = text.startswith(CALL_CLOSE, place)
    behind = skip_space(text, place + len(CALL_CLOSE) if is_closed else place)
    if behind >= len(text):
        return _Next.NOTHING
    if is_closed:
        return _after_close(text, behind)
    marks = (FUNCTION_CLOSE, PARAMETER_OPEN, CALL_CLOSE)
    may_follow = any(may_become(text, place, mark) for mark in marks)
    if may_follow or _PARAMETER_START.fullmatch(text, place):
        return _Next.UNKNOWN
    return _Next.OTHER


def _after_close(text: str, place: int) -> _Next:
    if text.startswith(CALL_OPEN, place):
        return _Next.NEXT_CALL
    return _Next.UNKNOWN if may_become(text, place, CALL_OPEN) else _Next.OTHER
