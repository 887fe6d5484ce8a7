"""What a picture's first bytes say: its format and the size in which it is shown.

Nothing is decompressed, so a small file that announces a huge picture costs nothing here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ninfer.gateway.media.exif import swaps_sides

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp", "gif", "bmp"]
_MOST_SECTIONS: Final = 100_000
"""Chunks or segments that are looked at; a file with more of them was made to be slow."""
_PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_MARKERS_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_FRAME_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_APP1: Final = 0xE1


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`width` and `height` are those of the picture as it is shown, EXIF orientation applied."""

    format: ImageFormat
    width: int
    height: int


class ImageHeaderError(ValueError):
    """The bytes begin like a picture but announce none; the text completes "the picture ..."."""


def sniff_image(data: bytes) -> ImageFormat | None:
    """The format that the first bytes belong to."""
    if data.startswith(_PNG_MAGIC):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if data[:2] == b"BM":
        return "bmp"
    return None


def read_image_header(data: bytes) -> ImageHeader | None:
    """None when the bytes are no picture of a known format. Raises ImageHeaderError."""
    kind = sniff_image(data)
    if kind is None:
        return None
    try:
        width, height, is_turned = _READERS[kind](data)
    except (struct.error, IndexError):
        raise ImageHeaderError("is cut off in its header") from None
    if width < 1 or height < 1:
        raise ImageHeaderError("has no pixels")
    return ImageHeader(kind, height, width) if is_turned else ImageHeader(kind, width, height)


_Size: TypeAlias = tuple[int, int, bool]
"""(width, height, whether the sides are exchanged when it is shown)"""


def _png(data: bytes) -> _Size:
    if data[12:16] != b"IHDR":
        raise ImageHeaderError("does not begin with its size")
    width, height = struct.unpack_from(">II", data, 16)
    place = len(_PNG_MAGIC)
    for _ in range(_MOST_SECTIONS):
        if place + 8 > len(data):
            return width, height, False
        (length,) = struct.unpack_from(">I", data, place)
        name = data[place + 4 : place + 8]
        if name == b"eXIf":
            return width, height, swaps_sides(data[place + 8 : place + 8 + length])
        if name == b"IEND":
            return width, height, False
        place += length + 12
    raise ImageHeaderError("has too many parts")


def _jpeg(data: bytes) -> _Size:
    size: tuple[int, int] | None = None
    is_turned = has_exif = False
    place = 2
    for _ in range(_MOST_SECTIONS):
        marker, place = _next_marker(data, place)
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            break
        if marker in _MARKERS_ALONE:
            continue
        (length,) = struct.unpack_from(">H", data, place)
        segment = data[place + 2 : place + length]
        if marker in _FRAME_MARKERS and size is None:
            height, width = struct.unpack_from(">HH", segment, 1)
            size = width, height
        elif marker == _APP1 and segment.startswith(b"Exif\0\0") and not has_exif:
            has_exif, is_turned = True, swaps_sides(segment)
        place += max(length, 2)
    if size is None:
        raise ImageHeaderError("does not tell its size")
    return *size, is_turned


def _next_marker(data: bytes, place: int) -> tuple[int, int]:
    """(marker, place behind it). Bytes that stand between segments are passed over, as decoders
    do. Raises IndexError at the end of the data."""
    start = data.find(b"\xff", place)
    if start < 0:
        raise IndexError
    for at in range(start + 1, start + 1 + _MOST_SECTIONS):
        if data[at] != 0xFF:
            return data[at], at + 1
    raise ImageHeaderError("has too many parts")


def _webp(data: bytes) -> _Size:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise ImageHeaderError("does not begin with a key frame")
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF, False
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise ImageHeaderError("does not begin with its signature")
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, False
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        if len(data) < 30:
            raise IndexError
        return width, height, _webp_is_turned(data)
    raise ImageHeaderError("does not begin with its size")


def _webp_is_turned(data: bytes) -> bool:
    place = 12
    for _ in range(_MOST_SECTIONS):
        if place + 8 > len(data):
            return False
        (length,) = struct.unpack_from("<I", data, place + 4)
        if data[place : place + 4] == b"EXIF":
            return swaps_sides(data[place + 8 : place + 8 + length])
        place += 8 + length + length % 2
    raise ImageHeaderError("has too many parts")


def _gif(data: bytes) -> _Size:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height, False


def _bmp(data: bytes) -> _Size:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    elif header_bytes >= 40:
        width, height = struct.unpack_from("<ii", data, 18)
    else:
        raise ImageHeaderError("has an unknown header")
    return width, abs(height), False


_READERS: Final[Mapping[ImageFormat, Callable[[bytes], _Size]]] = {
    "png": _png,
    "jpeg": _jpeg,
    "webp": _webp,
    "gif": _gif,
    "bmp": _bmp,
}
