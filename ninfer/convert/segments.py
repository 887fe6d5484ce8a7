"""What a stretch of an object is stored as: plain numbers, or codes with scales.

    FloatSegment     one tensor of BF16, F16 or F32
    EncodedSegment   a matrix in several tensors: codes, scales and, for NVFP4, a global factor

Reading checks what headers cannot show: checksums, finite numbers, scales that make sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.artifact.checksum import Checksum
from ninfer.artifact.numeric_formats import FLOAT_FORMATS, FloatFormat, has_e4m3_nan
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import ModelFileError
from ninfer.contract.weights import EncodedBand, WeightEncoding, band_shapes
from ninfer.ops import encoded_weights
from ninfer.ops.float_codecs import HalfArray


@dataclass(frozen=True, slots=True)
class FloatSegment:
    """`checksum` is verified while it is read, if there is one."""

    file: SafetensorsFile
    entry: TensorEntry
    checksum: str | None = None

    @property
    def encoding(self) -> WeightEncoding:
        return WeightEncoding.FLOAT

    @property
    def format(self) -> FloatFormat:
        return FLOAT_FORMATS[self.entry.dtype]

    @property
    def num_elements(self) -> int:
        return self.entry.num_bytes // self.format.item_bytes

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    def chunks(self) -> Iterator[memoryview]:
        """The tensor's bytes piece by piece.

        Raises ModelFileError behind the last piece when the checksum is wrong or a weight is not
        finite; whoever reads must not trust the pieces before that.
        """
        checksum, is_finite = Checksum(), True
        for chunk in self.format.chunks(self.file.view(self.entry)):
            if self.checksum is not None:
                checksum.update(chunk)
            is_finite = is_finite and self.format.is_finite(chunk)
            yield chunk
        if self.checksum not in (None, checksum.text):
            raise self.error("checksum mismatch: the file is damaged")
        if not is_finite:
            raise self.error("a weight is NaN or infinite")

    def read(self, out: Float32Array) -> None:
        """Write all elements to `out` [num_elements]. Raises ModelFileError."""
        start = 0
        for chunk in self.chunks():
            stop = start + len(chunk) // self.format.item_bytes
            self.format.widen(chunk, out[start:stop])
            start = stop

    def read_codes(self, out: HalfArray) -> None:
        """Write the codes of a BF16 tensor to `out` [num_elements]. Raises ModelFileError."""
        start = 0
        for chunk in self.chunks():
            codes = np.frombuffer(chunk, "<u2")
            out[start : start + codes.size] = codes
            start += codes.size

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(self.file.path, self.entry.name, message)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of an encoded matrix."""

    file: SafetensorsFile
    entry: TensorEntry
    checksum: str | None = None

    def raw(self) -> memoryview:
        """The tensor's bytes. Raises ModelFileError when the checksum is wrong."""
        view = self.file.view(self.entry)
        if self.checksum is not None and Checksum(view).text != self.checksum:
            raise self.error("checksum mismatch: the file is damaged")
        return view

    def read_e4m3(self) -> NDArray[np.uint8]:
        """Codes in one axis. Raises ModelFileError for NaN."""
        raw = self.raw()
        if has_e4m3_nan(raw):
            raise self.error("a code is NaN")
        return np.frombuffer(raw, np.uint8)

    def read_bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.raw(), np.uint8)

    def read_float(self) -> Float32Array:
        """Numbers in one axis. Raises ModelFileError for NaN and infinity."""
        values = np.empty(prod(self.entry.shape), np.float32)
        FloatSegment(self.file, self.entry, self.checksum).read(values)
        return values

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(self.file.path, self.entry.name, message)


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A matrix [rows, columns] in codes; with `stack`, one for each of so many experts.

    scales    a number for each row, block or group, or a single one for the matrix (FP8_ROW)
    factor    NVFP4: a number for each row, or a single one; `divides`: its inverse is meant
    """

    encoding: WeightEncoding
    rows: int
    columns: int
    codes: Plane
    scales: Plane
    factor: Plane | None = None
    divides: bool = False
    stack: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self._stacked((self.rows, self.columns)))

    @property
    def planes(self) -> tuple[Plane, ...]:
        planes = (self.codes, self.scales)
        return planes if self.factor is None else (*planes, self.factor)

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(plane.entry for plane in self.planes)

    def read(self, out: Float32Array) -> None:
        """Write the decoded elements to `out` [num_elements]. Raises ModelFileError."""
        matrix = out.reshape(self._stacked((self.rows, self.columns)))
        encoded_weights.decode_into(self.read_band(), matrix)

    def read_band(self) -> EncodedBand:
        """The codes as they are. Raises ModelFileError for NaN and for scales that are none."""
        return EncodedBand(self.encoding, **{name: self.read_plane(name) for name in self.shapes})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of the band, by their field."""
        shapes = band_shapes(self.encoding, self.rows, self.columns)
        return {name: self._stacked(shape) for name, shape in shapes.items()}

    def read_plane(self, name: str) -> NDArray[Any]:
        """One array of the band, by its field. Raises ModelFileError as read_band does."""
        shape = self.shapes[name]
        if name == "codes":
            is_packed = self.encoding is WeightEncoding.NVFP4
            codes = self.codes.read_bytes() if is_packed else self.codes.read_e4m3()
            return codes.reshape(shape)
        if name == "row_factors" and self.factor is not None:
            return _spread(self._factors(self.factor), shape)
        if self.encoding is WeightEncoding.NVFP4:
            return self._group_scales().reshape(shape)
        return _spread(self._float_scales(), shape)

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.stack is None else (self.stack, *shape)

    def _group_scales(self) -> NDArray[np.uint8]:
        scales = self.scales.read_e4m3()
        if bool((scales > 0x80).any()):
            raise self.scales.error("a scale is negative")
        return scales

    def _float_scales(self) -> Float32Array:
        scales = self.scales.read_float()
        if bool((scales < 0).any()):
            raise self.scales.error("a scale is negative")
        if scales.size == 1 and scales[0] == 0:
            raise self.scales.error("the scale of the whole matrix is zero")
        return scales

    def _factors(self, plane: Plane) -> Float32Array:
        factors = plane.read_float()
        if not bool((factors > 0).all()):
            raise plane.error("the global scale is not above zero")
        if not self.divides:
            return factors
        with np.errstate(over="ignore"):
            inverse = np.reciprocal(factors)
        if not bool(np.isfinite(inverse).all()):
            raise plane.error("the global scale is too small to divide by")
        return inverse


Segment: TypeAlias = FloatSegment | EncodedSegment


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A single number for all of `shape`, or as many as it has places."""
    if values.size == 1:
        return np.full(shape, values[0], values.dtype)
    return values.reshape(shape)
