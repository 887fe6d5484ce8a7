"""KnownDrafter: drafts with exactly as many right tokens as a test wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ninfer.engine.speculation.drafter import Guess, Hope
from tests.helpers.oracle_drafter import sure


class KnownDrafter:
    """Implements the engine's Drafter for a request whose answer `coming` is known. Draft after
    draft, the next of `num_right` tokens are right and all others wrong."""

    def __init__(
        self, coming: Sequence[int], max_tokens: int, vocab_size: int, num_right: Iterator[int]
    ) -> None:
        self._coming = coming
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._num_right = num_right

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        size = max(0, min(room, self._max_tokens))
        coming = self._coming[len(accepted) :][:size]
        num_right = next(self._num_right)
        return sure(
            token if place < num_right else (token + 1) % self._vocab_size
            for place, token in enumerate(coming)
        )

    def hope(self, room: int) -> Hope:
        return Hope()
