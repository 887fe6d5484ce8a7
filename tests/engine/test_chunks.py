from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.cache import CHUNK_GRANULE
from ninfer.engine.chunks import chunk_end


@given(
    num_prompt_tokens=st.integers(1, 3000),
    prefill_chunk=st.sampled_from((64, 128, 256, 1000, 2048)),
    stops=st.lists(st.integers(1, 2999), max_size=4, unique=True).map(sorted),
    limits=st.lists(st.none() | st.integers(0, 2000), min_size=1, max_size=6),
    first=st.integers(0, 2999),
)
def test_borders_are_the_prompts_own_or_granules(
    num_prompt_tokens: int,
    prefill_chunk: int,
    stops: list[int],
    limits: list[int | None],
    first: int,
) -> None:
    frontier, index = first % num_prompt_tokens, 0
    borders = set()
    while frontier < num_prompt_tokens:
        limit = limits[index % len(limits)]
        end = chunk_end(frontier, num_prompt_tokens, prefill_chunk, stops, limit)
        assert frontier < end <= min(num_prompt_tokens, frontier + prefill_chunk)
        is_own = end == num_prompt_tokens or end % prefill_chunk == 0 or end in stops
        assert is_own or (limit is not None and end % CHUNK_GRANULE == 0)
        if limit is not None:
            assert end - frontier <= max(limit, CHUNK_GRANULE)
        borders.add(end)
        frontier, index = end, index + 1
    passed = {stop for stop in stops if first % num_prompt_tokens < stop < num_prompt_tokens}
    passed |= set(range(0, num_prompt_tokens, prefill_chunk)) - set(
        range(first % num_prompt_tokens + 1)
    )
    assert passed <= borders


def test_limit_below_a_granule_still_reaches_the_next_one() -> None:
    assert chunk_end(0, 1000, 512, limit=1) == CHUNK_GRANULE
    assert chunk_end(CHUNK_GRANULE - 1, 1000, 512, limit=1) == CHUNK_GRANULE
    assert chunk_end(CHUNK_GRANULE + 5, 1000, 512, limit=200) == 2 * CHUNK_GRANULE
