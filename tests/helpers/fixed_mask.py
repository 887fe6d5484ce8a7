"""FixedMask: a TokenMask that always allows the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import NInferError, RequestError


def packed(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """Bit id & 31 of word id >> 5 for each of them."""
    words: NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words


@dataclass(slots=True)
class FixedMask:
    token_ids: tuple[int, ...]
    is_active: bool = True
    num_fills: int = field(default=0, init=False)

    def fill(self, words: NDArray[np.uint32]) -> None:
        self.num_fills += 1
        words[:] = packed(self.token_ids, 32 * words.size)

    def forced(self) -> tuple[int, ...]:
        return ()

    def failure(self) -> NInferError:
        return RequestError("constraint_dead_end", "nothing may come")
