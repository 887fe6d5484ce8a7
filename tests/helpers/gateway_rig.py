"""A Gateway on a loopback port, its fake neighbours, and small clients for it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from ninfer.contract.model import ModelCard
from ninfer.gateway.app import Gateway
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.media.desk import MediaDesk
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.server import Listener, open_listener
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD, FakeEngine, FakeFrontend

HOST = "127.0.0.1"
MESSAGES = [{"role": "user", "content": "hi"}]
PATIENCE_S = 60.0
"""Longest wait for what happens at once, on a machine that is busy with others."""
PATIENT_LIMITS = GatewayLimits(
    header_timeout_s=600.0,
    idle_timeout_s=600.0,
    body_timeout_s=600.0,
    keep_alive_interval_s=600.0,
    write_timeout_s=600.0,
    user_timeout_s=600.0,
)
"""For tests that are not about time: a process that stood still for a minute breaks no deadline."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error

    @property
    def events(self) -> list[Any]:
        """Decoded data events of a stream; comments are left out, `[DONE]` stays a text."""
        frames = self.body.decode().split("\n\n")
        assert frames.pop() == "", "a stream ends with a blank line"
        data = [frame for frame in frames if not frame.startswith(":")]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in data)
        texts = [frame.removeprefix("data: ") for frame in data]
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]


@dataclass(slots=True)
class Rig:
    gateway: Gateway
    engine: FakeEngine
    frontend: FakeFrontend
    url: str
    session: aiohttp.ClientSession
    port: int
    listener: Listener | None = None

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self.listener is not None:
            await self.listener.aclose()

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, headers, await response.read())

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, payload: object, **kwargs: Any) -> Answer:
        return await self.request("POST", path, json=payload, **kwargs)

    async def post_bytes(self, path: str, data: bytes, **headers: str) -> Answer:
        """Header names are given with `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("Content-Type", "application/json")
        return await self.request("POST", path, data=io.BytesIO(data), headers=named)

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": MESSAGES, **fields})

    async def generate(self, **fields: Any) -> Answer:
        return await self.post("/generate", fields)

    async def open_socket(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)

    async def send_chat(self, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A chat request on a raw socket that the test may close."""
        reader, writer = await self.open_socket()
        body = orjson.dumps({"messages": MESSAGES, **fields})
        writer.write(chat_head(len(body)) + body)
        await writer.drain()
        return reader, writer


def chat_head(content_length: int) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {content_length}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def running_gateway(
    *,
    limits: GatewayLimits | None = None,
    options: ServeOptions | None = None,
    is_attached: bool = True,
    log: RequestLog | None = None,
    card: ModelCard = CARD,
    media: MediaDesk | None = None,
) -> AsyncIterator[Rig]:
    engine, frontend = FakeEngine(), FakeFrontend()
    options = options or ServeOptions(host=HOST, port=0)
    gateway = Gateway(options, card, limits=limits, log=log, media=media)
    if is_attached:
        gateway.attach(ServedModel(engine, frontend, card))
    listener = await open_listener(gateway, HOST, 0)
    try:
        async with aiohttp.ClientSession() as session:
            port = int(listener.url.rpartition(":")[2])
            yield Rig(gateway, engine, frontend, listener.url, session, port, listener)
    finally:
        await listener.aclose()


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the condition is anything
            await asyncio.sleep(0.005)
