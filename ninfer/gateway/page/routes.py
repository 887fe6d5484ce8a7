"""`/` and `/page/*`: the page for browsers, and what it is made of.

Whoever does not ask `/` for HTML gets a small JSON object there: probes, and clients that try a
base URL. The page needs nothing from anywhere else and may load nothing from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from ninfer.contract.errors import RequestError
from ninfer.gateway import health
from ninfer.gateway.answer_headers import answer_headers
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.page.assets import INDEX, Asset, load_assets

PREFIX: Final = "/page/"
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Page:
    """The handlers; the files are read on the first request for one."""

    def __init__(self) -> None:
        self._assets: Mapping[str, Asset] | None = None

    async def index(self, exchange: Exchange) -> web.StreamResponse:
        """The page, or what probes of the base URL expect."""
        if exchange.request.path != "/" or not accepts_html(exchange.request.headers):
            response = await health.index(exchange)
            response.headers.add("Vary", "Accept")
            return response
        return _serve(exchange, (await self._load())[INDEX], {"Vary": "Accept"})

    async def file(self, exchange: Exchange) -> web.StreamResponse:
        """One of the files that the page names. Raises RequestError `not_found`."""
        asset = (await self._load()).get(exchange.path.removeprefix(PREFIX))
        if asset is None:
            raise RequestError("not_found", "The page has no such file.")
        return _serve(exchange, asset, {})

    async def _load(self) -> Mapping[str, Asset]:
        if self._assets is None:
            self._assets = await asyncio.to_thread(load_assets)
        return self._assets


def accepts_html(headers: Mapping[str, str]) -> bool:
    """`Accept` names HTML itself, as browsers do; `*/*` alone is what tools send."""
    for item in headers.get("Accept", "").lower().split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        if kind == "text/html":
            return not any(_is_zero_weight(parameter) for parameter in parameters)
    return False


def _is_zero_weight(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and value.strip().rstrip("0").rstrip(".") in ("", "0")


def _serve(exchange: Exchange, asset: Asset, extra: Mapping[str, str]) -> web.Response:
    """Browsers keep the files but ask each time whether they are still the same: a page never
    mixes files of two versions of the server."""
    headers = {
        "ETag": asset.etag,
        "Cache-Control": "no-cache",
        **SECURITY_HEADERS,
        **extra,
        **answer_headers(exchange.request_id),
    }
    if _is_known(exchange.request.headers.get("If-None-Match", ""), asset.etag):
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, headers={"Content-Type": asset.content_type, **headers})


def _is_known(if_none_match: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags
