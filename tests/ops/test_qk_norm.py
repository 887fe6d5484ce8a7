from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import qk_norm
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close


@pytest.mark.parametrize("head_dim", [16, 128, 256])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_queries_and_keys_are_normalised_with_their_own_weights(
    head_dim: int, offset: float
) -> None:
    rng = np.random.default_rng(head_dim)
    q, k = normal(rng, 5, 6, head_dim), normal(rng, 5, 2, head_dim)
    q_norm, k_norm = normal(rng, head_dim), normal(rng, head_dim)
    want = np.empty((5, 8, head_dim))
    for token in range(5):
        for head in range(8):
            x = q[token, head] if head < 6 else k[token, head - 6]
            weight = q_norm if head < 6 else k_norm
            want[token, head] = x / np.sqrt(np.mean(x * x) + 1e-6) * (offset + weight)
    stacked = qk_norm.stack_weights(q_norm, k_norm, 6, 2, offset=offset)
    assert_close(qk_norm.reference(q, k, stacked, eps=1e-6), want, FLOAT64_ALGORITHM)
    assert_close(qk_norm.reference(f32(q), f32(k), f32(stacked), eps=1e-6), want, FLOAT32_REDUCTION)


def test_contract() -> None:
    q, k = np.ones((5, 6, 8)), np.ones((5, 2, 8))
    with pytest.raises(OpContractError, match="qk_norm: k has shape"):
        qk_norm.reference(q, k[:4], np.ones((8, 8)), eps=1e-6)
    with pytest.raises(OpContractError, match="weight has shape"):
        qk_norm.reference(q, k, np.ones((7, 8)), eps=1e-6)
    with pytest.raises(OpContractError, match="qk_norm: k_norm"):
        qk_norm.stack_weights(np.ones(8), np.ones(9), 6, 2, offset=0.0)
