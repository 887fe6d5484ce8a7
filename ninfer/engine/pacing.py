"""PrefillPace: how long prefill chunks take, and how many tokens fit into the decode gap.

The measure is seconds a token of whole chunks, smoothed. It includes the fixed cost of a chunk, so
a limit made from short chunks errs to the short side and grows with the next, longer one.
"""

from __future__ import annotations

from typing import Final

from ninfer.contract.cache import CHUNK_GRANULE

_WEIGHT: Final = 0.3


class PrefillPace:
    def __init__(self, max_gap_s: float | None) -> None:
        """`max_gap_s`: longest time a running stream may stand still for a chunk; None: any."""
        self._max_gap_s = max_gap_s
        self._token_s: float | None = None

    @property
    def tokens_s(self) -> float | None:
        """Prompt tokens computed a second; None before the first measure."""
        return 1.0 / self._token_s if self._token_s else None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A chunk was computed. Shorter ones than CHUNK_GRANULE say nothing about long ones."""
        if num_tokens < CHUNK_GRANULE:
            return
        token_s = seconds / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += _WEIGHT * (token_s - self._token_s)

    def chunk_limit(self) -> int | None:
        """Most tokens of a chunk beside running streams; None: no limit. Without a measure it is
        the shortest that gives one."""
        if self._max_gap_s is None:
            return None
        if self._token_s is None:
            return CHUNK_GRANULE
        return None if self._token_s <= 0.0 else int(self._max_gap_s / self._token_s)
