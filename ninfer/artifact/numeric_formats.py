"""Numeric formats of stored weights: code width, finiteness and exact widening to float32.

Names are those of safetensors headers. All codes are little endian. F8_E4M3 is the finite-only
variant: 0x7f and 0xff are NaN, nothing is infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array

DTYPE_BITS: Final = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
        "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
        "U32": 32, "I32": 32, "F32": 32,
        "U64": 64, "I64": 64, "F64": 64, "C64": 64,
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    }
)  # fmt: skip
"""Bits of one element of every dtype a safetensors header may name."""

_E4M3_MAGNITUDE: Final = 0x7F
CHUNK_ELEMENTS: Final = 1 << 20
"""Elements handled at a time, so that temporaries stay small however large a tensor is."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format that float32 represents exactly.

    exponent_mask   bits that are all set in infinities and NaN, and only there
    """

    name: str
    item_bytes: int
    exponent_mask: int

    def is_finite(self, raw: memoryview) -> bool:
        """Whether no element of `raw` is infinite or NaN."""
        return not _has_all_set(np.frombuffer(raw, f"<u{self.item_bytes}"), self.exponent_mask)

    def widen(self, raw: memoryview, out: Float32Array) -> None:
        """Write the elements of `raw` to `out` [n], exactly."""
        if self.name == "BF16":
            np.left_shift(
                np.frombuffer(raw, "<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32
            )
        else:
            out[...] = np.frombuffer(raw, f"<f{self.item_bytes}")

    def chunks(self, raw: memoryview) -> Iterator[memoryview]:
        """`raw` in consecutive pieces of at most CHUNK_ELEMENTS elements."""
        step = CHUNK_ELEMENTS * self.item_bytes
        for start in range(0, len(raw), step):
            yield raw[start : start + step]


FLOAT_FORMATS: Final = MappingProxyType(
    {
        "BF16": FloatFormat("BF16", 2, 0x7F80),
        "F16": FloatFormat("F16", 2, 0x7C00),
        "F32": FloatFormat("F32", 4, 0x7F800000),
    }
)
"""The formats weights may have."""


def has_e4m3_nan(raw: memoryview) -> bool:
    """Whether a code of `raw` is NaN."""
    codes = np.frombuffer(raw, np.uint8)
    return any(
        _has_all_set(codes[start : start + CHUNK_ELEMENTS], _E4M3_MAGNITUDE)
        for start in range(0, codes.size, CHUNK_ELEMENTS)
    )


def _has_all_set(codes: NDArray[np.unsignedinteger[Any]], mask: int) -> bool:
    """Whether all bits of `mask` are set in a code; its largest value is all of them."""
    masked = codes & codes.dtype.type(mask)
    return masked.size > 0 and int(masked.max()) == mask
