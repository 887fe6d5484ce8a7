"""OracleDrafter: drafts of a request whose answer a test knows, right as far as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ninfer.contract.generation import GenerationRequest
from ninfer.engine.speculation.drafter import MakeDrafter


class OracleDrafter:
    """Implements the engine's Drafter. Each draft has a random length and a random right part."""

    def __init__(
        self, coming: Sequence[int], max_tokens: int, vocab_size: int, rng: random.Random
    ) -> None:
        self._coming = coming
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._rng = rng

    def draft(self, accepted: list[int], num_rows: int, room: int) -> tuple[int, ...]:
        size = self._rng.randint(0, min(room, self._max_tokens)) if room > 0 else 0
        coming = self._coming[len(accepted) :][:size]
        num_right = self._rng.choice((size, self._rng.randint(0, size)))
        return tuple(
            token if place < num_right else self._rng.randrange(self._vocab_size)
            for place, token in enumerate(coming)
        )

    def note(self, num_drafted: int, num_right: int) -> None:
        """It learns nothing."""


def oracles(
    answer_of: Callable[[GenerationRequest], Sequence[int]], vocab_size: int, seed: int
) -> MakeDrafter:
    """`answer_of` says what a request generates when it is alone."""
    rng = random.Random(seed)

    def make(request: GenerationRequest, max_tokens: int) -> OracleDrafter:
        return OracleDrafter(answer_of(request), max_tokens, vocab_size, rng)

    return make
