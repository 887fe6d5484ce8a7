"""Pictures for tests, drawn by Pillow, and headers that announce what Pillow would not draw."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode
from typing import Any

from PIL import Image


def picture(kind: str, width: int, height: int, *, orientation: int | None = None) -> bytes:
    """A real file of Pillow's format `kind`; `orientation` is noted as EXIF."""
    options: dict[str, Any] = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 60)).save(file, kind, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that ends behind its announcement of any size."""
    return b"\x89PNG\r\n\x1a\n" + png_chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    )


def png_chunk(name: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"
