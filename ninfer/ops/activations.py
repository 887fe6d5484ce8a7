"""Pointwise functions that several Ops apply; never an overflow warning, NaN passes through."""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray

_MAX_EXPONENT = 80.0
"""exp(80) is finite in float32; beyond it a sigmoid differs from 0 by less than 2e-35."""


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x))."""
    return np.reciprocal(_one_plus_exp_negative(x))


def silu(x: FloatArray) -> FloatArray:
    """x / (1 + exp(-x))."""
    denominator = _one_plus_exp_negative(x)
    return np.divide(x, denominator, out=denominator)


def softplus(x: FloatArray) -> FloatArray:
    """log(1 + exp(x))."""
    return np.logaddexp(x, x.dtype.type(0))


def _one_plus_exp_negative(x: FloatArray) -> FloatArray:
    y: FloatArray = np.negative(x)
    np.minimum(y, _MAX_EXPONENT, out=y)
    np.exp(y, out=y)
    y += 1.0
    return y
