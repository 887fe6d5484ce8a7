"""What one preview shows: stretches of text in their order, and the tokens that belong to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ninfer.contract.generation import CallMark, Channel, OutputDelta
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_state import Blank, State


@dataclass(slots=True)
class Segment:
    """Neighbouring text of one channel or of one call."""

    channel: Channel
    index: int | None = None
    name: str = ""
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    begins: bool = False
    ends: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.tokens or self.begins or self.ends)

    def delta(self) -> OutputDelta:
        mark = None
        if self.index is not None:
            mark = CallMark(self.index, self.name, self.begins, self.ends)
        return OutputDelta(self.channel, self.text, tuple(self.tokens), mark)


class _Span(NamedTuple):
    """Characters [start, stop) of the stream."""

    start: int
    stop: int
    segment: Segment


@dataclass(slots=True)
class Output:
    """What a preview shows."""

    segments: list[Segment] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)

    def show(self, state: State, count: int, channel: Channel) -> None:
        """Move the first `count` held characters into `channel`, after blanks before them."""
        if count:
            if state.blank is not None:
                self.show_blank(state, channel)
            segment = self.segment(channel)
            start = state.settled
            self.spans.append(_Span(start, start + count, segment))
            segment.text += state.held[:count]
            state.drop(count)

    def show_blank(self, state: State, channel: Channel) -> None:
        """Show the white space that waited."""
        parts: list[Blank] = [] if state.blank is None else state.blank.parts()
        state.blank = None
        for part in parts:
            segment = self.segment(channel)
            segment.text += part.text
            segment.tokens += part.tokens

    def drop_blank(self, blank: Blank, channel: Channel) -> None:
        """White space that waited is not shown, but a token may have shown text as well."""
        first = blank.parts()[0]
        if first.shared is not None:
            self.segment(channel).tokens.append(first.shared)

    def show_call(self, state: State, count: int, index: int, name: str) -> Segment:
        """The call that the first `count` held characters belong to; they are not dropped."""
        segment = self.segment("call", index, name)
        start = state.settled
        self.spans.append(_Span(start, start + count, segment))
        return segment

    def segment(self, channel: Channel, index: int | None = None, name: str = "") -> Segment:
        """The last one if it is of this channel and call, else a new one."""
        if self.segments:
            last = self.segments[-1]
            if last.channel == channel and last.index == index:
                return last
        segment = Segment(channel, index, name)
        self.segments.append(segment)
        return segment

    def segment_at(self, place: int) -> Segment | None:
        for span in self.spans:
            if span.start <= place < span.stop:
                return span.segment
        return None

    def deltas(self) -> tuple[OutputDelta, ...]:
        return tuple(segment.delta() for segment in self.segments if not segment.is_empty)
