"""Connections: slow headers, too many, silence, text that is not HTTP."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime

import orjson
import pytest

from ninfer.gateway.limits import GatewayLimits
from tests.helpers.fake_engine import hold
from tests.helpers.gateway_rig import PATIENCE_S, Rig, chat_head, running_gateway, until

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
        # Not up to the end: what is trickled on may be answered by a reset.
        answer = await reader.readuntil(b"}}")
        assert 0.2 < time.monotonic() - start_s < 5.0
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
    limits = GatewayLimits(idle_timeout_s=0.2, header_timeout_s=600.0)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b'"ok"}')
        async with asyncio.timeout(PATIENCE_S):
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
        async with asyncio.timeout(PATIENCE_S):
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
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/0.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_text_that_is_not_http_is_a_json_400(rig: Rig, text: bytes) -> None:
    reader, writer = await rig.open_socket()
    writer.write(text)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[:2] == [b"HTTP/1.1", b"400"]
    assert orjson.loads(body)["error"]["code"] == "invalid_http"
    assert b"x-request-id" in head.lower()
    (date,) = [line[6:].decode() for line in head.split(b"\r\n") if line.startswith(b"Date: ")]
    assert abs(parsedate_to_datetime(date).timestamp() - time.time()) < PATIENCE_S
    writer.close()
    assert (await rig.get("/health")).status == 200


async def ask(rig: Rig, *pieces: bytes, closes_side: bool = False) -> tuple[bytes, bytes]:
    """Head and body of what the server says until it closes the connection."""
    reader, writer = await rig.open_socket()
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02 if len(pieces) > 1 else 0)
    if closes_side:
        writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body


@pytest.mark.parametrize(
    ("pieces", "allowed"),
    [
        ((b"FROB /health HTTP/1.1\r\nHost: x\r\n\r\n",), b"GET, HEAD"),
        ((b"get /v1/models?a=b HTTP/1.1\r\nHost: x\r\n\r\n",), b"GET, HEAD"),
        ((b"FROB /v1/chat/completions HTTP/1.0\r\n\r\n",), b"POST"),
        ((b"FROB /generate HTTP/1.1\r\n", b"Host: x\r\n\r\n"), b"POST"),
        ((b"FRO", b"B /generate HTTP/1.1\r\nHost: x\r\n\r\n"), b"DELETE, GET, POST, HEAD"),
        ((HEAD + b"\r\n", b"FROB /generate HTTP/1.1\r\nHost: x\r\n\r\n"), b"POST"),
        ((b"PROPFIND /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",), b"GET, HEAD"),
        ((b"PUT /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",), b"POST"),
    ],
)
async def test_unknown_method_is_a_405_that_says_what_is_allowed(
    rig: Rig, pieces: tuple[bytes, ...], allowed: bytes
) -> None:
    head, body = await ask(rig, *pieces)
    if b'{"status":"ok"}' in body:  # the request before it on the same connection
        head, _, body = body.partition(b'{"status":"ok"}')[2].partition(b"\r\n\r\n")
    assert head.split()[:2] == [b"HTTP/1.1", b"405"]
    assert b"Allow: " + allowed + b"\r\n" in head + b"\r\n"
    error = orjson.loads(body)["error"]
    assert (error["code"], error["type"]) == ("method_not_allowed", "invalid_request_error")


async def test_unknown_method_on_an_unknown_path_is_a_404(rig: Rig) -> None:
    head, body = await ask(rig, b"FROB /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.split()[1] == b"404"
    assert orjson.loads(body)["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        (b"GET /" + b"y" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"414", "uri_too_long"),
        (b"GET /health?" + b"y" * 100_000, b"414", "uri_too_long"),
        (HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n", b"431", "headers_too_large"),
        (HEAD + b"y" * 20_000 + b": 1\r\n\r\n", b"431", "headers_too_large"),
        (HEAD + b"X: 1\r\n" * 200 + b"\r\n", b"431", "headers_too_large"),
        (HEAD + (b"X: " + b"y" * 1_000 + b"\r\n") * 100 + b"\r\n", b"431", "headers_too_large"),
    ],
)
async def test_too_long_a_head_is_told_what_is_too_long(
    rig: Rig, text: bytes, status: bytes, code: str
) -> None:
    head, body = await ask(rig, text)
    assert head.split()[:2] == [b"HTTP/1.1", status]
    assert orjson.loads(body)["error"]["code"] == code
    assert b"x-request-id" in head.lower()
    assert b"connection: close" in head.lower()


async def test_a_head_that_grows_for_ever_is_refused_before_its_end(rig: Rig) -> None:
    field = b"X: " + b"y" * 10_000 + b"\r\n"
    head, body = await ask(rig, HEAD + b"\r\n", HEAD, *[field] * 8)
    assert body.count(b"HTTP/1.1 431 ") == 1
    assert b"headers_too_large" in body
    # A long body that nobody reads is no head.
    long_body = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"
    head, body = await ask(
        rig, long_body, *[b"z" * 50_000] * 6, HEAD + b"Connection: close\r\n\r\n"
    )
    assert head.split()[1] == b"404"
    assert b"HTTP/1.1 431" not in body
    assert b'{"status":"ok"}' in body


async def test_long_headers_within_the_limits_are_fine(rig: Rig) -> None:
    text = b"GET /health?" + b"q" * 8_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    text += b"Cookie: " + b"y" * 16_000 + b"\r\n" + b"X: 1\r\n" * 100
    head, _ = await ask(rig, text + b"\r\n")
    assert head.split()[1] == b"200"


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"Connection: close\r\n\r\n",
        b"GET /nowhere HTTP/1.0\r\n\r\n",
        b"not http\r\n\r\n",
        chat_head(2) + b"{}",
        b"POST /generate HTTP/1.0\r\nContent-Length: 26\r\n\r\n" + b'{"text":"a","stream":true}',
    ],
)
async def test_server_header_tells_no_versions(rig: Rig, text: bytes) -> None:
    head, _ = await ask(rig, text.replace(b"Host", b"Connection: close\r\nHost"))
    servers = [line for line in head.split(b"\r\n") if line.lower().startswith(b"server:")]
    assert servers == [b"Server: ninfer"]


async def test_server_header_of_raw_answers() -> None:
    limits = GatewayLimits(header_timeout_s=0.1, max_connections=1)
    async with running_gateway(limits=limits) as rig:
        first = asyncio.create_task(ask(rig, HEAD))
        await asyncio.sleep(0.05)
        second, _ = await ask(rig, HEAD)
        for head, status in (((await first)[0], b"408"), (second, b"429")):
            assert head.split()[1] == status
            assert b"\r\nServer: ninfer" in head


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (HEAD + b"\r\n", b"200"),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /generate HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", b"404"),
        (b"this is not http\r\n\r\n", b"400"),
    ],
)
async def test_half_closed_client_gets_answers_that_need_no_body(
    rig: Rig, text: bytes, status: bytes
) -> None:
    head, body = await ask(rig, text, closes_side=True)
    assert head.split()[1] == status
    assert orjson.loads(body)


async def test_half_closed_client_gets_all_its_pipelined_answers(rig: Rig) -> None:
    head, body = await ask(rig, (HEAD + b"\r\n") * 3, closes_side=True)
    assert (head + body).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
async def test_half_close_cancels_a_request_with_a_body(
    rig: Rig, stream: bool, is_late: bool
) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    reader, writer = await rig.send_chat(stream=stream)
    if is_late:
        await until(lambda: rig.engine.num_open == 1)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert b"[DONE]" not in answer
    assert stream or answer == b""
    await until(lambda: rig.gateway.counters.exchanges_active == 0)
    assert rig.engine.num_open == 0
    assert rig.gateway.counters.aborts == 1
    writer.close()


async def test_half_close_within_a_body_ends_the_request(rig: Rig) -> None:
    head, body = await ask(rig, chat_head(100) + b'{"messages":', closes_side=True)
    assert head + body == b""
    await until(lambda: rig.gateway.counters.exchanges_active == 0)


async def test_broken_chunked_body_is_a_json_400(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"tex\r\nzzz\r\n'
    )
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert orjson.loads(body)["error"]["code"] == "invalid_http"
    writer.close()


@pytest.mark.parametrize(
    ("path", "codings"), [(b"/generate", b"gzip, chunked"), (b"/v1/messages", b"x-gzip,CHUNKED")]
)
async def test_codings_below_the_chunks_are_not_taken_for_none(
    rig: Rig, path: bytes, codings: bytes
) -> None:
    reader, writer = await rig.open_socket()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path
    lines = b"Transfer-Encoding: %b\r\n" % codings
    writer.write(head + lines + b'\r\nf\r\n{"text": "abc"}\r\n0\r\n\r\n')
    async with asyncio.timeout(PATIENCE_S):
        answer, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert answer.split()[1] == b"501"
    assert b"x-should-retry: false" in answer
    assert orjson.loads(body)["error"]["type"] == "invalid_request_error"
    assert rig.engine.handles == []
    writer.close()


async def test_chunks_alone_are_read_in_any_case(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b'Transfer-Encoding: Chunked\r\n\r\nf\r\n{"text": "abc"}\r\n0\r\n\r\n')
    assert (await reader.readline()).split()[1] == b"200"
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


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        (b"FROB /v1/messages HTTP/1.1\r\nHost: x\r\n\r\n", b"405", "invalid_request_error"),
        (b"FROB /messages/nothing?a=b HTTP/1.1\r\n\r\n", b"404", "not_found_error"),
        (b"POST /v1/messages HTTP/1.1\r\nbad line\r\n\r\n", b"400", "invalid_request_error"),
        (b"GET /v1/messages?" + b"y" * 9_000, b"414", "invalid_request_error"),
        (
            b"POST /v1/messages HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
            b"431",
            "invalid_request_error",
        ),
        (b"GET /v1/messages\r\n\r\n", b"400", "invalid_request_error"),
    ],
)
async def test_broken_requests_on_a_known_path_are_told_in_its_familys_words(
    rig: Rig, text: bytes, status: bytes, kind: str
) -> None:
    head, body = await ask(rig, text)
    assert head.split()[1] == status
    answer = orjson.loads(body)
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert answer["request_id"].encode() in head


async def test_slow_headers_on_a_known_path_are_told_in_its_familys_words() -> None:
    async with running_gateway(limits=GatewayLimits(header_timeout_s=0.2)) as rig:
        head, body = await ask(rig, b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n")
        assert head.split()[1] == b"408"
        assert orjson.loads(body)["error"]["type"] == "timeout_error"


async def test_what_is_refused_before_it_is_a_request_is_counted() -> None:
    limits = GatewayLimits(header_timeout_s=0.1, max_connections=1)
    async with running_gateway(limits=limits) as rig:
        slow = asyncio.create_task(ask(rig, HEAD))
        await asyncio.sleep(0.05)
        await ask(rig, HEAD)
        await slow
        for text in (b"not http\r\n\r\n", HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n"):
            await ask(rig, text)
        families = {family.name: family for family in rig.gateway.counters.http.families()}
        counts = {dict(s.labels)["code"]: s.value for s in families["http_errors"].samples}
        assert counts == {
            "server_overloaded": 1,
            "request_timeout": 1,
            "invalid_http": 1,
            "headers_too_large": 1,
        }
