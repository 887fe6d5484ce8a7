"""Where a prefill chunk ends. Pure.

Borders are a function of the prompt alone: multiples of the chunk size from 0, and its stops. A
limit cuts further only at multiples of CHUNK_GRANULE, where cutting changes no bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ninfer.contract.cache import CHUNK_GRANULE


def chunk_end(
    frontier: int,
    num_prompt_tokens: int,
    prefill_chunk: int,
    stops: Sequence[int] = (),
    limit: int | None = None,
) -> int:
    """The end of the chunk that begins at `frontier` < `num_prompt_tokens`.

    stops   ascending frontiers at which a chunk ends in any case
    limit   most tokens, except that the next multiple of CHUNK_GRANULE is always reached
    """
    end = min(num_prompt_tokens, (frontier // prefill_chunk + 1) * prefill_chunk)
    next_stop = bisect_right(stops, frontier)
    if next_stop < len(stops):
        end = min(end, stops[next_stop])
    if limit is not None:
        cut = max((frontier + limit) // CHUNK_GRANULE, frontier // CHUNK_GRANULE + 1)
        end = min(end, cut * CHUNK_GRANULE)
    return end
