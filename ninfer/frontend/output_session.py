"""One request's tokens -> final text in two channels; implements contract OutputSession.

    token ids -> bytes -> characters (UTF-8, replacement as Python's own decoder)
      -> channels   [<think>] thought </think> answer, tags found by their text, hence by id as well
      -> stop strings, on the text of a channel
      -> deltas     only characters that nothing to come can change

Places are counted in characters of the decoded stream. `held` is its unsettled end; everything
before it has been shown or dropped, but for the blanks at the end of a thought. The result depends
on the bytes alone, not on how they are cut into tokens, nor on how tokens are grouped into
previews.

What is dropped: the tags, newlines after <think>, white space before </think> and after it, a
matched stop string and all behind it. A thought that never closes stays a thought.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Channel,
    Finish,
    FinishReason,
    OutputDelta,
    OutputPreview,
)
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_state import Blank, Output, Phase, SessionRules, State, Waiting
from ninfer.frontend.stops import ROOT, StopMatch, StopMatcher
from ninfer.frontend.tokenizer import THINK_CLOSE, THINK_OPEN


class TextOutputSession:
    """The output of one request; see the module. Not for concurrent use."""

    def __init__(self, rules: SessionRules) -> None:
        self._rules = rules
        self._state = State(Phase.START if rules.splits_reasoning else Phase.ANSWER)

    @property
    def reasoning_tokens(self) -> int:
        """Committed tokens up to and including the one that completes </think>.

        A token that also holds the first text of the answer is not one of them.
        """
        return self._state.reasoning_tokens

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        """What `tokens` (at least one) would mean; see OutputSession."""
        if self._state.is_ended:
            raise InvariantError("the output session has ended")
        if not tokens:
            raise InvariantError("an output preview needs at least one token")
        state, output = self._state.successor(), Output()
        finish, accepted = None, 0
        while finish is None and accepted < len(tokens):
            finish = self._accept(state, tokens[accepted], output)
            accepted += 1
        if finish is None and limit is not None:
            finish = self._end(state, output) or Finish(limit)
        return OutputPreview(accepted, finish, output.deltas(), state)

    def goes_on_after(self, token: GeneratedToken) -> bool:
        """Only a stop id or a stop string ends the output; strings are matched in a preview."""
        rules = self._rules
        return rules.stops is None and token.token_id not in rules.stop_ids

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
        self._end(state, output)
        self._state = state
        return output.deltas()

    def _accept(self, state: State, token: GeneratedToken, output: Output) -> Finish | None:
        rules = self._rules
        state.num_tokens += 1
        if token.token_id in rules.stop_ids:
            finish = self._end(state, output)
            if finish is None and rules.reports_stop_token:
                output.report(token, self._channel(state))
            return finish or Finish(FinishReason.STOP_TOKEN, token.token_id)
        data = b"" if token.token_id in rules.hidden_ids else rules.token_bytes(token.token_id)
        pending = state.undecoded + data
        text, num_decoded = codecs.utf_8_decode(pending, "replace", False)
        state.undecoded = pending[num_decoded:]
        # An incomplete character becomes exactly one character, whatever follows.
        end = state.length + len(text) + bool(state.undecoded)
        state.waiting += (Waiting(token, end, bool(data)),)
        was_closed = state.thought_end is not None
        finish = self._advance(state, text, output, is_last=False)
        if state.thought_end is None:
            self._count_reasoning(state)
        elif not was_closed:
            state.reasoning_tokens = state.num_tokens - (end > state.thought_end)
        return finish

    def _end(self, state: State, output: Output) -> Finish | None:
        """Settle everything held back. A stop string that this completes is the finish."""
        text, _ = codecs.utf_8_decode(state.undecoded, "replace", True)
        state.undecoded = b""
        finish = self._advance(state, text, output, is_last=True)
        if state.thought_end is None:
            self._count_reasoning(state)
        state.is_ended = True
        return finish

    def _advance(self, state: State, text: str, output: Output, *, is_last: bool) -> Finish | None:
        """Take decoded text in, settle what can be settled and report tokens."""
        state.held += text
        state.length += len(text)
        match = self._settle(state, output, is_last)
        self._report_tokens(state, output)
        if match is None:
            return None
        state.is_ended = True
        return Finish(FinishReason.STOP_STRING, match.stop)

    def _settle(self, state: State, output: Output, is_last: bool) -> StopMatch | None:
        if state.phase is Phase.START:
            self._settle_start(state, is_last)
        if state.phase is Phase.THOUGHT_LEAD:
            state.drop(len(state.held) - len(state.held.lstrip("\n")))
            if state.held:
                state.phase = Phase.THOUGHT
        if state.phase is Phase.THOUGHT:
            match = self._settle_thought(state, output, is_last)
            if match is not None:
                return match
        if state.phase is Phase.ANSWER_LEAD:
            state.drop(len(state.held) - len(state.held.lstrip()))
            if state.held:
                state.phase = Phase.ANSWER
        if state.phase is Phase.ANSWER:
            return self._settle_answer(state, output, is_last)
        return None

    def _settle_start(self, state: State, is_last: bool) -> None:
        if state.held.startswith(THINK_OPEN):
            state.drop(len(THINK_OPEN))
            state.phase = Phase.THOUGHT_LEAD
        elif is_last or not THINK_OPEN.startswith(state.held):
            opens = self._rules.opens_in_reasoning
            state.phase = Phase.THOUGHT_LEAD if opens else Phase.ANSWER

    def _settle_thought(self, state: State, output: Output, is_last: bool) -> StopMatch | None:
        close = state.held.find(THINK_CLOSE, state.num_scanned)
        is_final = is_last or close >= 0
        if close >= 0:
            limit = close
        elif is_last:
            limit = len(state.held)
        else:
            limit = len(state.held) - _tag_prefix_length(state.held, state.num_scanned)
        stops = self._rules.stops if self._rules.stops_in_reasoning else None
        match = self._scan(state, stops, limit)
        if match is not None:
            self._cut(state, output, match, "reasoning")
            return match
        stop = limit if is_final or stops is None else limit - stops.depth(state.node)
        thought = state.held[:stop]
        num_shown = len(thought.rstrip())
        output.show(state, num_shown, "reasoning")
        if not is_final and num_shown < stop:
            state.blank = Blank(state.blank, state.settled, thought[num_shown:], ())
            state.drop(stop - num_shown)
        if is_final:
            state.blank = None
        if close >= 0:
            state.drop(close - num_shown + len(THINK_CLOSE))
            state.thought_end = state.settled
            state.num_scanned, state.node = 0, ROOT
            state.phase = Phase.ANSWER_LEAD
        elif is_last:
            state.drop(len(state.held))
        return None

    def _settle_answer(self, state: State, output: Output, is_last: bool) -> StopMatch | None:
        stops, limit = self._rules.stops, len(state.held)
        if stops is None:
            output.show(state, limit, "content")
            return None
        match = self._scan(state, stops, limit)
        if match is not None:
            self._cut(state, output, match, "content")
            return match
        output.show(state, limit if is_last else limit - stops.depth(state.node), "content")
        return None

    def _scan(self, state: State, stops: StopMatcher | None, limit: int) -> StopMatch | None:
        """Feed held characters up to `limit` to the matcher."""
        start, state.num_scanned = state.num_scanned, limit
        if stops is None:
            return None
        state.node, match = stops.feed(state.node, state.held, start, limit)
        while match is not None and state.num_tokens <= self._rules.min_tokens:
            state.node, match = stops.feed(state.node, state.held, match.end, limit)
        return match

    def _cut(self, state: State, output: Output, match: StopMatch, channel: Channel) -> None:
        """Show what precedes the match (or ends with it) and drop the rest with its tokens."""
        if self._rules.includes_stop_string:
            stop = match.end
        else:
            stop = match.end - len(match.stop)
            if channel == "reasoning":
                stop = len(state.held[:stop].rstrip())
        output.show(state, stop, channel)
        cut = state.settled
        state.blank = None
        state.waiting = tuple(waiting for waiting in state.waiting if waiting.end <= cut)
        state.undecoded = b""
        state.drop(len(state.held))

    def _report_tokens(self, state: State, output: Output) -> None:
        """Report the tokens whose text is settled, keep those of blanks, forget the others."""
        settled, done = state.settled, 0
        for token, end, has_text in state.waiting:
            if end > settled:
                break
            done += 1
            channel = output.channel_at(end - 1) if has_text else self._channel(state)
            blank = state.blank
            if blank is not None and end > blank.start:
                state.blank = blank._replace(tokens=(*blank.tokens, token))
            elif channel is not None:
                output.report(token, channel)
        if done:
            state.waiting = state.waiting[done:]

    def _channel(self, state: State) -> Channel:
        return "reasoning" if self._is_thinking(state) else "content"

    def _is_thinking(self, state: State) -> bool:
        if state.phase is Phase.START:
            return self._rules.opens_in_reasoning
        return state.phase in (Phase.THOUGHT_LEAD, Phase.THOUGHT)

    def _count_reasoning(self, state: State) -> None:
        state.reasoning_tokens = state.num_tokens if self._is_thinking(state) else 0


def _tag_prefix_length(text: str, start: int) -> int:
    """Length of the longest end of text[start:] with which a closing tag may begin."""
    for length in range(min(len(THINK_CLOSE) - 1, len(text) - start), 0, -1):
        if text.endswith(THINK_CLOSE[:length]):
            return length
    return 0
