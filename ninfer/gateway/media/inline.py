"""Media that came with the request: data URLs and bare base64."""

from __future__ import annotations

import binascii
import re
from typing import Final
from urllib.parse import unquote_to_bytes

from ninfer.gateway.media.errors import invalid_media, media_budget_exceeded

_SCHEME: Final = re.compile(r"\s*data:", re.IGNORECASE)
_WHITESPACE: Final = re.compile(rb"[ \t\r\n\f]+")
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")


def is_data_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def decode_data_url(text: str, path: str, max_bytes: int) -> bytes:
    """The bytes of a data URL. Its media type is not looked at: the bytes say what they are.

    Raises RequestError naming `path`: invalid_media, media_budget_exceeded.
    """
    match = _SCHEME.match(text)
    head, comma, payload = text[match.end() if match else 0 :].partition(",")
    if not comma:
        raise invalid_media(path, "is a data: URL without a comma")
    parameters = [parameter.strip().lower() for parameter in head.split(";")[1:]]
    _check_length(len(payload), path, 4 * max_bytes)
    data = unquote_to_bytes(payload) if "%" in payload else payload.encode("utf-8")
    if "base64" in parameters:
        return _decode(data, path, max_bytes)
    _check_length(len(data), path, max_bytes)
    return data


def decode_base64(text: str, path: str, max_bytes: int) -> bytes:
    """Base64 of either alphabet, wrapped or not, with or without padding. Errors as above."""
    return _decode(text.encode("utf-8"), path, max_bytes)


def _decode(data: bytes, path: str, max_bytes: int) -> bytes:
    compact = _WHITESPACE.sub(b"", data).translate(_STANDARD).rstrip(b"=")
    _check_length(len(compact) * 3 // 4, path, max_bytes)
    try:
        return binascii.a2b_base64(compact + b"=" * (-len(compact) % 4), strict_mode=True)
    except binascii.Error:
        raise invalid_media(path, "is not base64") from None


def _check_length(num_bytes: int, path: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise media_budget_exceeded(path, "is too large")
