"""Whether bytes begin like a video file. Its size in pixels is known only to a decoder."""

from __future__ import annotations

from typing import Final

_EBML: Final = b"\x1a\x45\xdf\xa3"
_GIF: Final = (b"GIF87a", b"GIF89a")


def is_video(data: bytes) -> bool:
    """MP4 and its kin, WebM and Matroska, AVI, animated GIF."""
    if data[4:8] == b"ftyp" or data.startswith((_EBML, *_GIF)):
        return True
    return data[:4] == b"RIFF" and data[8:12] == b"AVI "
