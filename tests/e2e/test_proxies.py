"""Behind nginx and HAProxy, set up as docs/deploy.md says."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from ninfer.contract.errors import Unavailable
from ninfer.gateway.cache_fields import SESSION_HEADER
from ninfer.gateway.limits import GatewayLimits
from ninfer.options import EngineOptions
from tests.helpers.fake_engine import hold, say
from tests.helpers.gateway_rig import MESSAGES, PATIENCE_S, Rig, running_gateway, until
from tests.helpers.proxies import Proxy, ProxyName, require_proxy, running_proxy
from tests.helpers.served_model import served_demo_model

LIMITS = GatewayLimits(keep_alive_interval_s=0.1)
MIB = 2**20


@dataclass
class Site:
    """Two replicas with scripted engines behind one proxy."""

    proxy: Proxy
    replicas: tuple[Rig, Rig]
    session: aiohttp.ClientSession

    def play(self, script: Any) -> None:
        for replica in self.replicas:
            replica.engine.script = script

    @property
    def handles(self) -> list[Any]:
        return [handle for replica in self.replicas for handle in replica.engine.handles]

    async def chat(
        self, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, dict[str, str], Any]:
        body = {"messages": MESSAGES, **fields}
        async with self.session.post(
            f"{self.proxy.url}/v1/chat/completions",
            data=io.BytesIO(orjson.dumps(body)),
            headers={"Content-Type": "application/json", **(headers or {})},
        ) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return response.status, names, orjson.loads(await response.read())

    async def open_chat(self, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.proxy.open()
        body = orjson.dumps({"messages": MESSAGES, **fields})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def running_site(name: ProxyName, folder: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_gateway(limits=LIMITS))
        second = await stack.enter_async_context(running_gateway(limits=LIMITS))
        ports = (first.port, second.port)
        proxy = await stack.enter_async_context(running_proxy(name, folder, ports))
        connector = aiohttp.TCPConnector(ssl=proxy.tls)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Site(proxy, (first, second), session)


@pytest.fixture(params=["nginx", "haproxy"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with running_site(request.param, tmp_path) as site:
        yield site


async def read_until(reader: asyncio.StreamReader, mark: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.readuntil(mark)


async def test_events_arrive_one_by_one(site: Site) -> None:
    gate = asyncio.Event()
    site.play(hold(gate, "Hel", "lo"))
    reader, writer = await site.open_chat(stream=True)
    head = await read_until(reader, b'"content":"Hel"')
    assert b" 200 OK" in head
    assert b"text/event-stream" in head
    await read_until(reader, b'"content":"lo"')
    assert not gate.is_set(), "both came while the engine was still at work"
    gate.set()
    await read_until(reader, b"data: [DONE]\n\n")
    writer.close()


async def test_a_long_prefill_is_not_silent(site: Site) -> None:
    gate = asyncio.Event()
    site.play(hold(gate))
    reader, writer = await site.open_chat(stream=True)
    for _ in range(3):
        await read_until(reader, b": keep-alive\n\n")
    gate.set()
    await read_until(reader, b"data: [DONE]\n\n")
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(site: Site, stream: bool) -> None:
    site.play(hold(asyncio.Event(), "a"))
    reader, writer = await site.open_chat(stream=stream)
    if stream:
        await read_until(reader, b'"content":"a"')
    await until(lambda: len(site.handles) == 1)
    writer.transport.abort()
    await until(lambda: all(handle.is_released for handle in site.handles))
    assert site.handles[0].is_cancelled


async def test_a_conversation_stays_with_its_replica(site: Site) -> None:
    site.play(say("ok"))
    used = Counter[int]()
    for name in range(8):
        counts = [len(replica.engine.handles) for replica in site.replicas]
        for _ in range(3):
            status, _, _ = await site.chat({SESSION_HEADER: f"conversation {name}"})
            assert status == 200
        added = [
            len(replica.engine.handles) - before
            for replica, before in zip(site.replicas, counts, strict=True)
        ]
        assert sorted(added) == [0, 3]
        used[added.index(3)] += 1
    assert used[0] > 0 < used[1]


async def test_a_replica_that_is_gone_is_passed_by(site: Site) -> None:
    site.play(say("ok"))
    gone, left = site.replicas
    gone.gateway.lifecycle.begin_drain()
    await until(lambda: gone.gateway.lifecycle.health.value == "draining")
    await gone.stop()
    for name in range(6):
        status, _, _ = await site.chat({SESSION_HEADER: f"conversation {name}"})
        assert status == 200
    assert (len(gone.engine.handles), len(left.engine.handles)) == (0, 6)


async def test_haproxy_asks_whether_a_replica_drains(tmp_path: Path) -> None:
    """A replica that still takes requests, but said that it will not for long, gets no more."""
    async with running_site("haproxy", tmp_path) as site:
        site.play(say("ok"))
        draining, left = site.replicas
        draining.gateway.lifecycle.begin_drain()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                before = len(draining.engine.handles)
                for name in range(8):
                    assert (await site.chat({SESSION_HEADER: f"conversation {name}"}))[0] == 200
                if len(draining.engine.handles) == before:
                    break
                await asyncio.sleep(0.1)
        assert len(left.engine.handles) >= 8


async def test_errors_and_their_headers_pass(site: Site) -> None:
    for replica in site.replicas:
        replica.engine.refusal = Unavailable("server_overloaded", "Every place is taken.", 7.0)
    status, headers, body = await site.chat({"X-Request-Id": "mine"})
    assert (status, headers["retry-after"], headers["x-should-retry"]) == (429, "7", "true")
    assert headers["x-request-id"] == headers["request-id"] == "mine"
    assert body["error"]["code"] == "server_overloaded"


async def test_large_bodies_pass_and_too_large_ones_do_not(site: Site) -> None:
    site.play(say("ok"))
    status, _, _ = await site.chat(ignored="x" * (4 * MIB))
    assert status == 200
    reader, writer = await site.proxy.open()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n".encode())
    writer.write(f"Content-Length: {64 * MIB + 1}\r\n\r\n{{".encode())
    answer = await read_until(reader, b'"code":"request_too_large"')
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/v1/metrics", "/metrics/", "/v1/metrics//", "/%6detrics", "/v1/%6d%65trics?a=b",
     "/v1/./metrics", "/x/../metrics", "//metrics", "/v1/v1/metrics"],
)  # fmt: skip
async def test_figures_stay_inside_however_they_are_spelled(site: Site, path: str) -> None:
    reader, writer = await site.proxy.open()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 404 ")
    writer.close()


async def test_commands_stay_inside_and_health_does_not(site: Site) -> None:
    for path in ("/flush_cache", "/v1/flush_cache", "/abort_request", "/v1/abort_request/"):
        async with site.session.post(f"{site.proxy.url}{path}", json={}) as response:
            assert response.status == 404
    assert all(replica.engine.num_flushes == 0 for replica in site.replicas)
    async with site.session.get(f"{site.proxy.url}/health") as response:
        assert response.status == 200


async def test_without_a_replica_the_answer_is_503(site: Site) -> None:
    for replica in site.replicas:
        await replica.stop()
    async with site.session.get(f"{site.proxy.url}/v1/models") as response:
        assert response.status == 503


@pytest.mark.no_cover
async def test_two_replicas_keep_their_cache_hits(tmp_path: Path) -> None:
    """Every conversation's second turn finds its first one, whichever proxy is in front."""
    names: tuple[ProxyName, ...] = ("nginx", "haproxy")
    for name in names:
        require_proxy(name)
    options = EngineOptions(max_concurrency=2, max_context=512, host_cache_bytes=0)
    async with served_demo_model(options) as first, served_demo_model(options) as second:
        ports = [int(server.url.rpartition(":")[2]) for server in (first, second)]
        for name in names:
            folder = tmp_path / name
            folder.mkdir()
            async with running_proxy(name, folder, ports) as proxy:
                connector = aiohttp.TCPConnector(ssl=proxy.tls)
                async with aiohttp.ClientSession(connector=connector) as session:
                    talks = [f"{name} {index}" for index in range(3)]
                    cached = [await talk_twice(session, proxy.url, key) for key in talks]
            assert all(count > 64 for count in cached)
        assert all(server.engine.status().prompt_tokens_total > 0 for server in (first, second))


async def talk_twice(session: aiohttp.ClientSession, url: str, key: str) -> int:
    """Cached tokens of a conversation's second turn. The proxy cannot see `prompt_cache_key`, so
    the client says it in the header as well."""
    messages = [{"role": "user", "content": f"{key}: " + "What is a volcano? " * 20}]
    cached = 0
    for _ in range(2):
        body = {
            "messages": messages,
            "max_tokens": 4,
            "temperature": 0,
            "prompt_cache_key": key,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        headers = {SESSION_HEADER: key}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as got:
            assert got.status == 200, await got.text()
            answer = await got.json()
        message = answer["choices"][0]["message"]["content"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages += [
            {"role": "assistant", "content": message},
            {"role": "user", "content": "And a river?"},
        ]
    return int(cached)
