"""Reasoning in a form that clients keep for us: `reasoning.encrypted_content`.

A client that stores nothing here sends the blob back instead of the thought itself, maybe to
another replica or after a restart. So it holds the whole text, and its key is the same in every
process: the tag tells our own unharmed blobs from cut, changed and foreign ones. It is no secret
and need not be one, since a client may write any thought it likes into an item's plain `content`.
A blob that does not open is ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

_VERSION: Final = "nr1."
_KEY: Final = b"ninfer reasoning, version 1"
_TAG_BYTES: Final = 16


def seal(text: str) -> str:
    data = text.encode()
    return _VERSION + base64.urlsafe_b64encode(_tag(data) + data).decode()


def unseal(blob: str) -> str | None:
    """The text, or None for what `seal` has not made."""
    if not blob.startswith(_VERSION):
        return None
    try:
        sealed = base64.b64decode(blob.removeprefix(_VERSION), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    tag, data = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
    return data.decode() if hmac.compare_digest(tag, _tag(data)) else None


def _tag(data: bytes) -> bytes:
    return hmac.digest(_KEY, data, hashlib.sha256)[:_TAG_BYTES]
