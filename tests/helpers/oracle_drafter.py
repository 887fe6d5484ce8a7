"""OracleDrafter: drafts of a request whose answer a test knows, right as far as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import GenerationRequest
from ninfer.engine.speculation.drafter import Guess, Hope, MakeDrafter


class OracleDrafter:
    """Implements the engine's Drafter. Each draft has a random length and a random right part; when
    there is a proposal, it is drafted every other time."""

    def __init__(
        self, coming: Sequence[int], max_tokens: int, vocab_size: int, rng: random.Random
    ) -> None:
        self._coming = coming
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._rng = rng

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        size = self._rng.randint(0, min(room, self._max_tokens)) if room > 0 else 0
        if proposal and self._rng.random() < 0.5:
            return sure(proposal[:size], DraftSource.MODEL)
        coming = self._coming[len(accepted) :][:size]
        num_right = self._rng.choice((size, self._rng.randint(0, size)))
        return sure(
            token if place < num_right else self._rng.randrange(self._vocab_size)
            for place, token in enumerate(coming)
        )

    def hope(self, room: int) -> Hope:
        return Hope((1.0,) * self._rng.randint(0, max(0, min(room, self._max_tokens))))


def sure(token_ids: Iterable[int], source: DraftSource = DraftSource.NGRAM) -> Guess:
    """A guess that is drafted whole."""
    found = tuple(token_ids)
    return Guess(found, (1.0,) * len(found), source)


def oracles(
    answer_of: Callable[[GenerationRequest], Sequence[int]], vocab_size: int, seed: int
) -> MakeDrafter:
    """`answer_of` says what a request generates when it is alone."""
    rng = random.Random(seed)

    def make(request: GenerationRequest, max_tokens: int) -> OracleDrafter:
        return OracleDrafter(answer_of(request), max_tokens, vocab_size, rng)

    return make
