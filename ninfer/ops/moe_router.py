"""moe_router: the experts of every token and their weights.

    p[t] = softmax(logits[t]);  expert_ids[t] = the k largest of p[t], ties to the lower id
    weights[t] = p[t, expert_ids[t]], divided by their sum if renormalise

Shapes     logits [T, E] -> expert_ids and weights [T, k], best first; 1 <= k <= E
Dtypes     logits and weights the same floating dtype; expert_ids int64
Effects    new arrays
Errors     OpContractError for a shape, dtype or k outside the above
Tolerance  FLOAT32_POINTWISE
Source     Shazeer et al. 2017 (arXiv:1701.06538); config keys num_experts, num_experts_per_tok,
           norm_topk_prob
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_rank, require_same_dtype

_OP = "moe_router"


def reference(
    logits: FloatArray, *, experts_per_token: int, renormalise: bool
) -> tuple[NDArray[np.int64], FloatArray]:
    """(expert_ids, weights)."""
    require_rank(_OP, "logits", logits, 2)
    require_same_dtype(_OP, logits)
    if not 1 <= experts_per_token <= logits.shape[1]:
        fail(_OP, f"{experts_per_token} of {logits.shape[1]} experts asked for")
    probabilities = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    probabilities /= np.add.reduce(probabilities, axis=-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    expert_ids = order[:, :experts_per_token].astype(np.int64, copy=False)
    weights = np.take_along_axis(probabilities, expert_ids, axis=-1)
    if renormalise:
        weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return expert_ids, weights
