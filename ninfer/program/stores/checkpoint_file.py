"""Checkpoint files: one checkpoint each, damage in any byte is found.

    magic, length of the header, digest of the header      PREFIX
    header      UTF-8 JSON: format, binding, frontier, num_pages, block_bytes, digests, note
    zeros       up to a multiple of ALIGNMENT_BYTES
    blocks      of block_bytes each: pages in order, then the StateImage

A digest is BLAKE2b of 16 bytes, in hexadecimal in the header. The header is all that is read to
know whether a file can be used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from ninfer.artifact.atomic_file import replacement
from ninfer.contract.arrays import ByteArray

FORMAT: Final = 1
ALIGNMENT_BYTES: Final = 4096
_MAGIC: Final = b"NINFCKPT"
_PREFIX: Final = struct.Struct("<8sQ16s")
_MAX_HEADER_BYTES: Final = 1 << 28
_DIGEST_BYTES: Final = 16


class CheckpointFileError(Exception):
    """The file is damaged or not a checkpoint file of this format; the text says how."""


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """What a file says of itself.

    binding       what the model, its formats and the executor must be to use it
    digests       one a block, in hexadecimal
    note          the caller's, kept as it is
    """

    binding: Mapping[str, object]
    frontier: int
    num_pages: int
    block_bytes: int
    digests: tuple[str, ...]
    note: Mapping[str, object]

    @property
    def data_bytes(self) -> int:
        return len(self.digests) * self.block_bytes


def least_bytes(num_blocks: int, block_bytes: int) -> int:
    """No file of so many blocks is smaller."""
    return ALIGNMENT_BYTES + num_blocks * block_bytes


def file_bytes(header: CheckpointHeader) -> int:
    """Size of the file with this header."""
    return _aligned(_PREFIX.size + len(_encode(header))) + header.data_bytes


def write(path: Path, header: CheckpointHeader, blocks: Sequence[ByteArray]) -> None:
    """Write a whole file or none. Raises OSError."""
    text = _encode(header)
    with replacement(path) as file:
        file.write(_PREFIX.pack(_MAGIC, len(text), _digest(text)))
        file.write(text)
        file.write(bytes(_aligned(_PREFIX.size + len(text)) - _PREFIX.size - len(text)))
        for block in blocks:
            file.write(block.data)


def read_header(path: Path) -> CheckpointHeader:
    """Raises OSError and CheckpointFileError, also when the size is not what the header says."""
    with path.open("rb") as file:
        header, start = _read_header(file)
        size = file.seek(0, 2)
    if size != start + header.data_bytes:
        raise CheckpointFileError(f"{size:,} bytes, not {start + header.data_bytes:,}")
    return header


def read_blocks(path: Path, binding: Mapping[str, object], targets: Sequence[ByteArray]) -> None:
    """Fill the targets. Raises OSError and CheckpointFileError; targets may hold anything then."""
    with path.open("rb") as file:
        header, start = _read_header(file)
        if header.binding != binding or len(header.digests) != len(targets):
            raise CheckpointFileError("it was replaced by another one")
        file.seek(start)
        for index, (target, digest) in enumerate(zip(targets, header.digests, strict=True)):
            if file.readinto(target.data) != target.nbytes:
                raise CheckpointFileError(f"it ends inside block {index}")
            if block_digest(target) != digest:
                raise CheckpointFileError(f"block {index} is damaged")


def block_digest(block: ByteArray) -> str:
    return _digest(block.data).hex()


def _read_header(file: BinaryIO) -> tuple[CheckpointHeader, int]:
    """The header and where the blocks begin."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise CheckpointFileError("it ends before its header")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise CheckpointFileError("it does not begin like a checkpoint file")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointFileError(f"a header of {length:,} bytes")
    text = file.read(length)
    if len(text) != length or _digest(text) != digest:
        raise CheckpointFileError("its header is damaged")
    return _decode(text), _aligned(_PREFIX.size + length)


def _encode(header: CheckpointHeader) -> bytes:
    document = {
        "format": FORMAT,
        "binding": dict(header.binding),
        "frontier": header.frontier,
        "num_pages": header.num_pages,
        "block_bytes": header.block_bytes,
        "digests": list(header.digests),
        "note": dict(header.note),
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _decode(text: bytes) -> CheckpointHeader:
    """The digest was right, so what is missing or odd was written by another version."""
    try:
        document: Any = json.loads(text)
        if document["format"] != FORMAT:
            raise CheckpointFileError(f"format {document['format']!r}, not {FORMAT}")
        return CheckpointHeader(
            binding=dict(document["binding"]),
            frontier=int(document["frontier"]),
            num_pages=int(document["num_pages"]),
            block_bytes=int(document["block_bytes"]),
            digests=tuple(str(digest) for digest in document["digests"]),
            note=dict(document["note"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointFileError(f"its header cannot be read: {error!r}") from error


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
