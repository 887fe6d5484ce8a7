"""How often each token was generated: the input of presence, frequency and repetition penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.contract.arrays import IntArray


class TokenCounts:
    """Distinct token ids, ascending, with their counts. The arrays are replaced, never written, so
    a launched unit keeps what it was given."""

    def __init__(self) -> None:
        self.token_ids: IntArray = np.empty(0, dtype=np.int32)
        """[m] int32, ascending"""
        self.counts: IntArray = np.empty(0, dtype=np.int32)
        """[m] int32, each >= 1"""

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> TokenCounts:
        """As after adding each of these."""
        counted = cls()
        distinct, counts = np.unique(np.array(token_ids, np.int32), return_counts=True)
        counted.token_ids, counted.counts = distinct, counts.astype(np.int32)
        return counted

    def copy(self) -> TokenCounts:
        """Another one that goes on from here."""
        copied = TokenCounts()
        copied.token_ids, copied.counts = self.token_ids, self.counts
        return copied

    def add(self, token_id: int) -> None:
        index = int(np.searchsorted(self.token_ids, token_id))
        if index < self.token_ids.shape[0] and self.token_ids[index] == token_id:
            self.counts = self.counts.copy()
            self.counts[index] += 1
        else:
            self.token_ids = np.insert(self.token_ids, index, token_id)
            self.counts = np.insert(self.counts, index, 1)
