"""Decoding of compressed request bodies: zstd, gzip and deflate, at most two of them stacked.

The decoded size obeys a limit while decoding, so a small body cannot unfold into a large one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from ninfer.contract.errors import RequestError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdDecompressor, ZstdError

MAX_ENCODINGS: Final = 2


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def parse_encodings(lines: Sequence[str]) -> tuple[str, ...]:
    """Names of `Content-Encoding` in the order they were applied, without identity. `lines`: its
    values; several are one list, as RFC 9110 has it.

    Raises RequestError `unsupported_content_encoding`.
    """
    names = [name.strip().lower() for name in ",".join(lines).split(",")]
    encodings = tuple(name for name in names if name not in ("", "identity"))
    unknown = any(name not in _OPENERS for name in encodings)
    if unknown or len(encodings) > MAX_ENCODINGS:
        raise RequestError(
            "unsupported_content_encoding",
            f"Content-Encoding must be at most {MAX_ENCODINGS} of zstd, gzip, deflate, identity.",
        )
    return encodings


def decode_body(data: bytes, encodings: tuple[str, ...], max_bytes: int) -> bytes:
    """Undo `encodings`, the last one first.

    Raises RequestError: `invalid_request_encoding` for a corrupt or truncated stream,
    `request_too_large` when a stage yields more than `max_bytes`.
    """
    for name in reversed(encodings):
        data = _decode(data, name, max_bytes)
    return data


def too_large(max_bytes: int) -> RequestError:
    return RequestError(
        "request_too_large", f"The request body is larger than the limit of {max_bytes} bytes."
    )


def _decode(data: bytes, name: str, max_bytes: int) -> bytes:
    """One stage; the frames or members of a stream are joined."""
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        decompressor = _OPENERS[name](data)
        try:
            piece = decompressor.decompress(data, max_bytes - num_bytes + 1)
        except (zlib.error, ZstdError, EOFError):
            raise _invalid(name, "corrupt") from None
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        if not decompressor.eof:
            raise _invalid(name, "truncated")
        pieces.append(piece)
        data = decompressor.unused_data
        if not data:
            return b"".join(pieces)


def _open_gzip(data: bytes) -> _Decompressor:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _open_deflate(data: bytes) -> _Decompressor:
    """zlib-wrapped as the standard has it, or raw as some clients send it."""
    is_wrapped = (
        len(data) >= 2 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    )
    return zlib.decompressobj(zlib.MAX_WBITS if is_wrapped else -zlib.MAX_WBITS)


def _open_zstd(data: bytes) -> _Decompressor:
    return ZstdDecompressor()


_OPENERS: Final[Mapping[str, Callable[[bytes], _Decompressor]]] = {
    "zstd": _open_zstd,
    "gzip": _open_gzip,
    "x-gzip": _open_gzip,
    "deflate": _open_deflate,
}


def _invalid(name: str, why: str) -> RequestError:
    return RequestError("invalid_request_encoding", f"The {name} request body is {why}.")
