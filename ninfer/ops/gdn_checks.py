"""What both forms of the gated delta rule demand of their inputs; gdn_chunked, gdn_recurrent."""

from __future__ import annotations

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape


def require_delta_inputs(
    op: str, q: FloatArray, k: FloatArray, v: FloatArray, g: FloatArray, beta: FloatArray
) -> tuple[int, int, int]:
    """q and k [N, Hk, dk], v [N, Hv, dv], g and beta [N, Hv], none empty; Hv % Hk == 0.

    N are tokens or rows. Returns the shape of one state, (Hv, dk, dv). Raises OpContractError.
    """
    require_rank(op, "k", k, 3)
    require_rank(op, "v", v, 3)
    count, num_key_heads, key_dim = k.shape
    _, num_value_heads, value_dim = v.shape
    if num_value_heads % num_key_heads:
        fail(op, f"{num_value_heads} value heads are no multiple of {num_key_heads} key heads")
    require_shape(op, "q", q, k.shape)
    require_shape(op, "v", v, (count, num_value_heads, value_dim))
    require_shape(op, "g", g, (count, num_value_heads))
    require_shape(op, "beta", beta, g.shape)
    require_same_dtype(op, q, k, v, g, beta)
    return num_value_heads, key_dim, value_dim
