"""A hostile corner of the internet on loopback: 127.0.0.1 counts as public, 127.0.0.2 as inside."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from ninfer.gateway.media.addresses import is_public
from ninfer.gateway.media.fetch import RemoteFetcher
from ninfer.gateway.media.hosts import HostRules
from ninfer.gateway.media.limits import MediaLimits

OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"
Play: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class MediaSite:
    """pages    what each path answers: raw bytes, or a coroutine that plays with the writer
    names    answers of the resolver, one list a question, the last one for ever
    heads    request heads that arrived outside
    inside   connections that reached the inside; must stay 0
    """

    port: int
    pages: dict[str, bytes | Play] = field(default_factory=dict)
    names: dict[str, list[list[str]]] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    inside: int = 0
    num_open: int = 0

    def url(self, path: str, host: str = "good.test") -> str:
        return f"http://{host}:{self.port}{path}"

    async def lookup(self, host: str, _port: int) -> list[str]:
        self.questions.append(host)
        answers = self.names.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def fetcher(
        self, limits: MediaLimits | None = None, *entries: str, is_open: bool = True
    ) -> RemoteFetcher:
        """Every host of this site may be asked, at its port."""
        suffixes = [f".test:{self.port}", f"localhost:{self.port}"]
        hosts = [f"{host}:{self.port}" for host in (OUTSIDE, INSIDE)]
        return RemoteFetcher(
            limits or MediaLimits(),
            HostRules(entries or (*suffixes, *hosts) if is_open else None),
            lookup=self.lookup,
            is_allowed=lambda address: address == OUTSIDE or is_public(address),
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            page = self.pages.get(head.split(" ")[1], response(b"", status="404 Not Found"))
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _reached(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.inside += 1
        writer.write(response(b"secret"))
        writer.close()


def response(body: bytes, *, status: str = "200 OK", **headers: str) -> bytes:
    """A whole HTTP answer; header names are given with `_` for `-`."""
    named = {"Content-Length": str(len(body)), "Connection": "close"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return response(b"", status=status, Location=location)


@asynccontextmanager
async def media_site() -> AsyncIterator[MediaSite]:
    site = MediaSite(0)
    outside = await asyncio.start_server(site._answer, OUTSIDE, 0)
    site.port = outside.sockets[0].getsockname()[1]
    inside = await asyncio.start_server(site._reached, INSIDE, site.port)
    site.names["good.test"] = [[OUTSIDE]]
    try:
        yield site
    finally:
        outside.close()
        inside.close()
