from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import swiglu
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_POINTWISE, FLOAT64_ALGORITHM, assert_close


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_silu_of_the_first_half_times_the_second(scale: float) -> None:
    x = normal(np.random.default_rng(0), 5, 14, scale=scale)
    want = np.array(
        [
            [g / (1.0 + math.exp(-g)) * u for g, u in zip(r[:7], r[7:], strict=True)]
            for r in x.tolist()
        ]
    )
    assert_close(swiglu.reference(x), want, FLOAT64_ALGORITHM)
    assert_close(swiglu.reference(f32(x)), want, FLOAT32_POINTWISE)


def test_contract() -> None:
    with pytest.raises(OpContractError, match="swiglu: x has 7 columns"):
        swiglu.reference(np.ones((2, 7)))
    with pytest.raises(OpContractError, match="swiglu: x has shape"):
        swiglu.reference(np.ones(8))
