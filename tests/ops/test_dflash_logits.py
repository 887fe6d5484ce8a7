from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import dflash_logits
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_POINTWISE, assert_close


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
def test_against_the_definition(scale: float, cap: float | None) -> None:
    logits = normal(np.random.default_rng(0), 3, 50, scale=4.0)
    want = logits * scale if cap is None else cap * np.tanh(logits * scale / cap)
    assert_close(
        dflash_logits.reference(f32(logits), scale=scale, cap=cap), want, FLOAT32_POINTWISE
    )


@pytest.mark.parametrize(("scale", "cap"), [(0.0, None), (1.0, 0.0), (1.0, -1.0)])
def test_factors_are_positive(scale: float, cap: float | None) -> None:
    with pytest.raises(OpContractError, match="dflash_logits"):
        dflash_logits.reference(np.ones((1, 2), np.float32), scale=scale, cap=cap)
