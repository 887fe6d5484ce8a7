"""qk_norm: RMSNorm over every query and key head; both land in one array, queries first.

    y[t, h] = rms_norm(q[t, h], weight[h])          h < H
    y[t, H + j] = rms_norm(k[t, j], weight[H + j])  j < Hk

Shapes     q [T, H, D], k [T, Hk, D], weight [H + Hk, D] -> y [T, H + Hk, D]
Dtypes     all the same floating dtype
Units      eps > 0; weight with its norm offset already added (`stack_weights`)
Effects    a new array; q and k may be views into a larger projection
Errors     OpContractError for a shape, dtype or eps outside the above
Tolerance  FLOAT32_REDUCTION
Source     Qwen3 technical report (arXiv:2505.09388); parameters q_norm, k_norm
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops import rms_norm
from ninfer.ops.checks import require_rank, require_shape

_OP = "qk_norm"


def reference(q: FloatArray, k: FloatArray, weight: FloatArray, *, eps: float) -> FloatArray:
    """Query heads, then key heads, each normalised over D."""
    require_rank(_OP, "q", q, 3)
    require_rank(_OP, "k", k, 3)
    require_shape(_OP, "k", k, (q.shape[0], k.shape[1], q.shape[2]))
    return rms_norm.reference(np.concatenate((q, k), axis=1), weight, eps=eps)


def stack_weights(
    q_norm: FloatArray, k_norm: FloatArray, num_heads: int, num_kv_heads: int, *, offset: float
) -> FloatArray:
    """[H + Hk, D]: q_norm [D] for each query head, k_norm [D] for each key head, plus offset."""
    require_shape(_OP, "k_norm", k_norm, q_norm.shape)
    weight = np.stack([q_norm] * num_heads + [k_norm] * num_kv_heads)
    weight += offset
    return weight
