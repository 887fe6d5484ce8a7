"""zstd as a client has it, on every supported Python."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def zstd_compress(data: bytes) -> bytes:
    return zstd.compress(data)
