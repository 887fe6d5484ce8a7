"""gated_rms_norm: y[t, h] = weight * x[t, h] / sqrt(mean(x[t, h]^2) + eps) * silu(z[t, h]).

Shapes     x and z [T, Hv, dv], weight [dv] -> y [T, Hv, dv]
Dtypes     all the same floating dtype
Units      eps > 0; the weight is plain (no offset); norm first, gate after
Effects    a new array; a row depends on itself alone, bit for bit
Errors     OpContractError for a shape, dtype or eps outside the above
Tolerance  FLOAT32_REDUCTION
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464); parameter linear_attn.norm
"""

from __future__ import annotations

from ninfer.contract.arrays import FloatArray
from ninfer.ops import rms_norm
from ninfer.ops.activations import silu
from ninfer.ops.checks import require_rank, require_same_dtype, require_shape

_OP = "gated_rms_norm"


def reference(x: FloatArray, z: FloatArray, weight: FloatArray, *, eps: float) -> FloatArray:
    """Normalise over dv, then gate."""
    require_rank(_OP, "x", x, 3)
    require_shape(_OP, "z", z, x.shape)
    require_same_dtype(_OP, x, z)
    y = rms_norm.reference(x, weight, eps=eps)
    y *= silu(z)
    return y
