"""Tool calls in the output: those of an answer, and those that a model forgot in its thought.

In an answer, white space round calls is dropped, stop strings do not apply inside them, and what
only looked like a call is text. In a thought calls are prose, unless the thought ends with them and
the model ends its turn there without closing it: then they were meant.
"""

from __future__ import annotations

from typing import Final

from ninfer.contract.generation import Finish, FinishReason
from ninfer.frontend.output_shown import Output
from ninfer.frontend.output_state import Phase, State
from ninfer.frontend.output_text import TextFlow
from ninfer.frontend.stops import ROOT, StopMatch
from ninfer.frontend.tool_calls.call_body import (
    Ending,
    Verdict,
    may_become,
    prefix_length,
    skip_space,
)
from ninfer.frontend.tool_calls.call_format import CALL_OPEN
from ninfer.frontend.tool_calls.call_reader import (
    CallReader,
    find_opening,
    opening_prefix_length,
)
from ninfer.frontend.tool_calls.call_state import CallRules, CallState, FoundCall

SHORTEST_CALL: Final = 12
"""No token of fewer bytes can begin a call and complete it as well."""


class AnswerCalls:
    """Settles an answer that may have calls in it."""

    def __init__(self, rules: CallRules, flow: TextFlow) -> None:
        """`flow` keeps blanks."""
        self._rules = rules
        self._flow = flow

    def settle(
        self, state: State, output: Output, calls: CallState, ending: Ending | None
    ) -> StopMatch | Finish | None:
        """Show text and calls as far as they are certain, all of them with an `ending`."""
        while True:
            if calls.reader is None:
                match = self._pass_text(state, output, calls, ending)
                if match is not None or state.calls is None or state.calls.reader is None:
                    return match
                calls = state.calls
            finish = self._read(state, output, calls, ending)
            if finish is not None or calls.reader is not None or not state.held:
                return finish

    def _pass_text(
        self, state: State, output: Output, calls: CallState, ending: Ending | None
    ) -> StopMatch | None:
        """Show text up to where a call may begin, and begin to read it there."""
        held = state.held
        opening, limit, is_final = None, len(held), ending is not None
        if "<" not in held:
            if not is_final:
                return self._flow.pass_on(state, output, limit, is_final=False)
        else:
            start = max(state.num_scanned, calls.text_until)
            opening = find_opening(held, start)
            if opening is not None:
                limit, is_final = opening, False
            elif not is_final:
                limit -= opening_prefix_length(held, start)
        match = self._flow.pass_on(state, output, limit, is_final=is_final)
        if match is None and opening is not None:
            num_gone = len(held) - len(state.held)
            state.calls = calls.opened(opening - num_gone, self._rules.tools)
        elif match is None and is_final:
            output.show_blank(state, "content")
        return match

    def _read(
        self, state: State, output: Output, calls: CallState, ending: Ending | None
    ) -> Finish | None:
        """Read the call that may have begun; `calls` has no reader when that is over."""
        reader = calls.reader
        if reader is None:
            return None
        match reader.read(state.held[calls.start :], ending):
            case Verdict.OPEN:
                if reader.begun:
                    self._show(state, output, calls, reader)
            case Verdict.BROKEN:
                self._give_back(state, output, calls, reader)
            case Verdict.CUT:
                self._end(state, output, calls, reader, len(state.held), is_complete=False)
            case Verdict.COMPLETE:
                self._end(state, output, calls, reader, reader.place, is_complete=True)
                if not self._rules.is_parallel:
                    drop_all(state)
                    return Finish(FinishReason.TOOL_CALL)
                state.drop(len(state.held) - len(state.held.lstrip()))
                if not state.held:
                    state.phase = Phase.ANSWER_LEAD
        return None

    def _show(self, state: State, output: Output, calls: CallState, reader: CallReader) -> None:
        """Show what is known of a call."""
        is_first = not calls.is_shown
        if is_first:
            self._leave_text(state, output, calls)
            calls.is_shown = True
        segment = output.show_call(state, reader.place, calls.num_calls, reader.name)
        segment.begins |= is_first
        segment.text += reader.take_arguments()

    def _leave_text(self, state: State, output: Output, calls: CallState) -> None:
        """It is a call, so the text before it is complete."""
        num_shown = len(state.held[: calls.start].rstrip())
        output.show(state, num_shown, "content")
        if state.blank is not None:
            output.drop_blank(state.blank, "content")
            state.blank = None
        state.drop(calls.start)
        state.num_scanned, state.node = 0, ROOT

    def _end(
        self,
        state: State,
        output: Output,
        calls: CallState,
        reader: CallReader,
        count: int,
        *,
        is_complete: bool,
    ) -> None:
        """The call ends with the next `count` characters. One that is cut is shown no further."""
        if is_complete or calls.is_shown:
            self._show(state, output, calls, reader)
            output.show_call(state, count, calls.num_calls, reader.name).ends = is_complete
        else:
            count -= calls.start
            self._leave_text(state, output, calls)
        state.drop(count)
        calls.close()

    def _give_back(
        self, state: State, output: Output, calls: CallState, reader: CallReader
    ) -> None:
        """It is no call: its text is the answer's, even if some was shown as a call already."""
        if reader.begun:
            self._show(state, output, calls, reader)
        calls.give_back(reader.place, state.settled + calls.start + reader.place)
        calls.num_broken += 1


class ThoughtCalls:
    """Looks for calls at the end of a thought. They stay held until something refutes them."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules

    def first(self, state: State, calls: CallState, ending: Ending | None) -> int:
        """Where in the held text the first call may begin, the text's length if nowhere. With an
        `ending` that is where the complete calls that were found begin."""
        held = state.held
        while True:
            if calls.reader is None:
                start = held.find(CALL_OPEN, max(state.num_scanned, calls.text_until))
                if start < 0:
                    return len(held) - (0 if ending else prefix_length(held, 0, CALL_OPEN))
                calls = state.calls = calls.opened(start, self._rules.tools)
            if self._may_be_calls(held, calls, ending):
                return calls.start
            num_read = sum(call.stop for call in calls.found[-1:])
            num_read += 0 if calls.reader is None else calls.reader.place
            calls.give_back(num_read, state.settled + calls.start + num_read)

    def _may_be_calls(self, held: str, calls: CallState, ending: Ending | None) -> bool:
        """Read on; False when the text from `calls.start` on is no mere row of calls."""
        while True:
            begin = calls.start + (calls.found[-1].stop if calls.found else 0)
            begin = skip_space(held, begin)
            if calls.found and not held.startswith(CALL_OPEN, begin):
                if ending is not None:
                    return ending is Ending.NATURAL and begin == len(held)
                return may_become(held, begin, CALL_OPEN)
            reader = calls.reader or CallReader(self._rules.tools)
            calls.reader = reader
            verdict = reader.read(held[begin:], ending)
            if verdict is Verdict.OPEN:
                return True
            if verdict is not Verdict.COMPLETE:
                return False
            stop = begin - calls.start + reader.place
            found = FoundCall(reader.name, reader.take_arguments(), stop)
            calls.found += (found,)
            calls.reader = CallReader(self._rules.tools)

    def show(self, state: State, output: Output, calls: CallState) -> None:
        """The held text is the calls that were found."""
        found = calls.found if self._rules.is_parallel else calls.found[:1]
        for call in found:
            segment = output.show_call(state, call.stop, calls.num_calls, call.name)
            segment.text, segment.begins, segment.ends = call.arguments, True, True
            calls.close()
        drop_all(state)


def drop_all(state: State) -> None:
    """Nothing that is held is shown, nor are tokens behind the last shown character."""
    state.undecoded = b""
    state.drop(len(state.held))
