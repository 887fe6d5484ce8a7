from __future__ import annotations

import numpy as np

from ninfer.ops.activations import sigmoid, silu, softplus
from tests.helpers.tolerance import FLOAT32_POINTWISE, assert_close

X = np.concatenate((np.linspace(-30, 30, 401), [-1e30, -1e4, -90.0, 90.0, 1e4, 1e30]))
"""Warnings are errors here, so an overflow anywhere fails the test."""


def want_sigmoid() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    small = np.exp(-np.abs(X))
    return np.where(X >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def test_sigmoid_silu_and_softplus_over_the_whole_range() -> None:
    x = X.astype(np.float32)
    exact = X.astype(np.float32).astype(np.float64)
    assert_close(sigmoid(x), want_sigmoid(), FLOAT32_POINTWISE)
    assert_close(silu(x), exact * want_sigmoid(), FLOAT32_POINTWISE)
    softplus_want = np.maximum(exact, 0.0) + np.log1p(np.exp(-np.abs(exact)))
    assert_close(softplus(x), softplus_want, FLOAT32_POINTWISE)


def test_dtype_and_nan_pass_through() -> None:
    for dtype in (np.float32, np.float64):
        for function in (sigmoid, silu, softplus):
            y = function(np.array([0.5, np.nan], dtype))
            assert y.dtype == dtype
            assert np.isnan(y).tolist() == [False, True]
