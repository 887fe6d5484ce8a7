"""Distances between distributions given by their logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    total: NDArray[np.float64] = np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values - total


def divergences(reference: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """KL(reference || logits) of every row."""
    wanted, got = log_softmax(reference), log_softmax(logits)
    result: NDArray[np.float64] = (np.exp(wanted) * (wanted - got)).sum(axis=-1)
    return result


def lead(logits: NDArray[Any], token_id: int) -> float:
    """How far the best logit lies above that of `token_id`; 0 for the best."""
    return float(logits.max() - logits[token_id])
