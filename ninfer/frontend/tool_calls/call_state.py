"""Where an output session stands in reading calls out of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ninfer.frontend.tool_calls.call_reader import CallReader
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools

_FREE_CHARACTERS: Final = 2**14
_MOST_READINGS: Final = 4
"""How often text is read again, on the average, behind marks that opened no call."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """`is_parallel`: more calls may follow the first."""

    tools: DeclaredTools
    is_parallel: bool = True


class FoundCall(NamedTuple):
    """A complete call; its text ends `stop` characters behind `start`."""

    name: str
    arguments: str
    stop: int


@dataclass(slots=True)
class CallState:
    """reader      of the call that may have begun, None when there is none
    start       where its opening mark stands in the held text
    text_until  opening marks before this place of the held text open no call
    num_calls   calls that were shown, if only in part
    is_shown    the call that is being read was shown in part
    num_reread  characters that were read as a call and were none
    num_broken  openings in an answer that turned out to be text
    found       complete calls in a thought, which count if nothing else follows them
    """

    reader: CallReader | None = None
    start: int = 0
    text_until: int = 0
    num_calls: int = 0
    is_shown: bool = False
    num_reread: int = 0
    found: tuple[FoundCall, ...] = ()
    num_broken: int = 0

    def successor(self) -> CallState:
        """A state to go on from without changing this one. Nothing changes one that has neither
        a reader nor anything to skip, so that is its own successor."""
        return self._copy(self.reader.copy()) if self.reader is not None else self._idle()

    def opened(self, start: int, tools: DeclaredTools) -> CallState:
        """A call may begin at this place of the held text."""
        state = self._copy(CallReader(tools))
        state.start = start
        return state

    def _idle(self) -> CallState:
        return self._copy(None) if self.text_until else self

    def _copy(self, reader: CallReader | None) -> CallState:
        return CallState(
            reader,
            self.start,
            self.text_until,
            self.num_calls,
            self.is_shown,
            self.num_reread,
            self.found,
            self.num_broken,
        )

    def close(self) -> None:
        """The call has ended, complete or cut."""
        self.reader, self.is_shown, self.found = None, False, ()
        self.num_calls += 1

    def forget(self) -> None:
        """There was no call in the text so far."""
        if self.reader is not None or self.text_until:
            self.reader, self.found, self.text_until = None, (), 0

    def give_back(self, num_read: int, place: int) -> None:
        """What was read is no call. Calls are looked for behind its opening, or behind all that
        was read (`num_read`) when that has become too much for a text of `place` characters: a
        model could go on opening calls that end nowhere."""
        opening_end = max(1, 0 if self.reader is None else self.reader.opening_end)
        self.num_reread += num_read
        is_cheap = self.num_reread <= _MOST_READINGS * place + _FREE_CHARACTERS
        self.text_until = self.start + (opening_end if is_cheap else max(opening_end, num_read))
        self.num_calls += self.is_shown
        self.reader, self.is_shown, self.found = None, False, ()

    def drop(self, count: int) -> None:
        """The first characters of the held text are gone."""
        if self.reader is not None or self.text_until:
            self.start = max(0, self.start - count)
            self.text_until = max(0, self.text_until - count)
