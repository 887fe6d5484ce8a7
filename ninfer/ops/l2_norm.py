"""l2_norm: y[.., d] = scale * x[.., d] / sqrt(sum_d(x[.., d]^2) + eps).

Shapes     x [.., D] -> y like x
Dtypes     one floating dtype
Units      eps 1e-6 fixed, inside the root and added to the sum, not to the mean
Effects    a new array; a row depends on itself alone, bit for bit
Errors     OpContractError for another dtype
Tolerance  FLOAT32_REDUCTION
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464), query and key normalisation
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import require_same_dtype

_OP = "l2_norm"
EPS: Final = 1e-6


def reference(x: FloatArray, *, scale: float = 1.0) -> FloatArray:
    """Unit length over the last axis, times `scale`."""
    require_same_dtype(_OP, x)
    length: FloatArray = np.add.reduce(x * x, axis=-1, keepdims=True)
    length += EPS
    np.sqrt(length, out=length)
    if scale != 1.0:
        length /= scale
    return x / length
