from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import gdn_chunked
from tests.helpers.arrays import f32
from tests.helpers.delta_rule import DeltaCase, delta_case
from tests.helpers.tolerance import FLOAT32_RECURRENCE, FLOAT64_ALGORITHM, Tolerance, assert_close

LENGTHS = [1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 200]


def run(case: DeltaCase, dtype: type[np.floating[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    state = case.state.astype(dtype)
    before = state.copy()
    y, after = gdn_chunked.reference(*case.inputs(dtype), state)
    assert np.array_equal(state, before)
    assert y.dtype == after.dtype == dtype
    return y, after


def check(case: DeltaCase, tolerance: Tolerance = FLOAT32_RECURRENCE) -> None:
    want_y, want_state = case.run()
    y, state = run(case, np.float64)
    assert_close(y, want_y, FLOAT64_ALGORITHM)
    assert_close(state, want_state, FLOAT64_ALGORITHM)
    y, state = run(case, np.float32)
    assert_close(y, want_y, tolerance)
    assert_close(state, want_state, tolerance)


@given(
    num_tokens=st.sampled_from(LENGTHS),
    num_key_heads=st.integers(1, 2),
    ratio=st.integers(1, 4),
    dims=st.sampled_from([(8, 8), (16, 24), (24, 16), (1, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
@example(num_tokens=129, num_key_heads=1, ratio=2, dims=(128, 128), seed=0)
def test_equals_the_recurrence(
    num_tokens: int, num_key_heads: int, ratio: int, dims: tuple[int, int], seed: int
) -> None:
    check(
        delta_case(
            seed,
            num_tokens,
            num_key_heads=num_key_heads,
            ratio=ratio,
            key_dim=dims[0],
            value_dim=dims[1],
        )
    )


@pytest.mark.parametrize("num_tokens", [64, 130])
def test_repeated_keys_do_not_cancel(num_tokens: int) -> None:
    # One key for ever, full strength, no decay: powers of A would reach 1e18.
    case = delta_case(0, num_tokens)
    key = np.broadcast_to(case.k[:1], case.k.shape)
    still, full = np.zeros_like(case.g), np.ones_like(case.beta)
    check(DeltaCase(case.q, key, case.v, still, full, case.state))


@pytest.mark.parametrize("strength", [-50.0, -1000.0])
def test_strong_decays_neither_overflow_nor_blur_what_follows(strength: float) -> None:
    case = delta_case(1, 150)
    g = case.g.copy()
    g[::3] = strength
    check(DeltaCase(case.q, case.k, case.v, g, case.beta, case.state))
    g[:] = case.g
    g[:40] = strength
    check(DeltaCase(case.q, case.k, case.v, g, case.beta, case.state))


def test_large_values() -> None:
    case = delta_case(2, 100)
    big = DeltaCase(case.q, case.k, case.v * 2.0**20, case.g, case.beta, case.state * 2.0**20)
    check(big, Tolerance(2.0**20 * FLOAT32_RECURRENCE.absolute, FLOAT32_RECURRENCE.relative))


def test_a_sequence_may_be_cut_anywhere() -> None:
    case = delta_case(3, 200)
    want_y, want_state = case.run()
    for cut in (1, 63, 64, 100, 199):
        head = DeltaCase(
            case.q[:cut], case.k[:cut], case.v[:cut], case.g[:cut], case.beta[:cut], case.state
        )
        y0, state = run(head, np.float64)
        tail = DeltaCase(
            case.q[cut:], case.k[cut:], case.v[cut:], case.g[cut:], case.beta[cut:], state
        )
        y1, state = run(tail, np.float64)
        assert_close(np.concatenate((y0, y1)), want_y, FLOAT64_ALGORITHM)
        assert_close(state, want_state, FLOAT64_ALGORITHM)


def test_contract() -> None:
    case = delta_case(0, 3)
    good = {
        "q": case.q, "k": case.k, "v": case.v, "g": case.g, "beta": case.beta, "state": case.state
    }  # fmt: skip

    def fails(text: str, **changes: NDArray[Any]) -> None:
        with pytest.raises(OpContractError, match=f"gdn_chunked: {text}"):
            gdn_chunked.reference(**{**good, **changes})

    fails("k has shape", k=case.k[:0])
    fails("q has shape", q=case.q[:1])
    fails("3 value heads", v=case.v[:, :3])
    fails("g has shape", g=case.g[:2])
    fails("beta has shape", beta=case.beta[:, :1])
    fails("state has shape", state=case.state[:1])
    fails("dtypes", v=f32(case.v))
