"""Random arrays of Op tests, and running one reference in both of its precisions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Float64Array:
    """float64 values that float32 holds exactly, so that both precisions start from the same."""
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    return values.astype(np.float64)


def unit(rng: np.random.Generator, *shape: int) -> Float64Array:
    """Vectors of length 1 over the last axis (up to float32 rounding)."""
    values = rng.standard_normal(shape)
    values /= np.linalg.norm(values, axis=-1, keepdims=True)
    return values.astype(np.float32).astype(np.float64)


def f32(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32)
