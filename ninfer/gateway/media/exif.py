"""The orientation that a camera noted: one number out of a TIFF structure."""

from __future__ import annotations

import struct
from typing import Final

_ORIENTATION: Final = 0x0112
_SHORT: Final = 3
_ENTRY_BYTES: Final = 12
_SWAPPING: Final = frozenset({5, 6, 7, 8})
_PREFIX: Final = b"Exif\0\0"


def swaps_sides(exif: bytes) -> bool:
    """Whether the picture is shown with width and height exchanged. False for a damaged note:
    viewers ignore it too."""
    return _orientation(exif.removeprefix(_PREFIX)) in _SWAPPING


def _orientation(tiff: bytes) -> int:
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for index in range(num_entries):
            place = directory + 2 + index * _ENTRY_BYTES
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, place)
            if tag == _ORIENTATION:
                return int(value) if kind == _SHORT else 1
    except struct.error:
        return 1
    return 1
