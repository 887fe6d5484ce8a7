"""Drafter: what guesses the tokens of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import GenerationRequest


class Proposal(NamedTuple):
    """What the draft model guesses to follow the first `num_accepted` tokens of an answer."""

    num_accepted: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """What may come next.

    worths   [i] how probably token i and all before it are right; never rising
    """

    token_ids: tuple[int, ...]
    worths: tuple[float, ...]
    source: DraftSource


NO_GUESS: Final = Guess((), (), DraftSource.NGRAM)


@dataclass(frozen=True, slots=True)
class Hope:
    """What proposals of the draft model for the round after this one would be worth.

    worths     as of a Guess; empty for a row that needs none
    is_probe   one is to be made in any case, to see how good they are
    """

    worths: tuple[float, ...] = ()
    is_probe: bool = False


class Drafter(Protocol):
    """Lives from a request's first decode step to its end. It judges by what came of its guesses,
    whether they were drafted or not."""

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        """What may follow prompt and `accepted`, which only grows, at most `room` tokens. The draft
        model proposes `proposal`, of which nothing may be left."""

    def hope(self, room: int) -> Hope:
        """For the round after the one that was guessed last."""


MakeDrafter: TypeAlias = Callable[[GenerationRequest, int], Drafter]
"""From a request and the most tokens it may draft."""
