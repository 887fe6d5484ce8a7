"""Which web pages may use the server (CORS).

Off by default: a page that somebody happens to visit must not drive their GPU. Cookies are never
allowed, keys travel in headers of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from aiohttp import web

ANY: Final = "*"
_EXPOSED: Final = "x-request-id, request-id, retry-after"
_HEADER_NAMES: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+( *, *[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
_PREFLIGHT_AGE_S: Final = 600


class CorsPolicy:
    """The origins that are let in: none, some, or any (`*`)."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Headers of every answer, errors and streams included."""
        headers = {} if not self._origins or ANY in self._origins else {"Vary": "Origin"}
        origin = self._allowed(request)
        if origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED
        return headers

    def preflight_headers(self, request: web.BaseRequest, methods: str) -> dict[str, str]:
        """What a browser that asks first is told; `methods` are those of the path.

        Any header may be sent. `*` would leave out Authorization, so the names are repeated.
        """
        if self._allowed(request) is None:
            return {}
        headers = {
            "Access-Control-Allow-Methods": methods,
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        return headers

    def _allowed(self, request: web.BaseRequest) -> str | None:
        """What to let in; None: the page is not, or no page asks."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin.lower() in self._origins else None
