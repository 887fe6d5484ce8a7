"""swiglu: y[t, i] = silu(x[t, i]) * x[t, I + i].

Shapes     x [T, 2 * I] = gate columns, then up columns -> y [T, I]
Dtypes     one floating dtype
Effects    a new array
Errors     OpContractError for an odd number of columns or another rank
Tolerance  FLOAT32_POINTWISE
Source     Shazeer 2020 (arXiv:2002.05202); config keys intermediate_size, hidden_act = silu
"""

from __future__ import annotations

from ninfer.contract.arrays import FloatArray
from ninfer.ops.activations import silu
from ninfer.ops.checks import fail, require_rank

_OP = "swiglu"


def reference(x: FloatArray) -> FloatArray:
    """SiLU of the first half times the second half."""
    require_rank(_OP, "x", x, 2)
    if x.shape[1] % 2:
        fail(_OP, f"x has {x.shape[1]} columns, expected an even number")
    inner = x.shape[1] // 2
    y = silu(x[:, :inner])
    y *= x[:, inner:]
    return y
