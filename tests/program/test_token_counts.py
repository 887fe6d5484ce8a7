"""TokenCounts equals counting from scratch, and never writes what it gave away."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ninfer.program.token_counts import TokenCounts


@given(st.lists(st.integers(0, 9)))
def test_counts_equal_a_plain_count(token_ids: list[int]) -> None:
    counts = TokenCounts()
    for token_id in token_ids:
        counts.add(token_id)
    expected = sorted(Counter(token_ids).items())
    for counted in (counts, TokenCounts.of(token_ids)):
        pairs = zip(counted.token_ids.tolist(), counted.counts.tolist(), strict=True)
        assert list(pairs) == expected
        assert counted.token_ids.dtype == counted.counts.dtype == np.int32


def test_arrays_given_away_stay_as_they_were() -> None:
    counts = TokenCounts()
    counts.add(3)
    token_ids, multiplicities = counts.token_ids, counts.counts
    counts.add(3)
    counts.add(1)
    assert token_ids.tolist() == [3]
    assert multiplicities.tolist() == [1]


def test_a_copy_goes_its_own_way() -> None:
    counts = TokenCounts.of([1, 4])
    copied = counts.copy()
    copied.add(4)
    copied.add(2)
    counts.add(9)
    assert copied.token_ids.tolist() == [1, 2, 4]
    assert copied.counts.tolist() == [1, 1, 2]
    assert counts.token_ids.tolist() == [1, 4, 9]
    assert counts.counts.tolist() == [1, 1, 1]
