"""gdn_gates: write strength and log decay of the delta rule.

    beta[t, h] = sigmoid(b[t, h])
    g[t, h] = -exp(A_log[h]) * softplus(a[t, h] + dt_bias[h])

Shapes     b and a [T, Hv], A_log and dt_bias [Hv] -> beta and g [T, Hv]
Dtypes     all the same floating dtype
Units      beta in (0, 1); g <= 0, natural logarithm of the factor a step applies to the state
Effects    new arrays
Errors     OpContractError for a shape or dtype outside the above
Tolerance  FLOAT32_POINTWISE
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464); parameters A_log, dt_bias
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops.activations import sigmoid, softplus
from ninfer.ops.checks import require_rank, require_same_dtype, require_shape

_OP = "gdn_gates"


def reference(
    b: FloatArray, a: FloatArray, a_log: FloatArray, dt_bias: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(beta, g)."""
    require_rank(_OP, "b", b, 2)
    require_shape(_OP, "a", a, b.shape)
    require_shape(_OP, "a_log", a_log, (b.shape[1],))
    require_shape(_OP, "dt_bias", dt_bias, a_log.shape)
    require_same_dtype(_OP, b, a, a_log, dt_bias)
    g = softplus(a + dt_bias)
    g *= -np.exp(a_log)
    return sigmoid(b), g
