"""Safetensors files: a fully checked header over a memory-mapped data section.

    u64 header length | JSON header | data

Opening reads the header only. It refuses what the format forbids: a header that is no JSON object,
unknown dtypes, shapes that do not fit their byte ranges, ranges that overlap, leave gaps or end
anywhere but at the end of the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from ninfer.artifact.json_document import Fields, parse_object
from ninfer.artifact.numeric_formats import DTYPE_BITS
from ninfer.artifact.small_file import check_regular
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import StoredTensor

MAX_HEADER_BYTES: Final = 100_000_000
LENGTH_BYTES: Final = 8
METADATA_KEY: Final = "__metadata__"
_MAX_DIMENSION: Final = 2**63 - 1
_LFS_PREFIX: Final = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [start, stop) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFile:
    """An open file. `entries` in the order of their bytes; `metadata` is `__metadata__`."""

    path: Path
    metadata: Mapping[str, str]
    entries: Mapping[str, TensorEntry]
    _data_start: int = field(repr=False)
    _mapping: mmap.mmap = field(repr=False)

    def view(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes, read-only and not copied; valid as long as it is referenced."""
        whole = memoryview(self._mapping)
        return whole[self._data_start + entry.start : self._data_start + entry.stop]

    def stored(self, entry: TensorEntry) -> StoredTensor:
        return StoredTensor(entry.name, entry.dtype, entry.shape, entry.num_bytes, self.path)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map `path` and check its header. Raises ModelFileError."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = _read_header(file, size, path)
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, None, error.strerror or str(error)) from None
    header = parse_object(header_bytes, path, "header")
    data_start = LENGTH_BYTES + len(header_bytes)
    metadata = _metadata(header.pop(METADATA_KEY, None), path)
    entries = _entries(header, path)
    _check_ranges(entries, size - data_start, path)
    return SafetensorsFile(
        path, metadata, {entry.name: entry for entry in entries}, data_start, mapping
    )


def _read_header(file: BinaryIO, size: int, path: Path) -> bytes:
    start = file.read(LENGTH_BYTES)
    if size < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise ModelFileError(path, None, f"not a safetensors file: only {size} bytes long")
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise ModelFileError(path, "header", _bad_length(start + file.read(16), length, size))
    header = file.read(length)
    if len(header) != length or not header.startswith(b"{"):
        raise ModelFileError(path, "header", "not a safetensors header")
    return header


def _bad_length(start: bytes, length: int, size: int) -> str:
    if start.startswith(_LFS_PREFIX):
        return "a Git LFS pointer, not the file itself (fetch it with `git lfs pull`)"
    if length > MAX_HEADER_BYTES or not start[LENGTH_BYTES:].startswith(b"{"):
        return f"not a safetensors file (header length {length})"
    return f"truncated: header of {length} bytes in a file of {size} bytes"


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ModelFileError(path, METADATA_KEY, "expected an object of strings")
    return value


def _entries(header: Mapping[str, Any], path: Path) -> list[TensorEntry]:
    entries = [_entry(name, value, path) for name, value in header.items()]
    return sorted(entries, key=lambda entry: (entry.start, entry.stop))


def _entry(name: str, value: Any, path: Path) -> TensorEntry:
    if not isinstance(value, dict):
        raise ModelFileError(path, name, "expected an object with dtype, shape and data_offsets")
    fields = Fields(path, value, f"{name}.")
    dtype = fields.text("dtype")
    if dtype not in DTYPE_BITS:
        raise fields.error("dtype", f"unknown dtype {dtype!r}")
    shape = fields.integers("shape", 0, _MAX_DIMENSION)
    offsets = fields.integers("data_offsets", 0, _MAX_DIMENSION)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fields.error("data_offsets", f"{list(offsets)} is not a byte range")
    _check_size(fields, dtype, shape, offsets[1] - offsets[0])
    return TensorEntry(name, dtype, shape, offsets[0], offsets[1])


def _check_size(fields: Fields, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    # Dimension by dimension, so that a hostile shape never becomes an enormous number.
    num_bits = DTYPE_BITS[dtype]
    for size in sorted(shape):
        num_bits *= size
        if num_bits > _MAX_DIMENSION:
            raise fields.error("shape", "too large")
    if num_bits != 8 * num_bytes:
        raise fields.error("data_offsets", f"{num_bytes} bytes for shape {list(shape)} of {dtype}")


def _check_ranges(entries: list[TensorEntry], data_bytes: int, path: Path) -> None:
    end = 0
    for entry in entries:
        if entry.start != end:
            problem = "overlaps the tensor before it" if entry.start < end else "leaves a gap"
            raise ModelFileError(path, f"{entry.name}.data_offsets", problem)
        end = entry.stop
    if end > data_bytes:
        raise ModelFileError(
            path, entries[-1].name, f"truncated: {end} bytes of data needed, {data_bytes} present"
        )
    if end < data_bytes:
        raise ModelFileError(path, None, f"{data_bytes - end} bytes behind the last tensor")
