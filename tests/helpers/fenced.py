"""Device buffers whose surroundings and contents show who wrote them."""

from __future__ import annotations

from typing import Any

import numpy as np

FENCE_BYTES = 256
POISON = 0xA5


class Fenced:
    """A poisoned array [shape] with poisoned bytes before and behind it."""

    def __init__(self, cp: Any, shape: tuple[int, ...], dtype: str) -> None:
        self._cp = cp
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._buffer = cp.full(size + 2 * FENCE_BYTES, POISON, cp.uint8)
        inner = self._buffer[FENCE_BYTES : FENCE_BYTES + size]
        self.array = inner.view(dtype).reshape(shape)

    def read(self) -> Any:
        """Its contents as a NumPy array; fails when a byte outside was written."""
        buffer = self._cp.asnumpy(self._buffer)
        assert (buffer[:FENCE_BYTES] == POISON).all(), "bytes in front were written"
        assert (buffer[-FENCE_BYTES:] == POISON).all(), "bytes behind were written"
        return self._cp.asnumpy(self.array)
