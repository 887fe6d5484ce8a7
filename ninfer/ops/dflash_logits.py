"""dflash_logits: what a draft model makes of the products with its head.

    x = scale * logits;   y = cap * tanh(x / cap), or x without a cap

Shapes     logits [T, V] -> y [T, V]
Dtypes     a floating dtype
Units      scale > 0, cap > 0 or None
Effects    writes logits in place when anything changes, and returns them
Errors     OpContractError for a rank, dtype or factor outside the above
Tolerance  FLOAT32_POINTWISE
Source     DFlash, its authors' reference model; config keys output_multiplier,
           final_logit_softcapping
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_rank, require_same_dtype

_OP = "dflash_logits"


def reference(logits: FloatArray, *, scale: float, cap: float | None) -> FloatArray:
    """Scale, then bound softly."""
    require_rank(_OP, "logits", logits, 2)
    require_same_dtype(_OP, logits)
    if not scale > 0.0 or (cap is not None and not cap > 0.0):
        fail(_OP, f"scale {scale} and cap {cap} are not positive")
    if scale != 1.0:
        logits *= scale
    if cap is not None:
        logits /= cap
        np.tanh(logits, out=logits)
        logits *= cap
    return logits
