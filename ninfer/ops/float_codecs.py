"""Codes of small floating-point formats to float32 and back, in NumPy.

bf16 travels as uint16, e4m3 (finite-only variant: 0x7f and 0xff are NaN) as uint8 and e2m1 as
numbers 0..15, bit 3 the sign. Encoding rounds to nearest, ties to even, and saturates.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array

ByteArray: TypeAlias = NDArray[np.uint8]
HalfArray: TypeAlias = NDArray[np.uint16]

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bf16_to_float(codes: HalfArray) -> Float32Array:
    """Exact."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: Float32Array) -> HalfArray:
    """Rounds; NaN stays NaN, values past the largest bf16 become infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def e4m3_to_float(codes: ByteArray) -> Float32Array:
    """Exact."""
    return _e4m3_table()[codes]


def float_to_e4m3(values: Float32Array) -> ByteArray:
    """Rounds; magnitudes above 448 saturate."""
    magnitudes = np.minimum(np.abs(values, dtype=np.float32), np.float32(E4M3_MAX))
    codes = _nearest(_e4m3_table()[:127], magnitudes)
    return (codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))).astype(np.uint8)


def e2m1_to_float(codes: ByteArray) -> Float32Array:
    """Exact."""
    magnitudes = np.array(_E2M1_MAGNITUDES, np.float32)
    return np.concatenate([magnitudes, -magnitudes])[codes]


def float_to_e2m1(values: Float32Array) -> ByteArray:
    """Rounds; magnitudes above 6 saturate."""
    magnitudes = np.minimum(np.abs(values, dtype=np.float32), np.float32(E2M1_MAX))
    codes = _nearest(np.array(_E2M1_MAGNITUDES, np.float32), magnitudes)
    return (codes | (np.signbit(values).astype(np.uint8) << np.uint8(3))).astype(np.uint8)


def _e4m3_table() -> Float32Array:
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1.0 + fractions / 8.0, exponents - 7)
    magnitudes = np.where(exponents == 0, np.ldexp(fractions / 8.0, -6), normal)
    magnitudes[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


def _nearest(table: Float32Array, magnitudes: Float32Array) -> NDArray[np.intp]:
    """Index of the nearest entry of an ascending table; halfway goes to the even index."""
    above = np.clip(np.searchsorted(table, magnitudes), 1, len(table) - 1)
    below = above - 1
    distance = (magnitudes - table[below]) - (table[above] - magnitudes)
    take_above = (distance > 0) | ((distance == 0) & (above % 2 == 0))
    return np.where(take_above, above, below)
