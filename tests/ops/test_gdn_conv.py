from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.errors import OpContractError
from ninfer.ops import gdn_conv
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, Tolerance, assert_close

CHANNELS = 6


def naive(x: Float64Array, weight: Float64Array, window: Float64Array) -> Float64Array:
    """[T, Cd] of one sequence; `window` [Cd, W - 1]."""
    width = weight.shape[1]
    y = np.empty_like(x)
    for channel in range(CHANNELS):
        series = [*window[channel].tolist(), *x[:, channel].tolist()]
        for token in range(x.shape[0]):
            taps = zip(weight[channel].tolist(), series[token : token + width], strict=True)
            total = sum(a * b for a, b in taps)
            y[token, channel] = total / (1.0 + math.exp(-total))
    return y


def strided_windows(rng: np.random.Generator, width: int) -> Float64Array:
    """[slots, Cd, W - 1] as one layer of a pool of three."""
    pool: Float64Array = normal(rng, 5, 3, CHANNELS, width - 1)[:, 1]
    return pool


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64, 65])
@pytest.mark.parametrize("read", [[2], [3, 0], [4, 4, 1]])
def test_against_plain_loops(width: int, num_tokens: int, read: list[int]) -> None:
    rng = np.random.default_rng(width)
    weight, windows = normal(rng, CHANNELS, width), strided_windows(rng, width)
    x = normal(rng, len(read), num_tokens, CHANNELS)
    write = [1, 2, 0][: len(read)]
    want = np.stack([naive(x[b], weight, windows[slot]) for b, slot in enumerate(read)])
    new = [np.concatenate((windows[slot].T, x[b]))[-(width - 1) :].T for b, slot in enumerate(read)]
    cases: list[tuple[type[np.floating[Any]], Tolerance]] = [
        (np.float64, FLOAT64_ALGORITHM),
        (np.float32, FLOAT32_REDUCTION),
    ]
    for dtype, tolerance in cases:
        pool: FloatArray = windows.astype(dtype)
        before = pool.copy()
        got = gdn_conv.reference(
            x.astype(dtype), weight.astype(dtype), pool, np.array(read), np.array(write)
        )
        assert got.dtype == dtype
        assert_close(got, want, tolerance)
        for slot in range(5):
            expected = new[write.index(slot)] if slot in write else before[slot]
            assert np.array_equal(pool[slot], expected.astype(dtype))


def test_one_row_may_continue_in_its_own_slot() -> None:
    rng = np.random.default_rng(0)
    weight, windows = normal(rng, CHANNELS, 4), strided_windows(rng, 4)
    x = normal(rng, 1, 10, CHANNELS)
    want = naive(x[0], weight, windows[2])
    slot = np.array([2])
    parts = [
        gdn_conv.reference(x[:, first:last], weight, windows, slot, slot)
        for first, last in ((0, 1), (1, 3), (3, 10))
    ]
    assert_close(np.concatenate(parts, axis=1)[0], want, FLOAT64_ALGORITHM)


def test_contract() -> None:
    x, weight, slot = np.ones((1, 2, 6)), np.ones((6, 4)), np.array([0])
    windows = np.ones((3, 6, 3))

    def fails(text: str, *arguments: NDArray[Any]) -> None:
        with pytest.raises(OpContractError, match=f"gdn_conv: {text}"):
            gdn_conv.reference(*arguments)

    fails("weight", x, np.ones((5, 4)), windows, slot, slot)
    fails("width 1", x, np.ones((6, 1)), windows, slot, slot)
    fails("windows", x, weight, np.ones((3, 6, 4)), slot, slot)
    fails("read_slots", x, weight, windows, np.array([3]), slot)
    fails("write_slots", x, weight, windows, slot, np.array([-1]))
    fails("write_slots", x, weight, windows, slot, np.array([0, 1]))
    fails("dtypes", f32(x), weight, windows, slot, slot)
