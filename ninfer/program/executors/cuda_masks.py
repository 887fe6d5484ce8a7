"""MaskFiller: the masks of a unit's rows, filled on the host while the device works.

A mask mostly takes a tenth of what handing it to a thread and back does, so quick ones are filled
where they are asked for. One that was slow lately goes to a thread, with all beside it: the loop is
never held for longer than a few of the quick ones take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.units import SampleRow

MASK_THREADS: Final = 4
"""Requests of a unit whose masks are filled at once."""
QUICK_S: Final = 300e-6
"""Most time that the masks of a unit may be expected to take where they are asked for."""
_FORGETS: Final = 0.8
"""Share of the slowest mask's time that is still expected a mask later."""


class MaskFiller:
    """Owns its threads. `words` uint32 [rows, words of a mask]: nothing that is queued may copy
    from it while masks are filled."""

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self._words = words
        self._threads = ThreadPoolExecutor(MASK_THREADS, "ninfer-masks")
        self._expected_s = QUICK_S

    async def fill(
        self, samples: Sequence[SampleRow], num_columns: int = 1, *, is_new: bool = False
    ) -> None:
        """Fill the masks of the rows that have one. `num_columns` neighbouring samples belong to
        one request, whose masks may share what they are computed with: they are filled in order.

        is_new   nothing is known of how long they take
        """
        requests = [
            [
                place
                for place in range(first, first + num_columns)
                if samples[place].mask is not None
            ]
            for first in range(0, len(samples), num_columns)
        ]
        masked = [places for places in requests if places]
        num_masks = sum(map(len, masked))
        if not is_new and num_masks * self._expected_s < QUICK_S:
            for places in masked:
                self._fill_some(samples, places)
            return
        loop, parts = asyncio.get_running_loop(), min(len(masked), MASK_THREADS)
        await asyncio.gather(
            *(
                loop.run_in_executor(
                    self._threads, self._fill_some, samples, [*chain(*masked[part::parts])]
                )
                for part in range(parts)
            )
        )

    def close(self) -> None:
        self._threads.shutdown()

    def _fill_some(self, samples: Sequence[SampleRow], places: Sequence[int]) -> None:
        """From any thread. What it learns may be lost to another thread's, which does no harm."""
        for place in places:
            mask = samples[place].mask
            if mask is not None:
                started = perf_counter()
                mask.fill(self._words[place])
                self._expected_s = max(perf_counter() - started, self._expected_s * _FORGETS)
