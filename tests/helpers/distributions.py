"""Distances between distributions given by their logits."""

from __future__ import annotations

import math
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


def chi_square_p(counts: NDArray[Any], probabilities: NDArray[Any]) -> float:
    """How probable counts at least as far from `probabilities` are, were these the law. Outcomes
    that are expected fewer than five times count as one."""
    expected = probabilities.reshape(-1) * counts.sum()
    seen, is_rare = counts.reshape(-1).astype(np.float64), expected < 5.0
    if (seen[expected == 0.0] > 0.0).any():
        return 0.0
    seen = np.append(seen[~is_rare], seen[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    if wanted[-1] == 0.0:
        seen, wanted = seen[:-1], wanted[:-1]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return _upper_gamma((seen.size - 1) / 2.0, statistic / 2.0)


def _upper_gamma(shape: float, x: float) -> float:
    """The regularised upper incomplete gamma function, shape > 0."""
    if x <= 0.0:
        return 1.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        term = total = 1.0 / shape
        for step in range(1, 10_000):
            term *= x / (shape + step)
            total += term
        return 1.0 - scale * total
    # A continued fraction, evaluated from its end.
    fraction = 0.0
    for step in range(400, 0, -1):
        fraction = step * (step - shape) / (x + 2.0 * step + 1.0 - shape - fraction)
    return scale / (x + 1.0 - shape - fraction)
