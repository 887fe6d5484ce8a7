"""Request bodies over the wire: types, encodings, sizes, slow senders, hostile JSON."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import AsyncIterator

import orjson
import pytest

from ninfer.contract.abandonment import stop_if_abandoned
from ninfer.gateway import body
from ninfer.gateway import fields as field_reads
from ninfer.gateway.json_text import JsonText, parse_json
from ninfer.gateway.limits import GatewayLimits
from tests.helpers.compression import zstd_compress
from tests.helpers.gateway_rig import MESSAGES, Rig, chat_head, running_gateway, until

CHAT = "/v1/chat/completions"
BODY = orjson.dumps({"messages": MESSAGES})


def gzip_compress(data: bytes) -> bytes:
    """The same bytes at any time: tests are named after them, in every process alike."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "application/json"}, 200),
        ({"Content_Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content_Type": "application/vnd.api+json"}, 200),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": 'application/json; charset="UTF-8"'}, 200),
        ({"Content_Type": "application/json; charset=utf-16"}, 415),
        ({"Content_Type": "application/json; charset=latin-1"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "application/json", "Origin": "http://evil.example"}, 200),
        ({"Content_Type": "application/vnd.api+json", "Origin": "http://evil.example"}, 415),
        ({"Content_Type": "text/plain", "Origin": "http://evil.example"}, 415),
    ],
)
async def test_media_types(rig: Rig, headers: dict[str, str], status: int) -> None:
    answer = await rig.post_bytes(CHAT, BODY, **headers)
    assert answer.status == status
    if status == 415:
        assert answer.error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("origin", "status"), [(b"", b"200"), (b"Origin: http://x\r\n", b"415")])
async def test_missing_media_type(rig: Rig, origin: bytes, status: bytes) -> None:
    reader, writer = await rig.open_socket()
    head = chat_head(len(BODY)).replace(b"Content-Type: application/json\r\n", origin)
    writer.write(head + BODY)
    assert (await reader.readline()).split()[1] == status
    writer.close()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("zstd", zstd_compress(BODY)),
        ("gzip", gzip_compress(BODY)),
        ("gzip, zstd", zstd_compress(gzip_compress(BODY))),
        ("identity", BODY),
    ],
)
async def test_encoded_bodies(rig: Rig, encoding: str, data: bytes) -> None:
    assert (await rig.post_bytes(CHAT, data, Content_Encoding=encoding)).status == 200


async def test_encodings_in_several_lines_are_one_list(rig: Rig) -> None:
    data = zstd_compress(gzip_compress(BODY))
    reader, writer = await rig.open_socket()
    lines = b"\r\nContent-Encoding: gzip\r\nContent-Encoding: zstd\r\n\r\n"
    writer.write(chat_head(len(data)).removesuffix(b"\r\n\r\n") + lines + data)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


@pytest.mark.parametrize(
    ("encoding", "data", "status", "code"),
    [
        ("zstd", zstd_compress(BODY)[:-3], 400, "invalid_request_encoding"),
        ("zstd", BODY, 400, "invalid_request_encoding"),
        ("br", BODY, 415, "unsupported_content_encoding"),
        ("gzip", gzip_compress(b"{"), 400, "invalid_json"),
    ],
)
async def test_badly_encoded_bodies(
    rig: Rig, encoding: str, data: bytes, status: int, code: str
) -> None:
    answer = await rig.post_bytes(CHAT, data, Content_Encoding=encoding)
    assert (answer.status, answer.error["code"]) == (status, code)


async def test_size_limit_of_the_wire_and_of_the_decoded_body() -> None:
    padding = orjson.dumps({"messages": MESSAGES, "pad": "x" * 20_000})
    async with running_gateway(limits=GatewayLimits(max_body_bytes=10_000)) as rig:

        async def in_chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(padding), 1000):
                yield padding[start : start + 1000]

        declared = await rig.post_bytes(CHAT, padding)
        chunked = await rig.request(
            "POST", CHAT, data=in_chunks(), headers={"Content-Type": "application/json"}
        )
        unfolded = await rig.post_bytes(CHAT, zstd_compress(padding), Content_Encoding="zstd")
        for answer in (declared, chunked, unfolded):
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert (await rig.post_bytes(CHAT, BODY)).status == 200


async def test_long_bodies_are_parsed_off_the_loop() -> None:
    long = orjson.dumps({"messages": MESSAGES, "pad": ["x" * 50] * 200_000})
    async with running_gateway() as rig:
        answer, _ = await asyncio.gather(rig.post_bytes(CHAT, long), rig.get("/health"))
        assert answer.status == 200
        broken = await rig.post_bytes(CHAT, long[:-1])
        assert broken.error["code"] == "invalid_json"


async def test_expect_continue_is_answered_before_the_body(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(chat_head(len(BODY)).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    assert await reader.readline() == b"\r\n"
    writer.write(BODY)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_stalled_body_is_answered_408_and_closed() -> None:
    limits = GatewayLimits(body_timeout_s=0.2, body_timeout_per_mib_s=0.0)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()
        writer.write(chat_head(100) + b'{"')
        start_s = time.monotonic()
        answer = await reader.read()
        assert time.monotonic() - start_s < 1.8, "the rest of the body was waited for"
        assert answer.split()[1] == b"408"
        assert b"request_timeout" in answer
        writer.close()


async def test_slow_body_within_its_allowance_is_served() -> None:
    limits = GatewayLimits(body_timeout_s=1.0)
    async with running_gateway(limits=limits) as rig:
        reader, writer = await rig.open_socket()
        writer.write(chat_head(len(BODY)))
        for position in range(len(BODY)):
            writer.write(BODY[position : position + 1])
            await asyncio.sleep(0.002)
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "invalid_json"),
        (b'{"messages":[],"temperature":NaN}', "invalid_json"),
        (b'{"messages":[],"temperature":1e999}', "invalid_json"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "invalid_json"),
    ],
)
async def test_hostile_json_is_a_400(rig: Rig, data: bytes, code: str) -> None:
    answer = await rig.post_bytes(CHAT, data)
    assert (answer.status, answer.error["code"]) == (400, code)


async def test_lone_surrogates_are_served_with_replacements(rig: Rig) -> None:
    data = (
        rb'{"messages":[{"role":"user","content":"cut \ud83d"},'
        rb'{"role":"tool","content":"\udc00"},'
        rb'{"role":"assistant","tool_calls":[{"function":'
        rb'{"name":"f","arguments":"{\"a\":\"\\ud83d\"}"}}]}],'
        rb'"tools":[{"type":"function","function":{"name":"f","description":"\ud83d"}}],'
        rb'"tool_choice":"none","stop":"\ud83d","model":"m\ud83d"}'
    )
    answer = await rig.post_bytes(CHAT, data)
    assert answer.status == 200
    assert answer.json()["model"] == "m\ufffd"
    chat = rig.frontend.chats[0]
    assert [message.text for message in chat.messages] == ["cut \ufffd", "\ufffd", ""]
    assert chat.messages[2].tool_calls[0].arguments == {"a": "\ufffd"}
    assert chat.tools[0]["function"]["description"] == "\ufffd"
    assert rig.frontend.params[0].stop == ("\ufffd",)
    assert rig.gateway.counters.surrogates_replaced == 5


async def test_prompts_never_stand_in_error_messages(rig: Rig) -> None:
    secret = "correct horse battery staple"
    for fields in (
        {"messages": secret},
        {"messages": [{"role": secret}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"messages": MESSAGES, "stop": {secret: 1}},
        {"messages": MESSAGES, "temperature": secret},
        {"messages": MESSAGES, "reasoning_effort": secret},
    ):
        answer = await rig.post(CHAT, fields)
        assert answer.status == 400
        assert secret.encode() not in answer.body


async def test_very_long_bodies_are_parsed_two_at_a_time() -> None:
    lock, is_open = threading.Lock(), threading.Event()
    running = most_running = 0

    def slow_parse(data: bytes) -> JsonText:
        nonlocal running, most_running
        with lock:
            running += 1
            most_running = max(most_running, running)
        assert is_open.wait(10)
        with lock:
            running -= 1
        return parse_json(data)

    limits = GatewayLimits(thread_above_bytes=len(BODY), large_above_bytes=len(BODY) + 10)
    async with running_gateway(limits=limits) as rig:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body, "parse_json", slow_parse)
            large = [asyncio.create_task(rig.post_bytes(CHAT, BODY + b" " * 20)) for _ in range(5)]
            packed = zstd_compress(BODY + b" " * 20)
            large.append(asyncio.create_task(rig.post_bytes(CHAT, packed, Content_Encoding="zstd")))
            await until(lambda: running == 2)
            await asyncio.sleep(0.1)
            is_open.set()
            assert [answer.status for answer in await asyncio.gather(*large)] == [200] * 6
    assert most_running == 2


async def test_a_body_that_nobody_waits_for_is_not_read_on() -> None:
    num_read, has_begun = 0, threading.Event()

    def slow_stop() -> None:
        nonlocal num_read
        stop_if_abandoned()
        num_read += 1
        has_begun.set()
        time.sleep(0.002)

    messages = [{"role": "user", "content": "a"}] * 5000
    async with running_gateway(limits=GatewayLimits(thread_above_bytes=0)) as rig:
        rig.frontend.max_context = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(field_reads, "stop_if_abandoned", slow_stop)
            _, writer = await rig.send_chat(messages=messages)
            await until(has_begun.is_set)
            writer.close()
            await until(lambda: rig.gateway.counters.exchanges_active == 0)
            await asyncio.sleep(0.05)
            seen = num_read
            await asyncio.sleep(0.1)
            assert num_read == seen < len(messages)
