"""How objects lie in an artifact: plain ones as one tensor, others band by band.

    OBJECT                   F32, F16 or BF16 [N, K]
    OBJECT/BAND              a plain band of an object with codes
    OBJECT/BAND/codes        F8_E4M3 [N, K], or for NVFP4 U8 [N, K / 2]
    OBJECT/BAND/scales       F32 [N] or [ceil(N / 128), ceil(K / 128)], or for NVFP4 F8_E4M3
                             [N, K / 16]
    OBJECT/BAND/row_factors  F32 [N], of NVFP4 alone

Bands are counted from 0; objects of experts have a leading axis E. Contents as EncodedBand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Final

import numpy as np

from ninfer.artifact.container import Contents
from ninfer.artifact.container_writer import PlannedTensor
from ninfer.artifact.numeric_formats import DTYPE_BITS, FLOAT_FORMATS
from ninfer.artifact.safetensors_file import SafetensorsFile
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import ModelObject
from ninfer.contract.weights import WeightBand, WeightEncoding, band_dtypes, band_shapes
from ninfer.convert.opened_model import ObjectLayout
from ninfer.convert.segments import EncodedSegment, FloatSegment, Plane, Segment

SEPARATOR: Final = "/"
_CODES, _SCALES, _FACTORS = "codes", "scales", "row_factors"


def object_of(tensor: str) -> str:
    """The object that a tensor belongs to."""
    return tensor.partition(SEPARATOR)[0]


def planned_tensors(layout: ObjectLayout) -> tuple[PlannedTensor, ...]:
    """The tensors of an object, to be written."""
    name, shape = layout.item.name, layout.item.shape
    stored = layout.float_format
    if stored is not None:
        return (_planned_floats(name, stored.name, shape, layout.segments),)
    tensors: list[PlannedTensor] = []
    experts = shape[:-2]
    for index, band in enumerate(layout.bands):
        segments = layout.segments_by_band[index]
        prefix = f"{name}{SEPARATOR}{index}"
        if band.encoding is WeightEncoding.FLOAT:
            dtypes = {item.entry.dtype for item in segments if isinstance(item, FloatSegment)}
            is_plain = len(dtypes) == 1 and all(isinstance(item, FloatSegment) for item in segments)
            dtype = dtypes.pop() if is_plain else "F32"
            rows = (*experts, band.num_rows, *shape[-1:])
            tensors.append(_planned_floats(prefix, dtype, rows, segments))
        else:
            encoded = [item for item in segments if isinstance(item, EncodedSegment)]
            tensors.extend(_planned_planes(prefix, band, experts, shape[-1], encoded))
    return tuple(tensors)


def _planned_floats(
    name: str, dtype: str, shape: tuple[int, ...], segments: tuple[Segment, ...]
) -> PlannedTensor:
    def chunks() -> Iterator[memoryview]:
        for segment in segments:
            if isinstance(segment, FloatSegment) and segment.entry.dtype == dtype:
                yield from segment.chunks()
                continue
            values = np.empty(segment.num_elements, np.float32)
            segment.read(values)
            yield memoryview(values.astype("<f4").tobytes())

    return PlannedTensor(name, dtype, shape, prod(shape) * FLOAT_FORMATS[dtype].item_bytes, chunks)


def _planned_planes(
    prefix: str, band: WeightBand, experts: tuple[int, ...], columns: int,
    segments: list[EncodedSegment],
) -> Iterator[PlannedTensor]:  # fmt: skip
    for field, shape in band_shapes(band.encoding, band.num_rows, columns).items():
        whole, dtype = (*experts, *shape), _dtype(band.encoding, field)
        yield PlannedTensor(
            f"{prefix}{SEPARATOR}{field}",
            dtype,
            whole,
            prod(whole) * DTYPE_BITS[dtype] // 8,
            partial(_plane_chunks, segments, field),
        )


def _plane_chunks(segments: list[EncodedSegment], field: str) -> Iterator[memoryview]:
    for segment in segments:
        plane = np.ascontiguousarray(segment.read_plane(field))
        yield plane.reshape(-1).view(np.uint8).data


def _dtype(encoding: WeightEncoding, field: str) -> str:
    """Safetensors dtype of an array of a band."""
    if band_dtypes(encoding)[field] == np.float32:
        return "F32"
    is_packed = encoding is WeightEncoding.NVFP4 and field == _CODES
    return "U8" if is_packed else "F8_E4M3"


def encoded_layout(contents: Contents, file: SafetensorsFile, item: ModelObject) -> ObjectLayout:
    """The layout of an object that is stored band by band. Raises ModelFileError naming a tensor
    that is missing, too much or has the wrong dtype or shape."""
    names = [name for name in contents.objects if object_of(name) == item.name]
    reader = _BandReader(contents, file, item)
    segments: list[Segment] = []
    rows = 0
    while rows < item.shape[-2]:
        segments.append(reader.segment(len(segments)))
        rows += reader.rows
    if rows != item.shape[-2]:
        raise ModelFileError(file.path, names[-1], f"{rows} rows of {item.shape[-2]}")
    for name in names:
        if name not in reader.used:
            raise ModelFileError(file.path, name, "unexpected tensor of an object")
    return ObjectLayout(item, tuple(segments))


class _BandReader:
    """Finds the tensors of one band after the other.

    rows    of the band found last
    used    names of the tensors of all bands found
    """

    def __init__(self, contents: Contents, file: SafetensorsFile, item: ModelObject) -> None:
        self.contents, self.file, self.item = contents, file, item
        self.used: set[str] = set()
        self.rows = 0

    def segment(self, index: int) -> Segment:
        """The band `index`; its rows go to `rows`."""
        prefix = f"{self.item.name}{SEPARATOR}{index}"
        if prefix in self.contents.objects:
            return self._floats(prefix)
        planes = {
            field: self._plane(f"{prefix}{SEPARATOR}{field}")
            for field in (_CODES, _SCALES, _FACTORS)
            if field != _FACTORS or f"{prefix}{SEPARATOR}{field}" in self.contents.objects
        }
        *experts, _, columns = self.item.shape
        codes = planes[_CODES].entry.shape
        self.rows = codes[-2] if len(codes) == len(self.item.shape) else 0
        encoding = self._encoding(planes)
        shapes = band_shapes(encoding, self.rows, columns)
        for field, plane in planes.items():
            wanted, dtype = (*experts, *shapes.get(field, ())), _dtype(encoding, field)
            if self.rows < 1 or plane.entry.shape != wanted or plane.entry.dtype != dtype:
                raise plane.error(
                    f"{plane.entry.dtype} {list(plane.entry.shape)}, {encoding.value} of "
                    f"{list(self.item.shape)} has {dtype} {list(wanted)} here"
                )
        return EncodedSegment(
            encoding, self.rows, columns, planes[_CODES], planes[_SCALES], planes.get(_FACTORS),
            stack=experts[0] if experts else None,
        )  # fmt: skip

    def _encoding(self, planes: Mapping[str, Plane]) -> WeightEncoding:
        if _FACTORS in planes:
            return WeightEncoding.NVFP4
        has_blocks = len(planes[_SCALES].entry.shape) == len(self.item.shape)
        return WeightEncoding.FP8_BLOCK if has_blocks else WeightEncoding.FP8_ROW

    def _floats(self, name: str) -> FloatSegment:
        plane = self._plane(name)
        shape = plane.entry.shape
        self.rows = shape[-2] if len(shape) == len(self.item.shape) else 0
        wanted = (*self.item.shape[:-2], self.rows, self.item.shape[-1])
        if self.rows < 1 or shape != wanted or plane.entry.dtype not in FLOAT_FORMATS:
            raise plane.error(f"{plane.entry.dtype} {list(shape)} is no band of the object")
        return FloatSegment(plane.file, plane.entry, plane.checksum)

    def _plane(self, name: str) -> Plane:
        if name not in self.contents.objects:
            raise ModelFileError(self.file.path, name, "missing tensor")
        record = self.contents.objects[name]
        if record.component != self.item.component:
            raise ModelFileError(
                self.file.path, name, f"component {record.component!r}, not {self.item.component!r}"
            )
        self.used.add(name)
        return Plane(self.file, self.file.entries[name], record.checksum)
