"""output_gate: x[t, h, d] *= sigmoid(gate[t, h, d]).

Shapes     x [T, H, D], gate [T, H, D]
Dtypes     the same floating dtype
Effects    writes x in place; gate is only read
Errors     OpContractError for a shape or dtype outside the above
Tolerance  FLOAT32_POINTWISE
Source     Qwen3.5 attention, config key attn_output_gate
"""

from __future__ import annotations

from ninfer.contract.arrays import FloatArray
from ninfer.ops.activations import sigmoid
from ninfer.ops.checks import require_rank, require_same_dtype, require_shape

_OP = "output_gate"


def reference(x: FloatArray, gate: FloatArray) -> None:
    """Gate the attention output in place."""
    require_rank(_OP, "x", x, 3)
    require_shape(_OP, "gate", gate, x.shape)
    require_same_dtype(_OP, x, gate)
    x *= sigmoid(gate)
