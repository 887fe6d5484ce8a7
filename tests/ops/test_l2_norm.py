from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import l2_norm
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close


@pytest.mark.parametrize("size", [1, 24, 128])
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 1.0, 1e5])
def test_sum_and_epsilon_stand_under_the_root(size: int, magnitude: float) -> None:
    x = normal(np.random.default_rng(size), 4, 2, size, scale=magnitude)
    want = np.array([[0.5 * h / np.sqrt(np.sum(h * h) + 1e-6) for h in token] for token in x])
    assert_close(l2_norm.reference(x, scale=0.5), want, FLOAT64_ALGORITHM)
    assert_close(l2_norm.reference(f32(x), scale=0.5), want, FLOAT32_REDUCTION)
    assert_close(l2_norm.reference(x), 2.0 * want, FLOAT64_ALGORITHM)


def test_contract() -> None:
    with pytest.raises(OpContractError, match="l2_norm: dtype"):
        l2_norm.reference(np.ones((2, 2), np.int32))
