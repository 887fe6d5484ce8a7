"""Named tolerances: how far a float32 result may lie from its float64 oracle or from a golden.

An Op's contract names the one that applies to it. `|got - want| <= absolute + relative * |want|`,
where |want| is taken elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tolerance:
    absolute: float
    relative: float


EXACT: Final = Tolerance(0.0, 0.0)
FLOAT32_POINTWISE: Final = Tolerance(1e-6, 2e-6)
"""A handful of roundings and one exp or tanh."""
FLOAT32_REDUCTION: Final = Tolerance(5e-6, 1e-5)
"""Sums of some hundred terms of magnitude 1."""
FLOAT32_RECURRENCE: Final = Tolerance(2e-5, 5e-5)
"""Sums that feed later sums, over some hundred steps."""
FLOAT64_ALGORITHM: Final = Tolerance(1e-10, 1e-10)
"""Two forms of one formula, both in float64."""
BF16_POINTWISE: Final = Tolerance(1e-6, 4e-3)
"""A float32 value rounded to bf16 once: half a unit in the last of 8 bits is 2^-8."""
BF16_REDUCTION: Final = Tolerance(1e-6, 5e-3)
"""The same behind a float32 sum."""
ROTATED_BF16: Final = Tolerance(2e-5, 5e-3)
"""BF16_REDUCTION behind a rotation, which may cancel, and sines that are good to 2^-21."""
BF16_ATTENTION: Final = Tolerance(1.2e-2, 8e-3)
"""Means of values of magnitude 1 by probabilities rounded to bf16, rounded again."""
BF16_ATTENTION_L2: Final = 4e-3
"""The same over a whole result: |got - want| / |want|."""
GDN_OUTPUT: Final = 4.1e-3
"""A Gated DeltaNet layer over a whole result, as |got - want| / |want|: two roundings to bf16."""
GDN_STATE: Final = 3e-4
"""Its states, in float32: some inputs fall on the other side of a rounding to bf16."""
GOLDEN: Final = Tolerance(1e-3, 0.0)
"""A whole float32 model against another float32 implementation."""


def assert_close(got: NDArray[Any], want: NDArray[Any], tolerance: Tolerance) -> None:
    """Shapes agree, every element is finite and within the tolerance."""
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    assert np.isfinite(got64).all(), "a result is not finite"
    excess = np.abs(got64 - want64) - tolerance.absolute - tolerance.relative * np.abs(want64)
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    assert excess[worst] <= 0.0, f"{got64[worst]} at {worst}, expected {want64[worst]}"


def assert_close_overall(got: NDArray[Any], want: NDArray[Any], limit: float) -> None:
    """The L2 norm of the error is within `limit` of the result's."""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    error = np.linalg.norm(got64 - want64) / np.linalg.norm(want64)
    assert error <= limit, f"relative error {error:.2e}, expected at most {limit:.2e}"
