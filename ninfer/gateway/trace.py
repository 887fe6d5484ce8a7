"""The W3C trace context of a request: one id that follows it through proxies and logs."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(-.*)?"
)
_TRACE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """`parent_id` is the caller's span, None where the trace begins here."""

    trace_id: str
    parent_id: str | None = None


def parse_trace(traceparent: str | None) -> Trace:
    """The trace of a `traceparent` header; a new one without or with a broken header."""
    match = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if match is None or not _is_valid(match):
        return Trace(secrets.token_hex(_TRACE_BYTES))
    return Trace(match["trace"], match["parent"])


def _is_valid(match: re.Match[str]) -> bool:
    """Version ff and ids of zeros are none; only later versions may have more fields."""
    is_longer = match[4] is not None
    if match["version"] == "ff" or (match["version"] == "00" and is_longer):
        return False
    return bool(match["trace"].strip("0") and match["parent"].strip("0"))
