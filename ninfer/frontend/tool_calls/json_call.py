"""Reads `{"name": "f", "arguments": {...}}`; the arguments are passed on as they were written.

The members may come in any order, and others are ignored; `parameters` is another name of
`arguments`, which may also be a string that holds the object. Broken JSON is no call.
"""

from __future__ import annotations

import json
from typing import Final

from ninfer.frontend.tokenizer import replace_surrogates
from ninfer.frontend.tool_calls.call_body import STREAMED_LENGTH, Ending, Verdict, shallow_copy
from ninfer.frontend.tool_calls.json_scanner import (
    Expects,
    JsonScanner,
    Step,
    is_json,
    whole_characters_end,
    without_lone_surrogates,
)
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools

_NO_ARGUMENTS: Final = "{}"
_ARGUMENT_KEYS: Final = ("arguments", "parameters")


class JsonCallBody:
    """See CallBody. The text has the opening brace at `place` when reading begins."""

    def __init__(self, tools: DeclaredTools, place: int) -> None:
        self.name: str | None = None
        self.begun = False
        self.ready = ""
        self._tools = tools
        self._scanner = JsonScanner(place)
        self._key: str | None = None
        """Of the member of the outer object that is being read."""
        self._string_start = place
        """Of the string that is being read or was read last, its quote included."""
        self._arguments_start: int | None = None
        self._arguments: str | None = None
        self._num_shown = 0

    def copy(self) -> JsonCallBody:
        body = shallow_copy(self)
        body._scanner = self._scanner.copy()
        return body

    @property
    def place(self) -> int:
        return self._scanner.place

    def read(self, text: str, ending: Ending | None) -> Verdict:
        """Go on reading in `text`; see CallBody."""
        verdict = self._scan(text)
        if verdict is Verdict.COMPLETE:
            return self._finish()
        if self.begun and self._is_in_arguments:
            self._show(text)
        return verdict

    def _scan(self, text: str) -> Verdict:
        scanner, step = self._scanner, Step.MOVED
        while step is Step.MOVED and scanner.expects is not Expects.END:
            expected, depth = scanner.expects, len(scanner.opened)
            step = scanner.step(text)
            if step is Step.MOVED and not self._note(text, expected, depth):
                return Verdict.BROKEN
        if step is Step.WRONG:
            return Verdict.BROKEN
        return Verdict.COMPLETE if scanner.expects is Expects.END else Verdict.OPEN

    @property
    def _is_in_arguments(self) -> bool:
        return self._arguments_start is not None and self._arguments is None

    def _note(self, text: str, expected: Expects, depth: int) -> bool:
        """Take in the unit that was read where `expected` could come; False: this is no call."""
        scanner = self._scanner
        is_string = scanner.expects is Expects.CHARACTERS
        if expected is Expects.CHARACTERS:
            if depth == 1:
                return is_string or self._note_string(text)
            if depth == 2 and not scanner.is_key and self._is_in_arguments:
                self._begin_if_long(is_open=is_string)
            return True
        if is_string:
            self._string_start = scanner.place - 1
        if depth == 1 and expected is Expects.VALUE and self._key in _ARGUMENT_KEYS:
            return self._note_arguments(text)
        if depth == 2 and len(scanner.opened) == 1 and self._is_in_arguments:
            if self.begun:
                self._show(text)
            self._arguments = text[self._arguments_start : scanner.place]
        return True

    def _note_string(self, text: str) -> bool:
        """A string of the outer object is complete: a key or a value."""
        quoted = text[self._string_start : self._scanner.place]
        value = replace_surrogates(json.loads(quoted))
        if self._scanner.is_key:
            self._key = value
        elif self._key == "name":
            is_first, self.name = self.name is None, value
            return is_first and self._tools.declares(value)
        elif self._key in _ARGUMENT_KEYS:
            self._arguments = value.strip() or _NO_ARGUMENTS
            return self._arguments[0] == "{" and is_json(self._arguments)
        return True

    def _note_arguments(self, text: str) -> bool:
        """The arguments begin: an object, null, or a string that is read before it counts."""
        if self._arguments_start is not None or self._arguments is not None:
            return False
        place = self._scanner.place
        if text[place - 1] == "{":
            self._arguments_start = place - 1
        elif self._scanner.expects is not Expects.CHARACTERS:
            self._arguments = _NO_ARGUMENTS
            return text.endswith("null", 0, place)
        return True

    def _begin_if_long(self, *, is_open: bool) -> None:
        num_quotes = 1 if is_open else 2
        length = self._scanner.place - self._string_start - num_quotes
        self.begun |= length >= STREAMED_LENGTH and self.name is not None

    def _show(self, text: str) -> None:
        stop = whole_characters_end(text, self._scanner.place)
        start = (self._arguments_start or 0) + self._num_shown
        self.ready += without_lone_surrogates(text[start:stop])
        self._num_shown += stop - start

    def _finish(self) -> Verdict:
        if self.name is None:
            return Verdict.BROKEN
        arguments = self._arguments or _NO_ARGUMENTS
        self.ready += without_lone_surrogates(arguments[self._num_shown :])
        self._num_shown = len(arguments)
        return Verdict.COMPLETE
