"""The definition of attention to intervals of keys, against the definitions that it contains."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import dflash_attention, kv_write, paged_attention, paged_attention_decode
from tests.helpers.arrays import Float64Array, normal
from tests.helpers.tolerance import FLOAT64_ALGORITHM, assert_close

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


class Row:
    """`tokens` columns behind `start` keys; the same keys and values in pages in order."""

    def __init__(self, start: int, tokens: int) -> None:
        rng = np.random.default_rng([start, tokens])
        length = start + tokens
        self.q = normal(rng, tokens, HEADS, DIM)
        self.k, self.v = (normal(rng, length, KV_HEADS, DIM) for _ in range(2))
        self.table = np.arange(-(-length // PAGE_TOKENS))
        shape = (self.table.size, PAGE_TOKENS, KV_HEADS, DIM)
        self.k_pages, self.v_pages = np.zeros(shape), np.zeros(shape)
        slots = kv_write.slots_of(self.table, 0, length)
        kv_write.reference(self.k, self.v, self.k_pages, self.v_pages, slots)
        self.places = np.arange(start, length, dtype=np.int32)

    def attend(self, firsts: list[int], ordinals: list[int]) -> Float64Array:
        return paged_attention_decode.reference(
            self.q,
            self.k,
            self.v,
            firsts=np.array(firsts, np.int32),
            ordinals=np.array(ordinals, np.int32),
            scale=SCALE,
        ).astype(np.float64)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 17), (63, 2), (200, 5)])
def test_intervals_from_zero_are_causal_attention(start: int, tokens: int) -> None:
    row = Row(start, tokens)
    blocks = paged_attention.key_blocks(row.table, start + tokens)
    want = paged_attention.reference(
        row.q, row.k_pages, row.v_pages, blocks, start=start, scale=SCALE
    )
    got = row.attend([0] * tokens, row.places.tolist())
    assert_close(got, want, FLOAT64_ALGORITHM)


@pytest.mark.parametrize("window", [1, 5, 64, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("start", "tokens"), [(0, 3), (70, 16), (200, 17)])
def test_intervals_are_the_windows_of_a_block(
    start: int, tokens: int, is_causal: bool, window: int
) -> None:
    row = Row(start, tokens)
    want = dflash_attention.reference(
        row.q, row.k[start:], row.v[start:], row.k_pages, row.v_pages, row.table,
        start=start, window=window, is_causal=is_causal, scale=SCALE,
    )  # fmt: skip
    ends = row.places + (0 if is_causal else window - 1)
    got = row.attend(
        (row.places - window + 1).tolist(), np.minimum(ends, start + tokens - 1).tolist()
    )
    assert_close(got, want, FLOAT64_ALGORITHM)


def test_columns_that_see_no_key_are_zero() -> None:
    got = Row(10, 4).attend([0, 9, 3, -5], [-1, 8, 3, 0])
    assert (got[:2] == 0).all()
    assert (got[2:] != 0).all()
