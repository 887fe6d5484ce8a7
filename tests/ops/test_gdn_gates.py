from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import gdn_gates
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_POINTWISE, FLOAT64_ALGORITHM, assert_close


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_against_plain_loops(scale: float) -> None:
    rng = np.random.default_rng(0)
    b, a = normal(rng, 9, 4, scale=scale), normal(rng, 9, 4, scale=scale)
    a_log, dt_bias = normal(rng, 4), normal(rng, 4)
    beta, g = np.empty((9, 4)), np.empty((9, 4))
    for t in range(9):
        for h in range(4):
            x = a[t, h] + dt_bias[h]
            beta[t, h] = 1.0 / (1.0 + math.exp(-b[t, h]))
            softplus = x if x > 30 else math.log1p(math.exp(x))
            g[t, h] = -math.exp(a_log[h]) * softplus
    got = gdn_gates.reference(b, a, a_log, dt_bias)
    assert_close(got[0], beta, FLOAT64_ALGORITHM)
    assert_close(got[1], g, FLOAT64_ALGORITHM)
    got = gdn_gates.reference(f32(b), f32(a), f32(a_log), f32(dt_bias))
    assert_close(got[0], beta, FLOAT32_POINTWISE)
    assert_close(got[1], g, FLOAT32_POINTWISE)
    assert (got[1] <= 0).all()


def test_contract() -> None:
    b, vector = np.ones((3, 4)), np.ones(4)
    with pytest.raises(OpContractError, match="gdn_gates: a has shape"):
        gdn_gates.reference(b, b[:2], vector, vector)
    with pytest.raises(OpContractError, match="gdn_gates: a_log"):
        gdn_gates.reference(b, b, np.ones(3), vector)
    with pytest.raises(OpContractError, match="gdn_gates: dt_bias"):
        gdn_gates.reference(b, b, vector, np.ones(3))
