"""Checksums of stored bytes: BLAKE2b of 32 bytes, written as `blake2b256:HEX`."""

from __future__ import annotations

import hashlib
from typing import Final

PREFIX: Final = "blake2b256:"
_DIGEST_BYTES: Final = 32
TEXT_LENGTH: Final = len(PREFIX) + 2 * _DIGEST_BYTES
"""Characters of every checksum text."""


class Checksum:
    """Accumulates bytes."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._hash = hashlib.blake2b(data, digest_size=_DIGEST_BYTES)

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    @property
    def text(self) -> str:
        return PREFIX + self._hash.hexdigest()
