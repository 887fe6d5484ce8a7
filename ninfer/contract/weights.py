"""Weights as files store them: encodings, and the bands of rows of an object that share one.

    FLOAT      a number itself
    FP8_ROW    e4m3 code * scale[n]
    FP8_BLOCK  e4m3 code * scale[n // 128, k // 128]
    NVFP4      e2m1 code * e4m3 scale[n, k // 16] * row_factor[n]

Blocks of a band start at its own first row. e4m3 is the finite-only variant (0x7f is NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array

BLOCK_SIZE: Final = 128
"""Rows and columns of an FP8 block."""
GROUP_SIZE: Final = 16
"""Columns that share an NVFP4 scale."""


class WeightEncoding(Enum):
    FLOAT = "float"
    FP8_ROW = "fp8_row"
    FP8_BLOCK = "fp8_block"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class WeightBand:
    """Consecutive rows of an object, or of each of its experts, that are stored one way."""

    encoding: WeightEncoding
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBand:
    """The codes of a band, with a leading axis E for experts.

    codes        FLOAT float32, or uint16: bf16 [.., N, K]; fp8: uint8 [.., N, K]; NVFP4: uint8
                 [.., N, K / 2], the even column in the low nibble
    scales       FP8_ROW float32 [.., N]; FP8_BLOCK float32 [.., ceil(N / 128), ceil(K / 128)];
                 NVFP4 e4m3 as uint8 [.., N, K / 16]; None for FLOAT
    row_factors  NVFP4 float32 [.., N]; None for the others
    """

    encoding: WeightEncoding
    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    row_factors: Float32Array | None = None

    def expert(self, index: int) -> EncodedBand:
        """The band of one expert."""
        return EncodedBand(
            self.encoding,
            self.codes[index],
            None if self.scales is None else self.scales[index],
            None if self.row_factors is None else self.row_factors[index],
        )


@dataclass(frozen=True, slots=True, eq=False)
class EncodedExperts:
    """A band of experts that lie apart, one by one; nothing is copied until it is asked for as a
    whole."""

    bands: tuple[EncodedBand, ...]

    @property
    def encoding(self) -> WeightEncoding:
        return self.bands[0].encoding

    @property
    def codes(self) -> NDArray[Any]:
        return np.stack([band.codes for band in self.bands])

    @property
    def scales(self) -> NDArray[Any] | None:
        return _stack([band.scales for band in self.bands])

    @property
    def row_factors(self) -> Float32Array | None:
        return _stack([band.row_factors for band in self.bands])

    def expert(self, index: int) -> EncodedBand:
        """The band of one expert."""
        return self.bands[index]


AnyBand: TypeAlias = EncodedBand | EncodedExperts


def _stack(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [array for array in arrays if array is not None]
    return np.stack(present) if present else None


def band_shapes(encoding: WeightEncoding, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a band [rows, columns] without experts, by their field."""
    if encoding is WeightEncoding.FLOAT:
        return {"codes": (rows, columns)}
    if encoding is WeightEncoding.FP8_ROW:
        return {"codes": (rows, columns), "scales": (rows,)}
    if encoding is WeightEncoding.FP8_BLOCK:
        blocks = (-(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE))
        return {"codes": (rows, columns), "scales": blocks}
    return {
        "codes": (rows, columns // 2),
        "scales": (rows, columns // GROUP_SIZE),
        "row_factors": (rows,),
    }


def band_dtypes(encoding: WeightEncoding) -> dict[str, np.dtype[Any]]:
    """Dtypes of the arrays of a band, by their field."""
    byte, single = np.dtype(np.uint8), np.dtype(np.float32)
    if encoding is WeightEncoding.FLOAT:
        return {"codes": single}
    if encoding is WeightEncoding.NVFP4:
        return {"codes": byte, "scales": byte, "row_factors": single}
    return {"codes": byte, "scales": single}
