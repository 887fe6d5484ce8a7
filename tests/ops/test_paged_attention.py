from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.arrays import FloatArray
from ninfer.contract.errors import OpContractError
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import kv_write, paged_attention
from ninfer.ops.paged_attention import KEY_BLOCK_TOKENS
from tests.helpers.arrays import Float64Array, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close


def naive(
    q: Float64Array, k: Float64Array, v: Float64Array, start: int, scale: float
) -> Float64Array:
    """Query by query and head by head over plain [n, Hk, D] keys and values."""
    y = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        visible = start + token + 1
        for head in range(q.shape[1]):
            scores = k[:visible, head // group] @ q[token, head] * scale
            weights = np.exp(scores - scores.max())
            y[token, head] = weights @ v[:visible, head // group] / weights.sum()
    return y


class Paged:
    """Keys and values of one sequence in a pool whose free places hold NaN."""

    def __init__(self, k: Float64Array, v: Float64Array, order: list[int]) -> None:
        length = k.shape[0]
        num_pages = -(-length // PAGE_TOKENS)
        self.table = np.array([page for page in order if page < num_pages * 2][:num_pages])
        shape = (int(self.table.max()) + 1, PAGE_TOKENS, *k.shape[1:])
        self.k_pages, self.v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
        slots = kv_write.slots_of(self.table, 0, length)
        kv_write.reference(k, v, self.k_pages, self.v_pages, slots)

    def run(
        self, q: Float64Array, start: int, scale: float, dtype: type[np.floating[Any]] = np.float64
    ) -> FloatArray:
        return paged_attention.reference(
            q.astype(dtype),
            self.k_pages.astype(dtype),
            self.v_pages.astype(dtype),
            paged_attention.key_blocks(self.table, start + q.shape[0]),
            start=start,
            scale=scale,
        )


@given(
    start=st.sampled_from([0, 1, 5, 62, 63, 64, 65, 127, 128, 200]),
    count=st.sampled_from([1, 2, 7, 63, 64, 65, 129]),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3), (8, 4)]),
    head_dim=st.sampled_from([1, 8, 64, 128, 256]),
    seed=st.integers(0, 2**32 - 1),
)
@example(start=KEY_BLOCK_TOKENS - 3, count=7, heads=(4, 2), head_dim=8, seed=0)
@example(start=2 * KEY_BLOCK_TOKENS, count=1, heads=(4, 2), head_dim=8, seed=0)
@example(start=KEY_BLOCK_TOKENS - 1, count=1, heads=(4, 2), head_dim=8, seed=1)
@example(start=0, count=KEY_BLOCK_TOKENS + 1, heads=(2, 1), head_dim=4, seed=1)
def test_against_plain_loops(
    start: int, count: int, heads: tuple[int, int], head_dim: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    length = start + count
    q = normal(rng, count, heads[0], head_dim)
    k, v = normal(rng, length, heads[1], head_dim), normal(rng, length, heads[1], head_dim)
    scale = head_dim**-0.5
    want = naive(q, k, v, start, scale)
    num_pages = -(-length // PAGE_TOKENS)
    for order in (list(range(num_pages)), rng.permutation(2 * num_pages).tolist()):
        paged = Paged(k, v, order)
        assert_close(paged.run(q, start, scale), want, FLOAT64_ALGORITHM)
        got = paged.run(q, start, scale, np.float32)
        assert got.dtype == np.float32
        assert_close(got, want, FLOAT32_REDUCTION)


def test_scores_of_any_size_stay_finite() -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, 3, 4, 16, scale=1e4)
    k, v = normal(rng, 70, 2, 16, scale=1e4), normal(rng, 70, 2, 16)
    paged = Paged(k, v, [1, 0])
    assert_close(paged.run(q, 67, 0.25), naive(q, k, v, 67, 0.25), FLOAT64_ALGORITHM)
    assert np.isfinite(paged.run(q, 67, 0.25, np.float32)).all()


def test_pages_in_any_order_give_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 5, 4, 32), normal(rng, 300, 2, 32), normal(rng, 300, 2, 32)
    straight = Paged(k, v, [0, 1, 2, 3, 4]).run(q, 295, 0.2, np.float32)
    for order in ([4, 3, 2, 1, 0], [7, 2, 9, 0, 4], [5, 6, 7, 8, 9]):
        assert np.array_equal(Paged(k, v, order).run(q, 295, 0.2, np.float32), straight)


def test_contract() -> None:
    q, pages = np.ones((2, 4, 8)), np.ones((3, PAGE_TOKENS, 2, 8))
    blocks = paged_attention.key_blocks(np.array([0, 1]), 70)

    def fails(text: str, **changes: object) -> None:
        arguments = {"q": q, "k_pages": pages, "v_pages": pages, "blocks": blocks, "start": 68}
        with pytest.raises(OpContractError, match=f"paged_attention: .*{text}"):
            paged_attention.reference(**{**arguments, **changes}, scale=1.0)  # type: ignore[arg-type]

    fails("do not end at token 3", start=1)
    fails("do not end", blocks=())
    fails("3 query heads", q=np.ones((2, 3, 8)))
    fails("k_pages", q=np.ones((2, 4, 7)))
    fails("v_pages", v_pages=pages[:2])
    fails("dtypes", q=q.astype(np.float32))
    with pytest.raises(OpContractError, match="129 tokens do not fit 2 pages"):
        paged_attention.key_blocks(np.array([0, 1]), 129)
