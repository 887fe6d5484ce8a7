"""Guide: which token may come next in one answer, and what of it is forced.

    THOUGHT   inside a thought: anything, but no end of the answer while a grammar waits for its
              turn; behind the last token of a budget the closing text is forced
    FREE      anything; behind `trigger` (the mark that begins a tool call) its grammar holds
    BOUND     what the grammar allows; the answer may end where the grammar may

A grammar takes its turn with the first token behind the thought; the blank lines that the model is
used to there are forced. `after` makes successors and changes nothing, `commit` adopts one.
"""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import InvariantError, NInferError, RequestError
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.tokenizer import THINK_CLOSE

_LONGEST_CHARACTER: Final = 4
"""Bytes of UTF-8."""
_ALL: Final = np.uint32(0xFFFFFFFF)


class NotAllowed(InvariantError):
    """A token came that may not come."""


class Phase(Enum):
    THOUGHT = auto()
    FREE = auto()
    BOUND = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideRules:
    """How one answer is guided.

    token_bytes   a token's bytes
    encode        the tokens of a text, marks in it as characters
    end_ids       tokens that end the answer
    mute_ids      tokens that end a turn but not this answer: never inside a grammar
    min_tokens    the answer does not end before so many tokens, unless nothing else may come
    budget        most tokens of thought, or None
    closing       the tokens that end a thought at its budget
    lead          the tokens between a thought and an answer that a grammar holds for
    trigger       the token behind which the grammar holds, until it is complete; None: it holds for
                  the whole answer
    param         the field that the grammar came in, for errors
    """

    token_bytes: Callable[[int], bytes]
    encode: Callable[[str], tuple[int, ...]]
    end_ids: frozenset[int] = frozenset()
    mute_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    budget: int | None = None
    closing: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    trigger: int | None = None
    param: str | None = None


class GuideState(NamedTuple):
    """A place in an answer.

    tail       last bytes of the thought: it is not closed inside a character
    forced     tokens that must come next
    fed        tokens that the grammar is to take in at commit
    restarts   the grammar begins anew before them
    """

    phase: Phase
    num_tokens: int = 0
    num_thought: int = 0
    tail: bytes = b""
    forced: tuple[int, ...] = ()
    fed: tuple[int, ...] = ()
    restarts: bool = False
    is_closing: bool = False
    is_complete: bool = False


class Guide:
    """Implements contract TokenMask. `compile` makes the grammar's matcher, None for a guide that
    only keeps a budget; `prepare` is awaited before anything else."""

    def __init__(
        self,
        rules: GuideRules,
        compile: Callable[[], Awaitable[Matcher]] | None,
        *,
        is_thinking: bool,
    ) -> None:
        self._rules = rules
        self._ends = _bits(rules.end_ids)
        self._turn_ends = _bits(rules.end_ids | rules.mute_ids)
        self._compile = compile
        self._matcher: Matcher | None = None
        self._fresh: Matcher | None = None
        self._state = GuideState(self._answer_phase)
        if is_thinking:
            self._state = self._in_thought(self._state)

    @property
    def state(self) -> GuideState:
        return self._state

    async def prepare(self) -> None:
        """Compile the grammar. Raises RequestError."""
        if self._compile is not None:
            self._fresh = await self._compile()
            self._matcher = self._fresh.copy()

    @property
    def is_active(self) -> bool:
        return self.restricts_at(self._state)

    def restricts_at(self, state: GuideState) -> bool:
        """Whether the token behind a state is restricted."""
        return (
            bool(state.forced)
            or state.phase is Phase.BOUND
            or (state.phase is Phase.THOUGHT and self._holds_grammar)
        )

    def fill(self, words: NDArray[np.uint32]) -> None:
        self.fill_at(self._state, words)

    def fill_at(self, state: GuideState, words: NDArray[np.uint32]) -> None:
        """Allow what may come behind the present state or one of its successors."""
        if state.forced:
            words[:] = 0
            _allow(words, _bits(state.forced[:1]))
        elif state.phase is Phase.BOUND:
            self._fill_bound(state, words)
        else:
            words[:] = _ALL
            _forbid(words, self._turn_ends)

    def forced(self) -> tuple[int, ...]:
        return self.forced_at(self._state)

    def forced_at(self, state: GuideState) -> tuple[int, ...]:
        """What must come behind the present state or one of its successors."""
        if state.forced:
            return state.forced
        if state.phase is Phase.BOUND and self._matcher is not None:
            matcher = self._matcher_at(state)
            forced = matcher.forced()
            return tuple(forced) if forced and matcher.accepts(forced) else ()
        return ()

    def failure(self) -> NInferError:
        if self.has_failed():
            return RequestError(
                "schema_too_complex",
                "the grammar became too complex for what was generated",
                self._rules.param,
            )
        return RequestError(
            "constraint_dead_end",
            "no token can follow: the grammar, stop tokens and biases of the request exclude all",
            self._rules.param,
        )

    def has_failed(self) -> bool:
        """Whether the grammar has exceeded a bound of the library, so that nothing may come."""
        return self._matcher is not None and self._matcher.fails()

    def stays_free_after(self, token_id: int) -> bool:
        """Whether the token behind `token_id` is surely not restricted."""
        state, rules = self._state, self._rules
        if self.is_active or token_id == rules.trigger:
            return False
        if state.phase is Phase.THOUGHT and rules.budget is not None:
            return state.num_thought + 1 < rules.budget
        return rules.budget is None or rules.budget > 1 or state.is_closing

    def after(self, state: GuideState, token_id: int, *, thinks: bool) -> GuideState:
        """The state behind `token_id`; `thinks`: what comes next belongs to a thought. Raises
        NotAllowed for a token that may not come."""
        state = state._replace(num_tokens=state.num_tokens + 1)
        if state.forced:
            return self._after_forced(state, token_id, thinks=thinks)
        match state.phase:
            case Phase.THOUGHT:
                return self._after_thought(state, token_id, thinks=thinks)
            case Phase.FREE:
                return self._after_free(state, token_id, thinks=thinks)
            case Phase.BOUND:
                return self._after_bound(state, token_id)

    def commit(self, state: GuideState) -> None:
        """Adopt a successor of the present state. Raises NInferError when the grammar fails."""
        if state.restarts and self._fresh is not None:
            self._matcher = self._fresh.copy()
        if self._matcher is not None and not self._matcher.consume(state.fed):
            if self.has_failed():
                raise self.failure()
            raise InvariantError("the grammar does not take the committed tokens")
        self._state = state._replace(fed=(), restarts=False)

    @property
    def decides_ends(self) -> bool:
        """Its masks say where the answer may end, `min_tokens` included."""
        return self._holds_grammar

    @property
    def _holds_grammar(self) -> bool:
        """The grammar holds for the whole answer."""
        return self._compile is not None and self._rules.trigger is None

    @property
    def _answer_phase(self) -> Phase:
        return Phase.BOUND if self._holds_grammar else Phase.FREE

    def _fill_bound(self, state: GuideState, words: NDArray[np.uint32]) -> None:
        rules, matcher = self._rules, self._matcher_at(state)
        matcher.fill(words)
        _forbid(words, self._turn_ends)
        if rules.trigger is None and matcher.is_accepting:
            is_early = state.num_tokens < rules.min_tokens
            if not is_early or not words.any():
                _allow(words, self._ends)

    def _after_forced(self, state: GuideState, token_id: int, *, thinks: bool) -> GuideState:
        if token_id != state.forced[0]:
            raise NotAllowed(f"token {token_id} came where {state.forced[0]} was forced")
        state = state._replace(forced=state.forced[1:])
        if state.phase is Phase.THOUGHT and not thinks:
            return state._replace(phase=self._answer_phase)
        return state

    def _after_thought(self, state: GuideState, token_id: int, *, thinks: bool) -> GuideState:
        rules = self._rules
        tail = (state.tail + rules.token_bytes(token_id))[-_LONGEST_CHARACTER:]
        state = state._replace(num_thought=state.num_thought + 1, tail=tail)
        if not thinks:
            return self._after_close(state, token_id)
        if rules.budget is None or state.is_closing or state.num_thought < rules.budget:
            return state
        if _is_cut(tail) and state.num_thought < rules.budget + _LONGEST_CHARACTER:
            return state
        return state._replace(forced=rules.closing, is_closing=True)

    def _after_close(self, state: GuideState, token_id: int) -> GuideState:
        """The thought has ended by itself. A token that also begins the answer is fed to the
        grammar in other tokens of the same text."""
        state = state._replace(phase=self._answer_phase)
        if not self._holds_grammar:
            return state
        rest = _behind_close(self._rules.token_bytes(token_id)).lstrip()
        if not rest:
            return state._replace(forced=self._rules.lead)
        return self._fed(state, self._rules.encode(rest.decode("utf-8", "replace")))

    def _after_free(self, state: GuideState, token_id: int, *, thinks: bool) -> GuideState:
        if token_id == self._rules.trigger and not thinks:
            return state._replace(phase=Phase.BOUND, restarts=True, fed=())
        if thinks and self._rules.budget is not None and not state.is_closing:
            return self._in_thought(state)
        return state

    def _in_thought(self, state: GuideState) -> GuideState:
        """At the beginning of a thought; one without a budget is closed at once."""
        if self._rules.budget == 0:
            return state._replace(phase=Phase.THOUGHT, forced=self._rules.closing, is_closing=True)
        return state._replace(phase=Phase.THOUGHT)

    def _after_bound(self, state: GuideState, token_id: int) -> GuideState:
        if token_id in self._rules.end_ids:
            return state
        return self._fed(state, (token_id,))

    def _fed(self, state: GuideState, token_ids: tuple[int, ...]) -> GuideState:
        fed = (*state.fed, *token_ids)
        matcher = self._start_of(state)
        is_complete = matcher.completes_with(fed)
        if is_complete is None:
            raise NotAllowed(f"tokens {token_ids} are not what the grammar allows")
        if is_complete and self._rules.trigger is not None:
            return state._replace(fed=fed, phase=Phase.FREE)
        return state._replace(fed=fed, is_complete=is_complete)

    def _start_of(self, state: GuideState) -> Matcher:
        """The place in the grammar from which a state is fed."""
        if self._matcher is None or self._fresh is None:
            raise InvariantError("a guide was used before it was prepared")
        return self._fresh if state.restarts else self._matcher

    def _matcher_at(self, state: GuideState) -> Matcher:
        """The place in the grammar behind a state, to be read only."""
        matcher = self._start_of(state)
        if state.fed:
            matcher = matcher.copy()
            matcher.consume(state.fed)
        return matcher


def _is_cut(data: bytes) -> bool:
    """Whether the last character is not complete."""
    return codecs.utf_8_decode(data, "replace", False)[1] < len(data)


def _behind_close(data: bytes) -> bytes:
    """What a token that completes </think> has behind it; the mark's beginning may be in the
    tokens before."""
    mark = THINK_CLOSE.encode()
    if mark in data:
        return data.partition(mark)[2]
    return data.partition(b">")[2]


def _bits(token_ids: Iterable[int]) -> tuple[tuple[int, np.uint32], ...]:
    """(word, bits) of tokens in a mask."""
    words: dict[int, int] = {}
    for token_id in token_ids:
        words[token_id >> 5] = words.get(token_id >> 5, 0) | 1 << (token_id & 31)
    return tuple((index, np.uint32(bits)) for index, bits in words.items())


def _allow(words: NDArray[np.uint32], bits: tuple[tuple[int, np.uint32], ...]) -> None:
    for index, allowed in bits:
        words[index] |= allowed


def _forbid(words: NDArray[np.uint32], bits: tuple[tuple[int, np.uint32], ...]) -> None:
    for index, forbidden in bits:
        words[index] &= ~forbidden
