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
from ninfer.ops.checks import require_indices, require_rank, require_same_dtype, require_shape
from ninfer.ops.gdn_checks import require_delta_inputs

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
    state_shape = require_delta_inputs(_OP, q, k, v, g, beta)
    _check_states(state_shape, k.shape[0], states, read_slots, write_slots)
    require_same_dtype(_OP, k, states)
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


def _check_states(
    state_shape: tuple[int, int, int],
    num_rows: int,
    states: FloatArray,
    read_slots: NDArray[np.integer[Any]],
    write_slots: NDArray[np.integer[Any]],
) -> None:
    require_rank(_OP, "states", states, 4)
    require_shape(_OP, "states", states, (states.shape[0], *state_shape))
    for name, slots in (("read_slots", read_slots), ("write_slots", write_slots)):
        require_shape(_OP, name, slots, (num_rows,))
        require_indices(_OP, name, slots, states.shape[0])
