"""Finds calls in an answer's text and reads them, in either form, while the text comes.

    <tool_call> {"name": ...} </tool_call>     <tool_call> <function=f> ... </function> </tool_call>

The outer mark may be missing round a declared function, and the closing mark at the end. Whatever
else follows an opening mark is no call.
"""

from __future__ import annotations

import re
from typing import Final

from ninfer.frontend.tool_calls.call_body import (
    CallBody,
    Ending,
    Verdict,
    may_become,
    prefix_length,
    shallow_copy,
    skip_space,
)
from ninfer.frontend.tool_calls.call_format import CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN
from ninfer.frontend.tool_calls.json_call import JsonCallBody
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools
from ninfer.frontend.tool_calls.xml_call import XmlCallBody

_OPENING: Final = re.compile(f"{CALL_OPEN}|{FUNCTION_OPEN}")


def find_opening(text: str, start: int) -> int | None:
    """Where the first mark begins with which a call may open."""
    found = _OPENING.search(text, start)
    return found.start() if found else None


def opening_prefix_length(text: str, start: int) -> int:
    """How many of the last characters from `start` on may be the beginning of such a mark."""
    if text.rfind("<", max(start, len(text) - len(CALL_OPEN))) < 0:
        return 0
    return max(prefix_length(text, start, mark) for mark in (CALL_OPEN, FUNCTION_OPEN))


class CallReader:
    """Reads one call from a text that starts with its opening mark.

    place       behind all that was understood; of a complete call, behind its closing mark
    opening_end behind the marks that open the call
    """

    def __init__(self, tools: DeclaredTools) -> None:
        self.place = 0
        self.opening_end = 0
        self._tools = tools
        self._body: CallBody | None = None
        self._is_body_complete = False

    def copy(self) -> CallReader:
        reader = shallow_copy(self)
        reader._body = None if self._body is None else self._body.copy()
        return reader

    @property
    def name(self) -> str:
        """The declared function; empty until it is known."""
        return self._body.name or "" if self._body is not None else ""

    @property
    def begun(self) -> bool:
        """Whether the call may be shown though it is not complete; see CallBody."""
        return self._body is not None and self._body.begun

    def take_arguments(self) -> str:
        """The text of the arguments that has become known since the last time."""
        if self._body is None:
            return ""
        ready, self._body.ready = self._body.ready, ""
        return ready

    def read(self, text: str, ending: Ending | None = None) -> Verdict:
        """Go on reading in `text`, which holds all that came before. Once `ending` is given, the
        verdict is not OPEN: a call that is not complete is CUT, or BROKEN if the model itself
        ended there."""
        verdict = self._read(text, ending)
        if verdict is not Verdict.OPEN or ending is None:
            return verdict
        is_call = text.startswith(CALL_OPEN) or self.name
        return Verdict.CUT if ending is Ending.CUT and is_call else Verdict.BROKEN

    def _read(self, text: str, ending: Ending | None) -> Verdict:
        if self._body is None:
            verdict = self._open(text)
            if self._body is None:
                return verdict
        if not self._is_body_complete:
            verdict = self._body.read(text, ending)
            self.place = self._body.place
            if verdict is not Verdict.COMPLETE:
                return verdict
            self._is_body_complete = True
        return self._close(text, ending)

    def _open(self, text: str) -> Verdict:
        is_wrapped = text.startswith(CALL_OPEN)
        self.opening_end = len(CALL_OPEN) if is_wrapped else 0
        self.place = skip_space(text, self.opening_end)
        if text.startswith("{", self.place):
            self._body = JsonCallBody(self._tools, self.place)
            return Verdict.OPEN
        if text.startswith(FUNCTION_OPEN, self.place):
            self.opening_end = self.place + len(FUNCTION_OPEN)
            self._body = XmlCallBody(self._tools, self.place, needs_close=not is_wrapped)
            return Verdict.OPEN
        return Verdict.OPEN if may_become(text, self.place, FUNCTION_OPEN) else Verdict.BROKEN

    def _close(self, text: str, ending: Ending | None) -> Verdict:
        """A closing mark belongs to the call, but without one it is complete as well."""
        behind = skip_space(text, self.place)
        if text.startswith(CALL_CLOSE, behind):
            self.place = behind + len(CALL_CLOSE)
        elif ending is None and may_become(text, behind, CALL_CLOSE):
            return Verdict.OPEN
        return Verdict.COMPLETE
