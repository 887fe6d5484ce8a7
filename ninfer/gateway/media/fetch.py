"""Fetching from the open internet on behalf of a stranger, without becoming their tool.

    URL -> rules of hosts -> resolve once -> every address public -> dial one of those addresses
     ^                                                                        |
     +------------------- redirect: all checks again <-----------------------+

No cookies, credentials, proxies or content encodings; the size is checked while bytes arrive.
Whatever goes wrong is one error with one text.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ninfer.gateway.media.addresses import is_public
from ninfer.gateway.media.errors import fetch_failed, media_budget_exceeded
from ninfer.gateway.media.hosts import HostRules
from ninfer.gateway.media.limits import MediaLimits

Lookup: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Numeric addresses of a host name; OSError when there are none."""
_logger = logging.getLogger(__name__)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_URL_CHARACTERS: Final = 8192
_CHUNK_BYTES: Final = 64 * 1024
_LOOKUP_THREADS: Final = 4
_HEADERS: Final = {"Accept": "image/*, video/*", "Accept-Encoding": "identity"}


class FetchRefusedError(Exception):
    """A check said no; which one is nobody's business but the log's."""


class SystemLookup:
    """The system's resolver in threads of its own: names that take long to resolve keep nobody
    else's threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, host: str, port: int) -> list[str]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "media-lookup")
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, _address_info, host, port
        )
        return [str(entry[4][0]) for entry in found]


def _address_info(host: str, port: int) -> list[Any]:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


class RemoteFetcher:
    """Gets the bytes behind an http(s) URL.

    lookup       resolves names; a test has its own
    is_allowed   decides about each numeric address
    """

    def __init__(
        self,
        limits: MediaLimits,
        rules: HostRules,
        *,
        lookup: Lookup | None = None,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._limits = limits
        self._rules = rules
        self._lookup = lookup or SystemLookup()
        self._is_allowed = is_allowed
        self._places = asyncio.Semaphore(limits.fetches_at_once)

    async def fetch(self, text: str, path: str) -> bytes:
        """The file behind the URL `text`. Raises RequestError naming `path`: invalid_media with
        the same text for every reason, but media_budget_exceeded for a file that is too large."""
        async with self._places:
            try:
                async with asyncio.timeout(self._limits.fetch_timeout_s):
                    return await self._follow(text, path)
            except (FetchRefusedError, aiohttp.ClientError, OSError, ValueError) as error:
                _logger.info("a remote picture or video was not fetched: %s", _reason(error))
                raise fetch_failed(path) from None

    async def _follow(self, text: str, path: str) -> bytes:
        url = self._checked(text)
        async with aiohttp.ClientSession(
            connector=self._connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_CHUNK_BYTES,
        ) as session:
            for _ in range(self._limits.max_redirects + 1):
                async with session.get(url, allow_redirects=False) as response:
                    if response.status == 200:
                        return await self._read(response, path)
                    if response.status not in _REDIRECTS:
                        raise FetchRefusedError(f"status {response.status}")
                    url = self._checked(response.headers.get("Location", ""), base=url)
        raise FetchRefusedError("too many redirects")

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        most = self._limits.max_item_bytes
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise FetchRefusedError("a content encoding that was not asked for")
        if (response.content_length or 0) > most:
            raise media_budget_exceeded(path, "is too large")
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > most:
                raise media_budget_exceeded(path, "is too large")
        return bytes(data)

    def _checked(self, text: str, base: URL | None = None) -> URL:
        if not 0 < len(text) <= _MAX_URL_CHARACTERS:
            raise FetchRefusedError("an empty or too long URL")
        url = URL(text.strip())
        if base is not None:
            url = base.join(url)
        if not self._rules.allows(url):
            raise FetchRefusedError("an address that the rules do not allow")
        return url.with_fragment(None)

    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            resolver=_CheckedResolver(self._lookup, self._is_allowed),
            socket_factory=self._open_socket,
            use_dns_cache=False,
            force_close=True,
        )

    def _open_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """The last look, at the very address that is dialled: a host that is a number has met no
        resolver."""
        family, kind, protocol, _, address = info
        if not self._is_allowed(address[0]):
            raise OSError("an address that is not public")
        return socket.socket(family, kind, protocol)


class _CheckedResolver(AbstractResolver):
    """Resolves a name once; one forbidden answer condemns all of them."""

    def __init__(self, lookup: Lookup, is_allowed: Callable[[str], bool]) -> None:
        self._lookup = lookup
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._lookup(host, port)
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise OSError("an address that is not public")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """There is nothing to close."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, FetchRefusedError) else type(error).__name__
