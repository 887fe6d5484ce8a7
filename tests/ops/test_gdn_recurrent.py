from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import gdn_recurrent
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.delta_rule import DeltaCase, delta_case
from tests.helpers.tolerance import FLOAT32_RECURRENCE, FLOAT64_ALGORITHM, assert_close

SHAPES = [(1, 1, 8, 8), (2, 2, 16, 24), (2, 3, 24, 16), (1, 4, 128, 128), (3, 1, 5, 7)]
"""(key heads, value heads a key head, key dim, value dim)"""


def strided_states(rng: np.random.Generator, case: DeltaCase) -> Float64Array:
    """[slots, Hv, dk, dv] as one layer of a pool of two; slot 0 is zero."""
    pool = normal(rng, 12, 2, *case.state.shape)
    pool[0] = 0.0
    layer: Float64Array = pool[:, 1]
    return layer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, FLOAT64_ALGORITHM), (np.float32, FLOAT32_RECURRENCE)]
)
def test_many_steps_against_plain_loops(
    shape: tuple[int, int, int, int], dtype: type[np.floating[Any]], tolerance: Any
) -> None:
    key_heads, ratio, key_dim, value_dim = shape
    cases = [
        delta_case(
            seed, 40, num_key_heads=key_heads, ratio=ratio, key_dim=key_dim, value_dim=value_dim
        )
        for seed in range(3)
    ]
    states = strided_states(np.random.default_rng(0), cases[0]).astype(dtype)
    untouched = states.copy()
    read, write = np.array([1, 2, 3]), np.array([4, 5, 6])
    for slot, case in zip(read, cases, strict=True):
        states[slot] = case.state
    outputs = []
    for t in range(40):
        q, k, v, g, beta = (
            np.stack([x[t] for x in inputs])
            for inputs in zip(*(case.inputs(dtype) for case in cases), strict=True)
        )
        outputs.append(gdn_recurrent.reference(q, k, v, g, beta, states, read, write))
        read, write = write, read
    for row, case in enumerate(cases):
        y, state = case.run()
        assert_close(np.stack(outputs)[:, row], y, tolerance)
        assert_close(states[read[row]], state, tolerance)
    others = [0, *range(7, 12)]
    assert np.array_equal(states[others], untouched[others])


def test_the_slot_that_is_read_stays() -> None:
    case = delta_case(0, 1)
    states = strided_states(np.random.default_rng(0), case)
    before = states.copy()
    gdn_recurrent.reference(
        case.q, case.k, case.v, case.g, case.beta, states, np.array([3]), np.array([4])
    )
    same = [slot for slot in range(12) if slot != 4]
    assert np.array_equal(states[same], before[same])


def test_rows_are_the_same_bits_in_any_company() -> None:
    case = delta_case(1, 8, num_key_heads=2, ratio=3, key_dim=32, value_dim=24)
    q, k, v, g, beta = case.inputs(np.float32)
    read = np.arange(1, 9)
    pool = f32(normal(np.random.default_rng(2), 20, 6, 32, 24))
    together = pool.copy()
    y = gdn_recurrent.reference(q, k, v, g, beta, together, read, read + 9)
    rng = np.random.default_rng(3)
    for size in (1, 2, 5, 8):
        rows = rng.permutation(8)[:size]
        other = pool.copy()
        part = gdn_recurrent.reference(
            q[rows], k[rows], v[rows], g[rows], beta[rows], other, read[rows], read[rows] + 9
        )
        assert np.array_equal(part, y[rows])
        assert np.array_equal(other[read[rows] + 9], together[read[rows] + 9])


def test_a_decay_that_wipes_the_state_does_not_overflow() -> None:
    case = delta_case(4, 1)
    states = np.full((2, *case.state.shape), np.float32(1e30))
    y = gdn_recurrent.reference(
        f32(case.q), f32(case.k), f32(case.v), np.full((1, 4), np.float32(-200.0)), f32(case.beta),
        states, np.array([0]), np.array([1]),
    )  # fmt: skip
    assert np.isfinite(y).all()
    assert np.abs(y).max() < 10.0


def test_contract() -> None:
    case = delta_case(0, 2)
    states, slots = np.zeros((3, *case.state.shape)), np.array([0, 1])
    good = {
        "q": case.q, "k": case.k, "v": case.v, "g": case.g, "beta": case.beta, "states": states,
        "read_slots": slots, "write_slots": slots,
    }  # fmt: skip

    def fails(text: str, **changes: NDArray[Any]) -> None:
        with pytest.raises(OpContractError, match=f"gdn_recurrent: {text}"):
            gdn_recurrent.reference(**{**good, **changes})

    fails("q has shape", q=case.q[:1])
    fails("3 value heads", v=case.v[:, :3])
    fails("g has shape", g=case.g[:, :1])
    fails("beta has shape", beta=case.beta[:1])
    fails("states has shape", states=states[:, :, :5])
    fails("states has shape", states=np.array(0.0))
    fails("read_slots", read_slots=np.array([0, 3]))
    fails("write_slots", write_slots=np.array([0]))
    fails("dtypes", g=f32(case.g))
