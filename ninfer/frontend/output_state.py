"""What an output session holds: its rules, its place in the text, what a preview shows.

Places are counted in characters of the decoded stream; output_session.py moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.stops import ROOT, StopMatcher
from ninfer.frontend.tool_calls.call_state import CallRules, CallState

_MOST_WAITING: Final = 32


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
    calls              None: calls are text
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
    calls: CallRules | None = None
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
    start: int
    end: int
    has_text: bool


class Blank(NamedTuple):
    """White space that is dropped should what comes next be no more text of its channel; newest
    part first.

    A linked list, because a model may go on writing blanks for long: each costs the same.
    `shared` is the first of the tokens if text before the blanks, which was shown, is its as well.
    """

    earlier: Blank | None
    start: int
    text: str
    tokens: tuple[GeneratedToken, ...] = ()
    shared: GeneratedToken | None = None

    def parts(self) -> list[Blank]:
        """This part and all earlier ones in the order of the text."""
        parts: list[Blank] = []
        part: Blank | None = self
        while part is not None:
            parts.append(part)
            part = part.earlier
        return parts[::-1]


class Parked(NamedTuple):
    """Tokens that wait for long, as while a call is read; newest first. `first_end` is the end of
    the oldest."""

    earlier: Parked | None
    waiting: tuple[Waiting, ...]
    first_end: int


@dataclass(slots=True)
class State:
    """undecoded   bytes of an incomplete character
    length      characters decoded so far
    held        the last characters of the stream, neither shown nor dropped yet
    num_scanned how many of `held` have passed the tag search and the stop matcher
    node        the stop matcher's place behind them
    blank       white space before `held` that waits for its channel to go on
    thought_end place behind the closing tag, None while there was none
    parked      tokens that came before those of `waiting`
    calls       None when calls are text
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
    parked: Parked | None = None
    calls: CallState | None = None

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
            self.parked,
            None if self.calls is None else self.calls.successor(),
        )

    def wait_for(self, token: Waiting) -> None:
        """`token` is reported once its text is settled."""
        if len(self.waiting) == _MOST_WAITING:
            oldest = self.parked.first_end if self.parked else self.waiting[0].end
            self.parked = Parked(self.parked, self.waiting, oldest)
            self.waiting = ()
        self.waiting += (token,)

    def unpark(self) -> None:
        """All tokens that wait stand in `waiting`."""
        groups, parked = [self.waiting], self.parked
        while parked is not None:
            groups.append(parked.waiting)
            parked = parked.earlier
        self.waiting = tuple(token for group in reversed(groups) for token in group)
        self.parked = None

    @property
    def settled(self) -> int:
        """Everything before this place has been shown or dropped, or is blank."""
        return self.length - len(self.held)

    def drop(self, count: int) -> None:
        self.held = self.held[count:]
        self.num_scanned = max(0, self.num_scanned - count)
        if self.calls is not None:
            self.calls.drop(count)

    @property
    def reportable(self) -> int:
        """Tokens that end before this place can be reported: those of settled text, and of a call
        that is shown while it is read."""
        calls = self.calls
        if calls is None or calls.reader is None or not calls.is_shown:
            return self.settled
        return self.settled + calls.reader.place
