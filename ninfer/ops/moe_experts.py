"""moe_experts: the routed experts' weighted sum, and the shared expert behind its gate.

    routed: y[t] = sum_j weights[t, j] * down[e] swiglu(gate_up[e] x[t]),  e = expert_ids[t, j]
    shared: y[t] = sigmoid(gate . x[t]) * down swiglu(gate_up x[t])

Shapes     x [T, C], expert_ids and weights [T, k], gate_up [E, 2 * I, C], down [E, C, I]
           shared: gate [1, C], gate_up [2 * I, C], down [C, I] -> y [T, C]
Dtypes     all the same floating dtype, expert_ids integer
Units      the experts of one token are distinct; no token is dropped
Effects    a new array. Tokens are grouped by expert and summed in ascending order of expert, so
           with `linear.tiled` as projection a row depends on itself alone, bit for bit
Errors     OpContractError for a shape, dtype or expert outside the above
Tolerance  FLOAT32_REDUCTION
Source     Shazeer et al. 2017 (arXiv:1701.06538); shared expert of Qwen2-MoE and Qwen3.5-MoE;
           config keys moe_intermediate_size, shared_expert_intermediate_size
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops import linear, swiglu
from ninfer.ops.activations import sigmoid
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "moe_experts"


def reference(
    x: FloatArray,
    expert_ids: NDArray[np.integer[Any]],
    weights: FloatArray,
    gate_up: FloatArray,
    down: FloatArray,
    *,
    project: linear.Projection = linear.reference,
) -> FloatArray:
    """Sum over the routed experts."""
    _check(x, expert_ids, weights, gate_up, down)
    experts_per_token = expert_ids.shape[1]
    flat_ids, flat_weights = expert_ids.ravel(), weights.ravel()
    order = np.argsort(flat_ids, kind="stable")
    counts = np.bincount(flat_ids, minlength=gate_up.shape[0])
    y = np.zeros_like(x)
    start = 0
    for expert in np.flatnonzero(counts):
        places = order[start : start + counts[expert]]
        start += places.size
        rows = places // experts_per_token
        inner = swiglu.reference(project(x[rows], gate_up[expert]))
        y[rows] += project(inner, down[expert]) * flat_weights[places, None]
    return y


def shared(
    x: FloatArray,
    gate: FloatArray,
    gate_up: FloatArray,
    down: FloatArray,
    *,
    project: linear.Projection = linear.reference,
) -> FloatArray:
    """The expert every token visits, scaled by one gate value a token."""
    require_rank(_OP, "x", x, 2)
    require_shape(_OP, "gate", gate, (1, x.shape[1]))
    require_same_dtype(_OP, x, gate)
    y = project(swiglu.reference(project(x, gate_up)), down)
    y *= sigmoid(np.add.reduce(x * gate, axis=-1, keepdims=True))
    return y


def _check(
    x: FloatArray,
    expert_ids: NDArray[np.integer[Any]],
    weights: FloatArray,
    gate_up: FloatArray,
    down: FloatArray,
) -> None:
    require_rank(_OP, "x", x, 2)
    require_rank(_OP, "gate_up", gate_up, 3)
    require_rank(_OP, "expert_ids", expert_ids, 2)
    num_experts, columns, hidden = gate_up.shape
    require_shape(_OP, "gate_up", gate_up, (num_experts, columns, x.shape[1]))
    require_shape(_OP, "down", down, (num_experts, hidden, columns // 2))
    require_shape(_OP, "expert_ids", expert_ids, (x.shape[0], expert_ids.shape[1]))
    require_shape(_OP, "weights", weights, expert_ids.shape)
    require_same_dtype(_OP, x, weights, gate_up, down)
    if expert_ids.min() < 0 or expert_ids.max() >= num_experts:
        fail(_OP, f"expert_ids hold an index outside [0, {num_experts})")
