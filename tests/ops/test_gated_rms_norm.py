from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import gated_rms_norm
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close


@pytest.mark.parametrize("dim", [8, 128])
def test_norm_first_gate_after(dim: int) -> None:
    rng = np.random.default_rng(dim)
    x, z, weight = normal(rng, 3, 4, dim), normal(rng, 3, 4, dim, scale=4.0), normal(rng, dim)
    want = np.empty_like(x)
    for t in range(3):
        for h in range(4):
            root = math.sqrt(float(np.mean(x[t, h] ** 2)) + 1e-6)
            for c in range(dim):
                gate = z[t, h, c] / (1.0 + math.exp(-z[t, h, c]))
                want[t, h, c] = weight[c] * x[t, h, c] / root * gate
    assert_close(gated_rms_norm.reference(x, z, weight, eps=1e-6), want, FLOAT64_ALGORITHM)
    got = gated_rms_norm.reference(f32(x), f32(z), f32(weight), eps=1e-6)
    assert_close(got, want, FLOAT32_REDUCTION)


def test_contract() -> None:
    x, weight = np.ones((3, 4, 8)), np.ones(8)
    with pytest.raises(OpContractError, match="gated_rms_norm: z"):
        gated_rms_norm.reference(x, x[:2], weight, eps=1e-6)
    with pytest.raises(OpContractError, match="gated_rms_norm: dtypes"):
        gated_rms_norm.reference(x, f32(x), weight, eps=1e-6)
    with pytest.raises(OpContractError, match="weight"):
        gated_rms_norm.reference(x, x, np.ones(7), eps=1e-6)
