"""Ids: the one an HTTP exchange is traced by, and those of the objects in answers."""

from __future__ import annotations

import re
import secrets
import string
from typing import Final

_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 24


def new_id(prefix: str) -> str:
    """`prefix` and 24 random characters of base 62: unique for ever."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def exchange_id(offered: str | None) -> str:
    """The client's `X-Request-Id` when it is well formed, else a new one.

    Two clients may send the same; it is only echoed and never names an engine request.
    """
    if offered is not None and _CLIENT_ID.fullmatch(offered):
        return offered
    return new_id("req_")
