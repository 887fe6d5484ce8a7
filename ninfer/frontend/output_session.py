"""One request's tokens -> final text in channels; implements contract OutputSession.

    token ids -> bytes -> characters (UTF-8, replacement as Python's own decoder)
      -> channels   [<think>] thought </think> answer, tags found by their text, hence by id as well
      -> calls      in an answer or at the end of a thought (output_calls.py)
      -> stop strings, on the text of a channel (output_text.py)
      -> deltas     only characters that nothing to come can change

Places are counted in characters of the decoded stream. `held` is its unsettled end; everything
before it has been shown or dropped, but for blanks that may turn out to be the end of a channel's
text. The result depends on the bytes alone, not on how they are cut into tokens, nor on how tokens
are grouped into previews.

What is dropped: the tags, newlines after <think>, white space before </think> and after it and
round calls, a matched stop string and all behind it. A thought that never closes stays a thought.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import takewhile

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Finish,
    FinishReason,
    OutputDelta,
    OutputPreview,
)
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_calls import SHORTEST_CALL, AnswerCalls, ThoughtCalls
from ninfer.frontend.output_shown import Output, Segment
from ninfer.frontend.output_state import Phase, SessionRules, State, Waiting
from ninfer.frontend.output_text import TextFlow
from ninfer.frontend.stops import ROOT, StopMatch
from ninfer.frontend.tokenizer import THINK_CLOSE, THINK_OPEN
from ninfer.frontend.tool_calls.call_body import Ending, prefix_length
from ninfer.frontend.tool_calls.call_state import CallState


class TextOutputSession:
    """The output of one request; see the module. Not for concurrent use."""

    def __init__(self, rules: SessionRules) -> None:
        self._rules = rules
        calls = rules.calls
        self._answer = TextFlow(rules, "content", rules.stops, keeps_blanks=calls is not None)
        stops = rules.stops if rules.stops_in_reasoning else None
        self._thought = TextFlow(rules, "reasoning", stops, keeps_blanks=True)
        self._answer_calls = AnswerCalls(calls, self._answer) if calls else None
        self._thought_calls = ThoughtCalls(calls) if calls else None
        self._state = State(
            Phase.START if rules.splits_reasoning else Phase.ANSWER,
            calls=CallState() if calls else None,
        )

    @property
    def reasoning_tokens(self) -> int:
        """Committed tokens up to and including the one that completes </think>.

        A token that also holds the first text of the answer is not one of them.
        """
        return self._state.reasoning_tokens

    @property
    def broken_calls(self) -> int:
        """Openings of tool calls in the answer so far that turned out to be text."""
        calls = self._state.calls
        return 0 if calls is None else calls.num_broken

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        """What `tokens` (at least one) would mean; see OutputSession."""
        if self._state.is_ended:
            raise InvariantError("the output session has ended")
        if not tokens:
            raise InvariantError("an output preview needs at least one token")
        if limit is None and len(tokens) == 1:
            plain = self._plain_preview(tokens[0])
            if plain is not None:
                return plain
        state, output = self._state.successor(), Output()
        finish, accepted = None, 0
        while finish is None and accepted < len(tokens):
            finish = self._accept(state, tokens[accepted], output)
            accepted += 1
        if finish is None and limit is not None:
            finish = self._end(state, output, Ending.CUT) or Finish(limit)
        return OutputPreview(accepted, finish, output.deltas(), state)

    def goes_on_after(self, token: GeneratedToken) -> bool:
        """A stop id, a stop string or the only call that is allowed ends the output; strings and
        calls are matched in a preview."""
        rules = self._rules
        if rules.stops is not None or token.token_id in rules.stop_ids:
            return False
        calls = self._state.calls
        if rules.calls is None or rules.calls.is_parallel or calls is None:
            return True
        return calls.reader is None and len(rules.token_bytes(token.token_id)) < SHORTEST_CALL

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[None]:
        """Nothing is restricted; a stop id ends the output."""
        stop_ids = self._rules.stop_ids
        going = takewhile(lambda token_id: token_id not in stop_ids, token_ids)
        return [None for _ in going]

    def commit(self, preview: OutputPreview) -> None:
        """Adopt a preview made from the present state; InvariantError for any other."""
        state: State = preview.state
        if state.revision != self._state.revision + 1:
            raise InvariantError("the output preview was not made from the present state")
        self._state = state

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next belongs to a thought."""
        return self._is_thinking(self._state)

    def thinks_after(self, preview: OutputPreview) -> bool:
        """`is_thinking` once a preview made from the present state is committed."""
        return self._is_thinking(preview.state)

    def flush(self) -> tuple[OutputDelta, ...]:
        """End here: text held back so far. Nothing the second time or after a finish."""
        if self._state.is_ended:
            return ()
        state, output = self._state.successor(), Output()
        self._end(state, output, Ending.CUT)
        self._state = state
        return output.deltas()

    def _plain_preview(self, token: GeneratedToken) -> OutputPreview | None:
        """The preview of a whole piece of text in an answer without stop strings, when nothing
        waits and no call can begin: what all the rest of this class makes of it, at a fraction of
        the cost. None for anything else."""
        rules, state = self._rules, self._state
        if (
            state.phase is not Phase.ANSWER
            or rules.stops is not None
            or state.held
            or state.blank is not None
            or state.undecoded
            or state.waiting
            or token.token_id in rules.stop_ids
            or token.token_id in rules.hidden_ids
        ):
            return None
        try:
            text = rules.token_bytes(token.token_id).decode()
        except UnicodeDecodeError:
            return None
        if not text or (state.calls is not None and ("<" in text or text[-1].isspace())):
            return None
        state = state.successor()
        state.num_tokens += 1
        state.length += len(text)
        return OutputPreview(1, None, (OutputDelta("content", text, (token,)),), state)

    def _accept(self, state: State, token: GeneratedToken, output: Output) -> Finish | None:
        rules = self._rules
        state.num_tokens += 1
        if token.token_id in rules.stop_ids:
            finish = self._end(state, output, Ending.NATURAL)
            if finish is None and rules.reports_stop_token:
                self._segment(state, output).tokens.append(token)
            return finish or Finish(FinishReason.STOP_TOKEN, token.token_id)
        data = b"" if token.token_id in rules.hidden_ids else rules.token_bytes(token.token_id)
        pending = state.undecoded + data
        text, num_decoded = codecs.utf_8_decode(pending, "replace", False)
        state.undecoded = pending[num_decoded:]
        # An incomplete character becomes exactly one character, whatever follows.
        end = state.length + len(text) + bool(state.undecoded)
        state.wait_for(Waiting(token, state.length, end, bool(data)))
        was_closed = state.thought_end is not None
        finish = self._advance(state, text, output, None)
        if state.thought_end is None:
            self._count_reasoning(state)
        elif not was_closed:
            state.reasoning_tokens = state.num_tokens - (end > state.thought_end)
        return finish

    def _end(self, state: State, output: Output, ending: Ending) -> Finish | None:
        """Settle everything held back. A stop string or a call that this completes is the
        finish."""
        text, _ = codecs.utf_8_decode(state.undecoded, "replace", True)
        state.undecoded = b""
        finish = self._advance(state, text, output, ending)
        if state.thought_end is None:
            self._count_reasoning(state)
        state.is_ended = True
        return finish

    def _advance(
        self, state: State, text: str, output: Output, ending: Ending | None
    ) -> Finish | None:
        """Take decoded text in, settle what can be settled and report tokens."""
        state.held += text
        state.length += len(text)
        finish = self._settle(state, output, ending)
        self._report_tokens(state, output)
        if finish is None:
            return None
        state.is_ended = True
        if isinstance(finish, StopMatch):
            return Finish(FinishReason.STOP_STRING, finish.stop)
        return finish

    def _settle(
        self, state: State, output: Output, ending: Ending | None
    ) -> StopMatch | Finish | None:
        if state.phase is Phase.START:
            self._settle_start(state, ending)
        if state.phase is Phase.THOUGHT_LEAD:
            state.drop(len(state.held) - len(state.held.lstrip("\n")))
            if state.held:
                state.phase = Phase.THOUGHT
        if state.phase is Phase.THOUGHT:
            match = self._settle_thought(state, output, ending)
            if match is not None:
                return match
        if state.phase is Phase.ANSWER_LEAD:
            state.drop(len(state.held) - len(state.held.lstrip()))
            if state.held:
                state.phase = Phase.ANSWER
        if state.phase is Phase.ANSWER:
            if self._answer_calls is not None and state.calls is not None:
                return self._answer_calls.settle(state, output, state.calls, ending)
            limit, is_final = len(state.held), ending is not None
            return self._answer.pass_on(state, output, limit, is_final=is_final)
        return None

    def _settle_start(self, state: State, ending: Ending | None) -> None:
        if state.held.startswith(THINK_OPEN):
            state.drop(len(THINK_OPEN))
            state.phase = Phase.THOUGHT_LEAD
        elif ending is not None or not THINK_OPEN.startswith(state.held):
            opens = self._rules.opens_in_reasoning
            state.phase = Phase.THOUGHT_LEAD if opens else Phase.ANSWER

    def _settle_thought(
        self, state: State, output: Output, ending: Ending | None
    ) -> StopMatch | None:
        held = state.held
        close = held.find(THINK_CLOSE, state.num_scanned)
        is_final = close >= 0 or ending is not None
        limit = close if close >= 0 else len(held)
        if not is_final:
            limit -= prefix_length(held, state.num_scanned, THINK_CLOSE)
        if close < 0 and self._thought_calls is not None and state.calls is not None:
            limit = min(limit, self._thought_calls.first(state, state.calls, ending))
        match = self._thought.pass_on(state, output, limit, is_final=is_final)
        if match is not None or not is_final:
            return match
        state.blank = None
        if close >= 0:
            state.drop(len(THINK_CLOSE))
            state.thought_end = state.settled
            state.num_scanned, state.node = 0, ROOT
            state.phase = Phase.ANSWER_LEAD
            if state.calls is not None:
                state.calls.forget()
        elif state.held and state.calls is not None:
            self._end_in_calls(state, output, state.calls)
        return None

    def _end_in_calls(self, state: State, output: Output, calls: CallState) -> None:
        """The model ended its turn with calls in a thought; its last token is the stop token."""
        state.unpark()
        state.thought_end = thought_end = state.settled
        num_call_tokens = sum(waiting.end > thought_end for waiting in state.waiting)
        state.reasoning_tokens = state.num_tokens - num_call_tokens - 1
        state.phase = Phase.ANSWER
        if self._thought_calls is not None:
            self._thought_calls.show(state, output, calls)

    def _report_tokens(self, state: State, output: Output) -> None:
        """Report the tokens whose text is settled, keep those of blanks, forget the others."""
        reportable, done = state.reportable, 0
        if state.parked is not None:
            if state.parked.first_end > reportable:
                return
            state.unpark()
        for token, start, end, has_text in state.waiting:
            if end > reportable:
                break
            done += 1
            segment = output.segment_at(end - 1) if has_text else self._segment(state, output)
            blank = state.blank
            if blank is not None and end > blank.start:
                shared = token if start < blank.start and blank.earlier is None else blank.shared
                state.blank = blank._replace(tokens=(*blank.tokens, token), shared=shared)
            elif segment is not None:
                segment.tokens.append(token)
        if done:
            state.waiting = state.waiting[done:]

    def _segment(self, state: State, output: Output) -> Segment:
        """Where a token without a text of its own is reported."""
        calls = state.calls
        if calls is not None and calls.reader is not None and calls.is_shown:
            return output.segment("call", calls.num_calls, calls.reader.name)
        return output.segment("reasoning" if self._is_thinking(state) else "content")

    def _is_thinking(self, state: State) -> bool:
        if state.phase is Phase.START:
            return self._rules.opens_in_reasoning
        return state.phase in (Phase.THOUGHT_LEAD, Phase.THOUGHT)

    def _count_reasoning(self, state: State) -> None:
        state.reasoning_tokens = state.num_tokens if self._is_thinking(state) else 0
