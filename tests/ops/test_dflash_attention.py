from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.arrays import FloatArray
from ninfer.contract.errors import OpContractError
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import dflash_attention, kv_write
from tests.helpers.arrays import Float64Array, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = 0.3


class Block:
    """A block of `size` tokens behind `start` tokens of context; free places hold NaN."""

    def __init__(self, start: int, size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.start, self.size = start, size
        self.q = normal(rng, size, HEADS, DIM)
        self.k = normal(rng, start + size, KV_HEADS, DIM)
        self.v = normal(rng, start + size, KV_HEADS, DIM)
        num_pages = max(1, -(-start // PAGE_TOKENS))
        self.table = rng.permutation(2 * num_pages)[:num_pages]
        shape = (2 * num_pages, PAGE_TOKENS, KV_HEADS, DIM)
        self.k_pages, self.v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
        if start:
            slots = kv_write.slots_of(self.table, 0, start)
            kv_write.reference(self.k[:start], self.v[:start], self.k_pages, self.v_pages, slots)

    def run(
        self,
        window: int | None = None,
        *,
        is_causal: bool = False,
        dtype: type[np.floating[Any]] = np.float64,
    ) -> FloatArray:
        return dflash_attention.reference(
            self.q.astype(dtype),
            self.k[self.start :].astype(dtype),
            self.v[self.start :].astype(dtype),
            self.k_pages.astype(dtype),
            self.v_pages.astype(dtype),
            self.table,
            start=self.start,
            window=window,
            is_causal=is_causal,
            scale=SCALE,
        )

    def write(self, ordinal: int, value: float) -> None:
        """A context key, and a value that shows whether it counts."""
        page, place = self.table[ordinal // PAGE_TOKENS], ordinal % PAGE_TOKENS
        self.v_pages[page, place] = value

    def naive(self, window: int | None, *, is_causal: bool) -> Float64Array:
        y = np.empty_like(self.q)
        for i in range(self.size):
            place = self.start + i
            visible = [
                j
                for j in range(self.start + self.size)
                if (window is None or abs(place - j) < window) and (j <= place or not is_causal)
            ]
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                scores = self.k[visible, kv] @ self.q[i, head] * SCALE
                weights = np.exp(scores - scores.max())
                y[i, head] = weights @ self.v[visible, kv] / weights.sum()
        return y


@given(
    start=st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
    size=st.sampled_from([1, 2, 5, 16]),
    window=st.sampled_from([None, 1, 2, 5, 64, 66, 500]),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(start=64, size=4, window=2, is_causal=False, seed=0)
def test_against_plain_loops(
    start: int, size: int, window: int | None, is_causal: bool, seed: int
) -> None:
    block = Block(start, size, seed)
    want = block.naive(window, is_causal=is_causal)
    assert_close(block.run(window, is_causal=is_causal), want, FLOAT64_ALGORITHM)
    got = block.run(window, is_causal=is_causal, dtype=np.float32)
    assert_close(got, want, FLOAT32_REDUCTION)


@pytest.mark.parametrize("query", [0, 1, 4])
def test_the_windows_edge(query: int) -> None:
    """A key at distance window - 1 counts, one at distance window does not."""
    start, window = 100, 20
    for distance, counts in ((window - 1, True), (window, False)):
        block = Block(start, 5, 1)
        plain = block.run(window)[query].copy()
        block.write(start + query - distance, 1e6)
        assert bool(np.abs(block.run(window)[query] - plain).max() > 1.0) is counts


def test_keys_that_are_too_far_for_all_are_not_even_read() -> None:
    block = Block(100, 3, 2)
    plain = block.run(30)
    for ordinal in range(71):
        block.write(ordinal, np.nan)
    np.testing.assert_array_equal(block.run(30), plain)
    block.write(71, np.nan)
    assert np.isnan(block.run(30)).any()


@pytest.mark.parametrize("window", [None, 20])
def test_what_comes_later_in_the_block_counts_unless_it_is_causal(window: int | None) -> None:
    block = Block(100, 4, 3)
    free, causal = block.run(window), block.run(window, is_causal=True)
    block.v[-1] = 1e6
    assert np.abs(block.run(window) - free).max(axis=(1, 2)).min() > 1.0
    again = block.run(window, is_causal=True)
    np.testing.assert_array_equal(again[:-1], causal[:-1])
    assert np.abs(again[-1] - causal[-1]).max() > 1.0


def test_inputs_stay_as_they_are() -> None:
    block = Block(70, 3, 4)
    before = [array.copy() for array in (block.q, block.k, block.v, block.k_pages, block.v_pages)]
    block.run(10, is_causal=True)
    for array, copy in zip(
        (block.q, block.k, block.v, block.k_pages, block.v_pages), before, strict=True
    ):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    "damage",
    [
        lambda block: setattr(block, "start", 129),
        lambda block: setattr(block, "start", -1),
        lambda block: setattr(block, "q", block.q[:, :3]),
        lambda block: setattr(block, "k", block.k[:-1]),
        lambda block: setattr(block, "k_pages", block.k_pages[:, :32]),
        lambda block: setattr(block, "v", block.v[..., :4]),
    ],
)
def test_contract(damage: Any) -> None:
    block = Block(100, 3, 5)
    damage(block)
    with pytest.raises(OpContractError, match="dflash_attention"):
        block.run()


def test_a_window_holds_a_token() -> None:
    with pytest.raises(OpContractError, match="window of 0"):
        Block(100, 3, 5).run(0)
