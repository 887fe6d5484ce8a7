"""Event streams in time: headers at admission, keep-alive, slow readers, disconnects."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.generation import Admitted, Event, GenerationRequest, OutputDelta, Progress
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.sse import KEEP_ALIVE_FRAME, data_frame
from tests.helpers.fake_engine import hold, usage_of
from tests.helpers.gateway_rig import (
    HOST,
    MESSAGES,
    PATIENCE_S,
    Rig,
    chat_head,
    running_gateway,
    until,
)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_frame_is_one_line_and_reads_back(text: str) -> None:
    frame = data_frame({"text": text})
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert b"\n" not in frame[:-2]
    assert b"\r" not in frame
    assert orjson.loads(frame[6:]) == {"text": text}


async def read_until(reader: asyncio.StreamReader, mark: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.readuntil(mark)


async def test_headers_and_roles_go_out_at_admission_and_not_before(rig: Rig) -> None:
    admission, prefill = asyncio.Event(), asyncio.Event()

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        await admission.wait()
        async for event in hold(prefill)(request):
            yield event

    rig.engine.script = script
    reader, writer = await rig.send_chat(stream=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await reader.read(1)
    admission.set()
    head = await read_until(reader, b'"finish_reason":null}]}\n\n')
    assert b" 200 OK" in head
    assert b'"role":"assistant"' in head
    assert not prefill.is_set()
    prefill.set()
    await read_until(reader, b"data: [DONE]\n\n")
    writer.close()


async def test_silence_is_filled_with_comments() -> None:
    async with running_gateway(limits=GatewayLimits(keep_alive_interval_s=0.05)) as rig:
        gate = asyncio.Event()
        rig.engine.script = hold(gate, "a")
        reader, writer = await rig.send_chat(stream=True)
        for _ in range(3):
            await read_until(reader, b": keep-alive\n\n")
        gate.set()
        rest = await read_until(reader, b"data: [DONE]\n\n")
        assert b'"content":" done"' in rest
        writer.close()
        answer = await rig.chat(stream=True)
        assert answer.events[-1] == "[DONE]"


async def test_no_comment_while_events_flow() -> None:
    loop, times_s = asyncio.get_running_loop(), []
    async with running_gateway(limits=GatewayLimits(keep_alive_interval_s=0.2)) as rig:

        async def script(request: GenerationRequest) -> AsyncIterator[Event]:
            yield Admitted(usage_of(request))
            for _ in range(40):
                await asyncio.sleep(0.01)
                times_s.append(loop.time())
                yield Progress((OutputDelta("content", "x"),), usage_of(request))
            async for event in hold(asyncio.Event())(request):
                yield event

        rig.engine.script = script
        reader, writer = await rig.send_chat(stream=True)
        num_early, num_pieces = 0, 0
        while num_pieces < 40:
            piece = await read_until(reader, b"\n\n")
            num_early += piece.endswith(KEEP_ALIVE_FRAME)
            num_pieces += b'"content":"x"' in piece
        # A machine that stood still in between made a silence of its own.
        assert num_early <= sum(int((b - a) / 0.1) for a, b in pairwise(times_s))
        await read_until(reader, KEEP_ALIVE_FRAME)
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["tokenising", "queue", "prefill", "decode"])
async def test_disconnect_cancels_in_every_stage(rig: Rig, stream: bool, stage: str) -> None:
    gate = asyncio.Event()
    if stage == "tokenising":
        rig.frontend.gate = gate
    pieces = ("a", "b") if stage == "decode" else ()
    rig.engine.script = hold(gate, *pieces, is_admitted=stage != "queue")
    reader, writer = await rig.send_chat(stream=stream)
    await until(lambda: len(rig.frontend.chats) == 1)
    if stage == "tokenising":
        await asyncio.sleep(0.02)
    else:
        await until(lambda: len(rig.engine.handles) == 1)
    if stream and stage == "decode":
        await read_until(reader, b'"content":"b"')
    writer.close()
    await until(lambda: rig.gateway.counters.exchanges_active == 0)
    assert rig.gateway.counters.aborts == 1
    assert all(handle.is_cancelled and handle.is_released for handle in rig.engine.handles)
    assert len(rig.engine.handles) == (0 if stage == "tokenising" else 1)
    gate.set()
    rig.frontend.gate = None
    assert (await rig.chat()).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_every_sibling(rig: Rig, stream: bool) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    _, writer = await rig.send_chat(stream=stream, n=5)
    await until(lambda: len(rig.engine.handles) == 5)
    writer.close()
    await until(lambda: rig.engine.num_open == 0)
    assert all(handle.is_cancelled for handle in rig.engine.handles)


def flood(request: GenerationRequest) -> AsyncIterator[Event]:
    """Far more than any socket buffer holds."""

    async def script() -> AsyncIterator[Event]:
        yield Admitted(usage_of(request))
        for _ in range(4000):
            await asyncio.sleep(0)
            yield Progress((OutputDelta("content", "x" * 8000),), usage_of(request))
        await asyncio.Event().wait()

    return script()


async def open_lazy_reader(
    rig: Rig,
    path: str = "/v1/chat/completions",
    fields: dict[str, Any] | None = None,
    receive_buffer_bytes: int = 4096,
) -> socket.socket:
    """A client that sends a streaming request and then reads nothing."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.setblocking(False)
    await loop.sock_connect(client, (HOST, rig.port))
    body = orjson.dumps(fields or {"messages": MESSAGES, "stream": True})
    head = chat_head(len(body)).replace(b"/v1/chat/completions", path.encode())
    await loop.sock_sendall(client, head + body)
    return client


async def test_reader_that_falls_behind_loses_its_request_and_nobody_else(rig: Rig) -> None:
    rig.engine.script = flood
    client = await open_lazy_reader(rig)
    await until(lambda: len(rig.engine.handles) == 1)
    rig.engine.script = hold(gate := asyncio.Event(), "other")
    other = asyncio.create_task(rig.chat(stream=True))
    await until(lambda: rig.engine.handles[0].is_released)
    assert rig.engine.handles[0].is_cancelled
    gate.set()
    assert (await other).events[-1] == "[DONE]"
    client.close()


async def test_cumulative_frames_are_skipped_for_a_reader_that_is_behind(rig: Rig) -> None:
    """Each frame alone is larger than the buffer, and all of them together are far too much."""

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        yield Admitted(usage_of(request))
        for _ in range(200):
            yield Progress((OutputDelta("content", "x" * 50_000),), usage_of(request))
        all_made.set()
        async for event in hold(gate)(request):
            yield event

    gate, all_made = asyncio.Event(), asyncio.Event()
    gate.set()
    rig.engine.script = script
    loop = asyncio.get_running_loop()
    client = await open_lazy_reader(rig, "/generate", {"text": "a", "stream": True})
    await until(all_made.is_set)
    received = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data = await loop.sock_recv(client, 1 << 20)
            assert data, "the connection was cut"
            received += data
    client.close()
    assert received.count(b"data: {") < 100
    last = received[received.rindex(b"data: {") :].partition(b"\n\n")[0]
    assert orjson.loads(last[6:])["text"] == "x" * (200 * 50_000) + " done"


async def test_reader_that_takes_nothing_for_too_long_is_cut_off() -> None:
    limits = GatewayLimits(stream_buffer_bytes=1 << 40, write_timeout_s=0.2)
    async with running_gateway(limits=limits) as rig:
        rig.engine.script = flood
        start_s = time.monotonic()
        client = await open_lazy_reader(rig)
        await until(lambda: len(rig.engine.handles) == 1)
        await until(lambda: rig.engine.handles[0].is_released)
        assert time.monotonic() - start_s > 0.15
        client.close()


async def test_slow_reader_that_goes_on_taking_stays() -> None:
    while not await stays_with_slow_reader(write_timeout_s=0.8):
        pass  # the machine stood still for longer than the deadline, which is another case


async def stays_with_slow_reader(write_timeout_s: float) -> bool:
    """False when this process was not given the time to read at half the deadline's pace."""
    limits = GatewayLimits(stream_buffer_bytes=1 << 40, write_timeout_s=write_timeout_s)
    async with running_gateway(limits=limits) as rig:
        rig.engine.script = flood
        client = await open_lazy_reader(rig, receive_buffer_bytes=1 << 20)
        loop = asyncio.get_running_loop()
        received, start_s = 0, loop.time()
        read_s = start_s
        while read_s - start_s < 1.5 * write_timeout_s:
            await asyncio.sleep(0.05)
            try:
                received += len(await loop.sock_recv(client, 1 << 20))
            except ConnectionError:
                received = 0
            if loop.time() - read_s > write_timeout_s / 2:
                client.close()
                return False
            read_s = loop.time()
        assert 1 << 20 < received < 4000 * 8000
        assert rig.engine.num_open == 1
        client.close()
        return True


async def test_client_that_never_takes_a_whole_answer_is_cut_off() -> None:
    async with running_gateway(limits=GatewayLimits(write_timeout_s=0.2)) as rig:

        async def script(request: GenerationRequest) -> AsyncIterator[Event]:
            yield Admitted(usage_of(request))
            yield Progress((OutputDelta("content", "x" * 30_000_000),), usage_of(request))
            async for event in hold(gate)(request):
                yield event

        gate = asyncio.Event()
        gate.set()
        rig.engine.script = script
        reader, writer = await rig.send_chat()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(rig.engine.handles) == 1)
        await until(lambda: rig.gateway.counters.exchanges_active == 0)
        assert rig.gateway.counters.aborts == 1
        del reader
        writer.close()
