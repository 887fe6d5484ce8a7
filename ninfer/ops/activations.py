"""Pointwise functions that several Ops apply; no input warns, NaN passes through."""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray

_MAX_EXPONENT: Final = 88.0
"""exp(88) is finite in float32; a sigmoid beyond it differs from 0 by less than 1e-38."""


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x))."""
    return np.reciprocal(_one_plus_exp_negative(x))


def silu(x: FloatArray) -> FloatArray:
    """x / (1 + exp(-x))."""
    denominator = _one_plus_exp_negative(x)
    return np.divide(x, denominator, out=denominator)


def softplus(x: FloatArray) -> FloatArray:
    """log(1 + exp(x))."""
    y: FloatArray = np.log1p(np.exp(-np.abs(x)))
    y += np.maximum(x, 0.0)
    return y


def _one_plus_exp_negative(x: FloatArray) -> FloatArray:
    y: FloatArray = np.negative(x)
    np.minimum(y, _MAX_EXPONENT, out=y)
    np.exp(y, out=y)
    y += 1.0
    return y
