"""gdn_recurrent: one step of the gated delta rule for every row, between StateImage slots.

    S = exp(g[b, h]) * states[read_slots[b], h];  key head n = h * Hk // Hv
    d = beta[b, h] * (v[b, h] - S^T k[b, n]);  S += k[b, n] d^T;  y[b, h] = S^T q[b, n]
    states[write_slots[b], h] = S

Shapes     q and k [B, Hk, dk], v [B, Hv, dv], g and beta [B, Hv], states [slots, Hv, dk, dv] (may
           be strided), read_slots and write_slots [B] -> y [B, Hv, dv]; Hv % Hk == 0
Dtypes     arrays the same floating dtype; slots integer
Units      q and k already l2-normalised, q also times dk ** -0.5; g <= 0
Effects    writes states[write_slots]; decay, then prediction, then write, then read
           a row depends on itself alone, bit for bit
Workspace  the states of B rows, twice
Errors     OpContractError for a shape, dtype or slot outside the above
Tolerance  FLOAT32_RECURRENCE
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_indices, require_rank, require_same_dtype, require_shape

_OP = "gdn_recurrent"


def reference(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    g: FloatArray,
    beta: FloatArray,
    states: FloatArray,
    read_slots: NDArray[np.integer[Any]],
    write_slots: NDArray[np.integer[Any]],
) -> FloatArray:
    """One token of B sequences."""
    _check(q, k, v, g, beta, states, read_slots, write_slots)
    num_rows, num_key_heads, key_dim = k.shape
    num_value_heads, value_dim = v.shape[1:]
    heads = (num_rows, num_key_heads, num_value_heads // num_key_heads)
    state = states[read_slots].reshape(*heads, key_dim, value_dim)
    state *= np.exp(g).reshape(*heads, 1, 1)
    delta = v.reshape(*heads, 1, value_dim) - k[:, :, None, None, :] @ state
    delta *= beta.reshape(*heads, 1, 1)
    state += k[:, :, None, :, None] * delta
    y: FloatArray = q[:, :, None, None, :] @ state
    states[write_slots] = state.reshape(num_rows, num_value_heads, key_dim, value_dim)
    return y.reshape(num_rows, num_value_heads, value_dim)


def _check(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    g: FloatArray,
    beta: FloatArray,
    states: FloatArray,
    read_slots: NDArray[np.integer[Any]],
    write_slots: NDArray[np.integer[Any]],
) -> None:
    require_rank(_OP, "k", k, 3)
    require_rank(_OP, "v", v, 3)
    num_rows, num_key_heads, key_dim = k.shape
    _, num_value_heads, value_dim = v.shape
    if num_value_heads % num_key_heads:
        fail(_OP, f"{num_value_heads} value heads are no multiple of {num_key_heads} key heads")
    require_shape(_OP, "q", q, k.shape)
    require_shape(_OP, "v", v, (num_rows, num_value_heads, value_dim))
    require_shape(_OP, "g", g, (num_rows, num_value_heads))
    require_shape(_OP, "beta", beta, g.shape)
    require_shape(_OP, "states", states, (states.shape[0], num_value_heads, key_dim, value_dim))
    require_shape(_OP, "read_slots", read_slots, (num_rows,))
    require_shape(_OP, "write_slots", write_slots, (num_rows,))
    require_indices(_OP, "read_slots", read_slots, states.shape[0])
    require_indices(_OP, "write_slots", write_slots, states.shape[0])
    require_same_dtype(_OP, q, k, v, g, beta, states)
