from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import rms_norm
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close


def naive(x: Float64Array, weight: Float64Array, eps: float, offset: float) -> Float64Array:
    y = np.empty_like(x)
    for row in range(x.shape[0]):
        root = math.sqrt(sum(v * v for v in x[row].tolist()) / x.shape[1] + eps)
        for column in range(x.shape[1]):
            y[row, column] = x[row, column] / root * (offset + weight[column])
    return y


@pytest.mark.parametrize("columns", [1, 7, 64, 384])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_against_plain_loops(columns: int, offset: float, scale: float) -> None:
    rng = np.random.default_rng(columns)
    x, weight = normal(rng, 5, columns, scale=scale), normal(rng, columns)
    want = naive(x, weight, 1e-6, offset)
    assert_close(rms_norm.reference(x, weight, eps=1e-6, offset=offset), want, FLOAT64_ALGORITHM)
    got = rms_norm.reference(f32(x), f32(weight), eps=1e-6, offset=offset)
    assert got.dtype == np.float32
    assert_close(got, want, FLOAT32_REDUCTION)


def test_weight_may_differ_by_head() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 4, 3, 8), normal(rng, 3, 8)
    got = rms_norm.reference(x, weight, eps=1e-6)
    for head in range(3):
        assert_close(got[:, head], naive(x[:, head], weight[head], 1e-6, 0.0), FLOAT64_ALGORITHM)


def test_a_row_does_not_depend_on_the_others_and_the_input_stays() -> None:
    x = f32(normal(np.random.default_rng(1), 9, 384))
    before, weight = x.copy(), np.ones(384, np.float32)
    whole = rms_norm.reference(x, weight, eps=1e-6)
    for row in range(9):
        alone = rms_norm.reference(x[row : row + 1], weight, eps=1e-6)
        assert np.array_equal(alone[0], whole[row])
    assert np.array_equal(x, before)


def test_zeros_stay_zeros() -> None:
    y = rms_norm.reference(np.zeros((2, 8), np.float32), np.ones(8, np.float32), eps=1e-6)
    assert not y.any()


def test_contract() -> None:
    x = np.ones((2, 8), np.float32)
    with pytest.raises(OpContractError, match=r"rms_norm: weight has shape \(7,\)"):
        rms_norm.reference(x, np.ones(7, np.float32), eps=1e-6)
    with pytest.raises(OpContractError, match="rms_norm: dtypes"):
        rms_norm.reference(x, np.ones(8), eps=1e-6)
    with pytest.raises(OpContractError, match="rms_norm: eps"):
        rms_norm.reference(x, np.ones(8, np.float32), eps=0.0)
