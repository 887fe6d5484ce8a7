from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import output_gate
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_POINTWISE, assert_close


def test_gates_in_place_and_reads_a_view() -> None:
    rng = np.random.default_rng(0)
    x, wide = normal(rng, 3, 2, 8), normal(rng, 3, 2, 16, scale=5.0)
    want = x / (1.0 + np.exp(-wide[:, :, 8:]))
    y, both = f32(x), f32(wide)
    output_gate.reference(y, both[:, :, 8:])
    assert_close(y, want, FLOAT32_POINTWISE)
    assert np.array_equal(both, f32(wide))


def test_contract() -> None:
    with pytest.raises(OpContractError, match="output_gate: gate"):
        output_gate.reference(np.ones((3, 2, 8)), np.ones((3, 2, 7)))
    with pytest.raises(OpContractError, match="output_gate: dtypes"):
        output_gate.reference(np.ones((3, 2, 8)), np.ones((3, 2, 8), np.float32))
