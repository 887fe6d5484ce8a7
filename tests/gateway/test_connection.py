"""Connections: slow headers, too many, silence, text that is not HTTP."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from ninfer.gateway.limits import GatewayLimits
from tests.helpers.fake_engine import hold
from tests.helpers.gateway_rig import Rig, running_gateway, until

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def test_trickled_headers_are_cut_off_at_the_deadline() -> None:
    limits = GatewayLimits(header_timeout_s=0.3)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()

        async def trickle() -> None:
            for byte in HEAD * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(trickle())
        start_s = time.monotonic()
        answer = await reader.read()
        assert 0.2 < time.monotonic() - start_s < 1.0
        assert answer.split()[1] == b"408"
        assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        sending.cancel()
        writer.close()


async def test_second_request_has_the_same_header_deadline() -> None:
    limits = GatewayLimits(header_timeout_s=0.2)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b'"ok"}')
        await asyncio.sleep(0.3)  # idle for longer than the header deadline is fine
        writer.write(HEAD)
        assert (await reader.read()).split()[1] == b"408"
        writer.close()


async def test_idle_connection_is_closed_in_the_end() -> None:
    limits = GatewayLimits(idle_timeout_s=0.2, header_timeout_s=5.0)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b'"ok"}')
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()


async def test_many_stalled_sockets_do_not_delay_a_request() -> None:
    limits = GatewayLimits(header_timeout_s=1.0, body_timeout_s=1.0)
    async with running_gateway(limits=limits) as rig:
        sockets = [await rig.open_socket() for _ in range(200)]
        for index, (_, writer) in enumerate(sockets):
            head = (
                HEAD
                if index % 2
                else b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            )
            writer.write(head)
        start_s = time.monotonic()
        assert (await rig.chat()).status == 200
        assert time.monotonic() - start_s < 0.9, "it waited for the stalled ones"
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*(reader.read() for reader, _ in sockets))
        for _, writer in sockets:
            writer.close()
            await writer.wait_closed()
        assert {answer.split()[1] for answer in answers} == {b"408"}, set(answers)
        assert (await rig.chat()).status == 200


async def test_a_long_answer_is_no_slow_request() -> None:
    limits = GatewayLimits(header_timeout_s=0.1, idle_timeout_s=0.1, body_timeout_s=0.1)
    async with running_gateway(limits=limits) as rig:
        gate = asyncio.Event()
        rig.engine.script = hold(gate, "a")
        asking = asyncio.create_task(rig.chat())
        await asyncio.sleep(0.4)
        gate.set()
        assert (await asking).json()["choices"][0]["message"]["content"] == "a done"


async def test_connections_beyond_the_cap_are_told_so() -> None:
    async with running_gateway(limits=GatewayLimits(max_connections=2)) as rig:
        held = [await rig.open_socket() for _ in range(2)]
        reader, writer = await rig.open_socket()
        answer = await reader.read()
        assert answer.split()[1] == b"429"
        assert b"Retry-After: 1" in answer
        writer.close()
        for _, held_writer in held:
            held_writer.close()
        await until(lambda: rig.gateway.counters.exchanges_active == 0)
        await asyncio.sleep(0.05)
        assert (await rig.get("/health")).status == 200


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls hello\r\n\r\n",
        b"this is not http\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header line\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: nan\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_text_that_is_not_http_is_a_json_400(rig: Rig, text: bytes) -> None:
    reader, writer = await rig.open_socket()
    writer.write(text)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert orjson.loads(body)["error"]["code"] == "invalid_http"
    assert b"x-request-id" in head.lower()
    writer.close()
    assert (await rig.get("/health")).status == 200


async def test_broken_chunked_body_is_a_json_400(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"tex\r\nzzz\r\n'
    )
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert orjson.loads(body)["error"]["code"] == "invalid_http"
    writer.close()


async def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + HEAD + b"Connection: close\r\n\r\n"
    )
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.endswith(b'{"status":"ok"}')
    writer.close()


async def test_http_1_0_streams_end_with_the_connection(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    body = b'{"text":"a","stream":true}'
    writer.write(
        b"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    answer = await reader.read()
    assert answer.endswith(b"data: [DONE]\n\n")
    writer.close()
