"""rotary: rotate the first r dimensions of every head by position-dependent angles.

    half = r / 2;  (a, b) = (x[.., :half], x[.., half:r])
    x[.., :half] = a cos - b sin;  x[.., half:r] = b cos + a sin;  x[.., r:] unchanged
    angle[t, j] = position[t, axis(j)] * inv_frequency[j]

Shapes     x [T, H, D], cos and sin [T, half], 2 * half <= D; positions [3, T]
Dtypes     x, cos and sin the same floating dtype; positions integer
Units      positions in tokens (time, height, width); angles in radians
Effects    `reference` writes x in place
Errors     OpContractError for a shape, dtype or rope type outside the above
Tolerance  FLOAT32_POINTWISE
Source     Su et al. 2021 (arXiv:2104.09864), rotate-half form; interleaved MRoPE of Qwen3-VL; YaRN,
           Peng et al. 2023 (arXiv:2309.00071); config keys rope_theta, partial_rotary_factor,
           mrope_section, rope_type
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.model import RopeConfig
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "rotary"


@dataclass(frozen=True, slots=True, eq=False)
class RotaryFrequencies:
    """Constants of a model's rotary embedding.

    inverse   [half] angle a position, in the dtype angles are computed in
    axes      [half] position axis of each frequency: 0 time, 1 height, 2 width
    scale     factor on cos and sin (YaRN), else 1
    """

    inverse: FloatArray
    axes: IntArray
    scale: float


def frequencies(rope: RopeConfig, dtype: type[np.floating[Any]] = np.float32) -> RotaryFrequencies:
    """Frequencies of a configuration, computed in float64 and rounded once to `dtype`."""
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        fail(_OP, f"rotary_dim {rope.rotary_dim} is not even and positive")
    half = rope.rotary_dim // 2
    inverse = rope.theta ** (-2.0 * np.arange(half, dtype=np.float64) / rope.rotary_dim)
    scale = 1.0
    if rope.rope_type == "linear":
        inverse = inverse / rope.factor
    elif rope.rope_type == "yarn":
        inverse = _yarn_inverse(rope, inverse)
        scale = _yarn_scale(rope)
    elif rope.rope_type != "default":
        fail(_OP, f"rope type {rope.rope_type!r} is not default, linear or yarn")
    return RotaryFrequencies(inverse.astype(dtype), _axes(rope, half), scale)


def angles(
    positions: NDArray[np.integer[Any]], constants: RotaryFrequencies
) -> tuple[FloatArray, FloatArray]:
    """cos and sin [T, half] of positions [3, T]."""
    require_rank(_OP, "positions", positions, 2)
    require_shape(_OP, "positions", positions, (3, positions.shape[1]))
    dtype = constants.inverse.dtype
    angle = positions.T[:, constants.axes].astype(dtype) * constants.inverse
    cos, sin = np.cos(angle), np.sin(angle)
    if constants.scale != 1.0:
        cos *= constants.scale
        sin *= constants.scale
    return cos, sin


def reference(x: FloatArray, cos: FloatArray, sin: FloatArray) -> None:
    """Rotate x in place."""
    require_rank(_OP, "x", x, 3)
    half = cos.shape[-1]
    require_shape(_OP, "cos", cos, (x.shape[0], half))
    require_shape(_OP, "sin", sin, (x.shape[0], half))
    require_same_dtype(_OP, x, cos, sin)
    if 2 * half > x.shape[2]:
        fail(_OP, f"{2 * half} rotary dimensions exceed head_dim {x.shape[2]}")
    a, b = x[:, :, :half], x[:, :, half : 2 * half]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = a * cos - b * sin
    b[...] = b * cos + a * sin
    a[...] = rotated


def _axes(rope: RopeConfig, half: int) -> IntArray:
    axes = np.zeros(half, np.int32)
    if rope.mrope_section is not None:
        _, height, width = rope.mrope_section
        axes[1 : 3 * height : 3] = 1
        axes[2 : 3 * width : 3] = 2
    return axes


def _yarn_inverse(rope: RopeConfig, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
    """Low frequencies interpolated by `factor`, high ones kept, a linear ramp between them."""
    if rope.original_max_position is None:
        fail(_OP, "yarn needs original_max_position")
    last = rope.rotary_dim - 1
    low = max(math.floor(_yarn_dimension(rope, rope.original_max_position, rope.beta_fast)), 0)
    high = min(math.ceil(_yarn_dimension(rope, rope.original_max_position, rope.beta_slow)), last)
    width = max(high - low, 1e-3)
    ramp = np.clip((np.arange(inverse.size, dtype=np.float64) - low) / width, 0.0, 1.0)
    interpolated: NDArray[np.float64] = inverse / rope.factor
    return interpolated * ramp + inverse * (1.0 - ramp)


def _yarn_dimension(rope: RopeConfig, max_position: int, rotations: float) -> float:
    """Index of the frequency that turns `rotations` times within `max_position` tokens."""
    wavelength = max_position / (rotations * 2.0 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2.0 * math.log(rope.theta))


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0
