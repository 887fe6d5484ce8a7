"""rms_norm: y[.., c] = x[.., c] / sqrt(mean_c(x[.., c]^2) + eps) * (offset + weight[.., c]).

Shapes     x [.., C]; weight [C], or [H, C] for x [T, H, C] -> y like x
Dtypes     all the same floating dtype
Units      eps > 0, added to the mean square; offset 0 (plain) or 1 (zero-centred weights)
Effects    a new array; a row depends on itself alone, bit for bit
Errors     OpContractError for a shape, dtype or eps outside the above
Tolerance  FLOAT32_REDUCTION
Source     Zhang and Sennrich 2019 (arXiv:1910.07467); config key rms_norm_eps
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_same_dtype, require_shape

_OP = "rms_norm"


def reference(x: FloatArray, weight: FloatArray, *, eps: float, offset: float = 0.0) -> FloatArray:
    """Normalise over the last axis, in the dtype of x."""
    require_same_dtype(_OP, x, weight)
    require_shape(_OP, "weight", weight, x.shape[x.ndim - weight.ndim :])
    if not eps > 0.0:
        fail(_OP, f"eps {eps} is not positive")
    y = x / root_mean_square(x, eps)
    y *= weight + offset if offset else weight
    return y


def root_mean_square(x: FloatArray, eps: float) -> FloatArray:
    """sqrt(mean(x^2) + eps) over the last axis, which stays with length 1."""
    square: FloatArray = np.add.reduce(x * x, axis=-1, keepdims=True)
    square /= x.shape[-1]
    square += eps
    return np.sqrt(square, out=square)
