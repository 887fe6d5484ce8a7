"""Lets text of a channel pass: through the stop strings, white space at its end held back."""

from __future__ import annotations

from ninfer.contract.generation import Channel
from ninfer.frontend.output_shown import Output
from ninfer.frontend.output_state import Blank, SessionRules, State
from ninfer.frontend.stops import StopMatch, StopMatcher


class TextFlow:
    """Text of one channel on its way out."""

    def __init__(
        self,
        rules: SessionRules,
        channel: Channel,
        stops: StopMatcher | None,
        *,
        keeps_blanks: bool,
    ) -> None:
        """`keeps_blanks`: white space waits until more text follows it."""
        self._channel: Channel = channel
        self._stops = stops
        self._min_tokens = rules.min_tokens
        self._includes_stop_string = rules.includes_stop_string
        self._keeps_blanks = keeps_blanks

    def pass_on(
        self, state: State, output: Output, limit: int, *, is_final: bool
    ) -> StopMatch | None:
        """Show held text up to `limit`, which is text of this channel for sure.

        `is_final`: no more of the channel follows there, so no stop string that has begun ends.
        """
        stops = self._stops
        if stops is not None:
            match = self._scan(state, stops, limit)
            if match is not None:
                self._cut(state, output, match)
                return match
            if not is_final:
                limit -= stops.depth(state.node)
        else:
            state.num_scanned = limit
        if not self._keeps_blanks:
            output.show(state, limit, self._channel)
            return None
        text = state.held[:limit]
        num_shown = len(text.rstrip())
        if num_shown:
            output.show(state, num_shown, self._channel)
        if num_shown < limit:
            state.blank = Blank(state.blank, state.settled, text[num_shown:])
            state.drop(limit - num_shown)
        return None

    def _scan(self, state: State, stops: StopMatcher, limit: int) -> StopMatch | None:
        """Feed held characters up to `limit` to the matcher."""
        start, state.num_scanned = state.num_scanned, limit
        state.node, match = stops.feed(state.node, state.held, start, limit)
        while match is not None and state.num_tokens <= self._min_tokens:
            state.node, match = stops.feed(state.node, state.held, match.end, limit)
        return match

    def _cut(self, state: State, output: Output, match: StopMatch) -> None:
        """Show what precedes the match (or ends with it) and drop the rest with its tokens."""
        if self._includes_stop_string:
            stop = match.end
        else:
            stop = match.end - len(match.stop)
            if self._channel == "reasoning":
                stop = len(state.held[:stop].rstrip())
        output.show(state, stop, self._channel)
        if self._channel == "content":
            output.show_blank(state, self._channel)
        cut = state.settled
        state.blank = None
        state.unpark()
        state.waiting = tuple(waiting for waiting in state.waiting if waiting.end <= cut)
        state.undecoded = b""
        state.drop(len(state.held))
