"""What an output session holds: its rules, its place in the text, what a preview shows.

Places are counted in characters of the decoded stream; output_session.py moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from ninfer.contract.generation import Channel, OutputDelta
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.stops import ROOT, StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """How a session reads its tokens.

    token_bytes        a token's bytes; b"" for one without text
    hidden_ids         tokens whose text is not shown (special tokens)
    stop_ids           tokens that end the output; never shown, counted
    stops              stop strings, or None
    min_tokens         stop strings that end within so many tokens are ordinary text
    splits_reasoning   False: everything is content
    opens_in_reasoning the prompt ends inside a thought
    reports_stop_token the token that ends the output is reported, without a text
    """

    token_bytes: Callable[[int], bytes]
    hidden_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    stops: StopMatcher | None = None
    min_tokens: int = 0
    includes_stop_string: bool = False
    stops_in_reasoning: bool = False
    splits_reasoning: bool = True
    opens_in_reasoning: bool = False
    reports_stop_token: bool = False


class Phase(Enum):
    START = auto()  # nothing but a possible beginning of <think> has come
    THOUGHT_LEAD = auto()  # in a thought, only newlines so far
    THOUGHT = auto()
    ANSWER_LEAD = auto()  # behind </think>, only white space so far
    ANSWER = auto()


class Waiting(NamedTuple):
    """A token to report once the stream is settled up to `end`, where the token's text ends."""

    token: GeneratedToken
    end: int
    has_text: bool


class Blank(NamedTuple):
    """White space of a thought, dropped should the thought end with it; newest part first.

    A linked list, because a model may go on writing blanks for long: each costs the same.
    """

    earlier: Blank | None
    start: int
    text: str
    tokens: tuple[GeneratedToken, ...]

    def parts(self) -> list[Blank]:
        """This part and all earlier ones in the order of the text."""
        parts: list[Blank] = []
        part: Blank | None = self
        while part is not None:
            parts.append(part)
            part = part.earlier
        return parts[::-1]


@dataclass(slots=True)
class State:
    """undecoded   bytes of an incomplete character
    length      characters decoded so far
    held        the last characters of the stream, neither shown nor dropped yet
    num_scanned how many of `held` have passed the tag search and the stop matcher
    node        the stop matcher's place behind them
    blank       white space before `held` that waits for the thought to go on
    thought_end place behind the closing tag, None while there was none
    """

    phase: Phase
    revision: int = 0
    num_tokens: int = 0
    reasoning_tokens: int = 0
    undecoded: bytes = b""
    length: int = 0
    held: str = ""
    num_scanned: int = 0
    node: int = ROOT
    thought_end: int | None = None
    waiting: tuple[Waiting, ...] = ()
    blank: Blank | None = None
    is_ended: bool = False

    def successor(self) -> State:
        return State(
            self.phase,
            self.revision + 1,
            self.num_tokens,
            self.reasoning_tokens,
            self.undecoded,
            self.length,
            self.held,
            self.num_scanned,
            self.node,
            self.thought_end,
            self.waiting,
            self.blank,
            self.is_ended,
        )

    @property
    def settled(self) -> int:
        """Everything before this place has been shown or dropped, or is blank."""
        return self.length - len(self.held)

    def drop(self, count: int) -> None:
        self.held = self.held[count:]
        self.num_scanned = max(0, self.num_scanned - count)


class Span(NamedTuple):
    """Shown characters [start, stop) of the stream."""

    start: int
    stop: int
    channel: Channel


@dataclass(slots=True)
class Output:
    """What a preview shows, by channel."""

    texts: dict[Channel, str] = field(default_factory=dict)
    tokens: dict[Channel, list[GeneratedToken]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def show(self, state: State, count: int, channel: Channel) -> None:
        """Move the first `count` held characters into `channel`, after blanks before them."""
        if count:
            if state.blank is not None:
                self._show_blank(state.blank)
                state.blank = None
            start = state.settled
            self.spans.append(Span(start, start + count, channel))
            self.texts[channel] = self.texts.get(channel, "") + state.held[:count]
            state.drop(count)

    def _show_blank(self, blank: Blank) -> None:
        parts = blank.parts()
        text = "".join(part.text for part in parts)
        self.texts["reasoning"] = self.texts.get("reasoning", "") + text
        for part in parts:
            for token in part.tokens:
                self.report(token, "reasoning")

    def report(self, token: GeneratedToken, channel: Channel) -> None:
        self.tokens.setdefault(channel, []).append(token)

    def channel_at(self, place: int) -> Channel | None:
        for span in self.spans:
            if span.start <= place < span.stop:
                return span.channel
        return None

    def deltas(self) -> tuple[OutputDelta, ...]:
        return tuple(
            OutputDelta(channel, self.texts.get(channel, ""), tuple(self.tokens.get(channel, ())))
            for channel in _CHANNELS
            if channel in self.texts or channel in self.tokens
        )


_CHANNELS: Final[tuple[Channel, ...]] = ("reasoning", "content")
"""In the order in which they can appear."""
