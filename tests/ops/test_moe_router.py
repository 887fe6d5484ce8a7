from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import moe_router
from tests.helpers.arrays import f32
from tests.helpers.tolerance import FLOAT32_POINTWISE, FLOAT64_ALGORITHM, assert_close


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-90.0, -1.5, 0.0, 0.25, 1.0, 90.0]), min_size=5, max_size=5),
        min_size=1,
        max_size=9,
    ),
    k=st.integers(1, 5),
    renormalise=st.booleans(),
)
def test_best_first_ties_to_the_lower_id(
    rows: list[list[float]], k: int, renormalise: bool
) -> None:
    ids, weights = moe_router.reference(
        np.array(rows), experts_per_token=k, renormalise=renormalise
    )
    single, _ = moe_router.reference(
        f32(np.array(rows)), experts_per_token=k, renormalise=renormalise
    )
    for t, row in enumerate(rows):
        total = sum(math.exp(x - max(row)) for x in row)
        share = [math.exp(x - max(row)) / total for x in row]
        best = sorted(range(5), key=lambda e: (-share[e], e))[:k]
        norm = sum(share[e] for e in best) if renormalise else 1.0
        assert ids[t].tolist() == best
        assert_close(weights[t], np.array([share[e] / norm for e in best]), FLOAT64_ALGORITHM)
        assert len(set(single[t].tolist())) == k


def test_float32_weights() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 64))
    _, want = moe_router.reference(logits, experts_per_token=8, renormalise=True)
    _, got = moe_router.reference(f32(logits), experts_per_token=8, renormalise=True)
    assert got.dtype == np.float32
    assert_close(got, want, FLOAT32_POINTWISE)


@pytest.mark.parametrize("k", [0, 6])
def test_contract(k: int) -> None:
    with pytest.raises(OpContractError, match=f"moe_router: {k} of 5 experts"):
        moe_router.reference(np.ones((1, 5)), experts_per_token=k, renormalise=True)
