"""Writes a .ninfer container in one pass over its data.

The header is written first with checksums of zeros, which are as long as real ones, and again at
the end when the data has been summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from ninfer.artifact.atomic_file import atomic_file
from ninfer.artifact.checksum import Checksum
from ninfer.artifact.container import (
    PENDING_CHECKSUM,
    RESOURCE_PREFIX,
    Contents,
    encode_metadata,
)
from ninfer.artifact.numeric_formats import DTYPE_BITS
from ninfer.artifact.safetensors_file import LENGTH_BYTES, METADATA_KEY, TensorEntry
from ninfer.contract.errors import InvariantError

HEADER_ALIGNMENT: Final = 4096
"""The data section starts on a multiple of this, so that it can be mapped and copied in pages."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write. `chunks()` yields exactly `num_bytes` bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    chunks: Callable[[], Iterator[memoryview]]


def write_container(
    path: Path,
    contents: Contents,
    tensors: Sequence[PlannedTensor],
    progress: Callable[[int, int], None],
) -> None:
    """Write `path` atomically; checksums in `contents` are filled in.

    `progress(done_bytes, total_bytes)` follows the data. Raises ModelFileError.
    """
    # Wide elements first: every tensor is then aligned to its element.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    entries = _entries(ordered)
    with atomic_file(path) as file:
        header = _header(_with_checksums(contents, {}), entries)
        file.write(header)
        checksums = _write_data(file, ordered, progress)
        file.seek(0)
        final_header = _header(_with_checksums(contents, checksums), entries)
        if len(final_header) != len(header):
            raise InvariantError("the header changed its length while the data was written")
        file.write(final_header)


def _entries(tensors: Sequence[PlannedTensor]) -> list[TensorEntry]:
    entries, start = [], 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, start, stop))
        start = stop
    return entries


def _with_checksums(contents: Contents, checksums: Mapping[str, str]) -> Contents:
    return replace(
        contents,
        objects={
            name: replace(record, checksum=checksums.get(name, PENDING_CHECKSUM))
            for name, record in contents.objects.items()
        },
        resources={
            name: checksums.get(RESOURCE_PREFIX + name, PENDING_CHECKSUM)
            for name in contents.resources
        },
    )


def _header(contents: Contents, entries: Sequence[TensorEntry]) -> bytes:
    """Length and JSON, padded with spaces."""
    document = {
        METADATA_KEY: encode_metadata(contents, entries),
        **{
            entry.name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": (entry.start, entry.stop),
            }
            for entry in entries
        },
    }
    text = orjson.dumps(document)
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_data(
    file: BinaryIO,
    tensors: Sequence[PlannedTensor],
    progress: Callable[[int, int], None],
) -> dict[str, str]:
    """Checksums by tensor name."""
    checksums, done = {}, 0
    total = sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        checksum, start = Checksum(), done
        for chunk in tensor.chunks():
            file.write(chunk)
            checksum.update(chunk)
            done += len(chunk)
            progress(done, total)
        if done - start != tensor.num_bytes:
            raise InvariantError(f"{tensor.name}: {done - start} bytes, not {tensor.num_bytes}")
        checksums[tensor.name] = checksum.text
    return checksums
