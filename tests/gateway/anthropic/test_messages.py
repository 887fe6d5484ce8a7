"""/v1/messages over HTTP: answers, events, errors of both kinds, counts, odd clients."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import orjson
import pytest

from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import Finish, FinishReason
from ninfer.gateway.limits import GatewayLimits
from ninfer.options import ServeOptions
from tests.gateway.test_hostile_requests import mutated
from tests.helpers.answer_scripts import call, events_of, plays, text, think
from tests.helpers.anthropic_rig import accumulate, error_of
from tests.helpers.fake_engine import bad_prompt, fail, hold
from tests.helpers.gateway_rig import HOST, PATIENCE_S, Answer, Rig, running_gateway, until

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


async def ask(rig: Rig, path: str = "/v1/messages", **fields: Any) -> Answer:
    return await rig.post(path, {"model": "m", "messages": [USER], "max_tokens": 20, **fields})


async def test_whole_message(rig: Rig) -> None:
    rig.engine.script = plays(think("hm"), text("Hel", "lo"), cached_tokens=2)
    answer = await ask(rig, "/v1/messages?beta=true", model="claude-x")
    assert answer.status == 200
    message = answer.json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == (
        "message",
        "assistant",
        "claude-x",
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][1]["text"] == "Hello"
    assert message["stop_reason"] == "end_turn"
    assert message["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 1},
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_stream(rig: Rig) -> None:
    """Thinking, text and two calls: block indices without a gap, one block at a time."""
    rig.engine.script = plays(
        think("hm"), text("a"), call(0, "f", '{"k":', '"v"}'), call(1, "f"), cached_tokens=2
    )
    fields: dict[str, Any] = {"tools": [TOOL]}
    answer = await ask(rig, stream=True, **fields)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.body)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 2
    streamed = accumulate(events)
    whole = (await ask(rig, **fields)).json()
    assert streamed["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert streamed["usage"] == whole["usage"]
    for one, other in zip(streamed["content"], whole["content"], strict=True):
        if one["type"] == "tool_use":
            assert json.loads(one.pop("input")) == other.pop("input")
            assert one.pop("id") != other.pop("id")
        assert one == other


async def test_the_stream_begins_at_admission() -> None:
    limits = GatewayLimits(keep_alive_interval_s=0.05)
    async with running_gateway(limits=limits) as rig:
        gate = asyncio.Event()
        rig.engine.script = hold(gate)
        body = {"messages": [USER], "stream": True}
        async with rig.session.post(rig.url + "/v1/messages", json=body) as response:
            frames: list[bytes] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(frames) < 4:
                    frames.append(await response.content.readuntil(b"\n\n"))
            names = [frame.split(b"\n")[0] for frame in frames]
            assert names == [b"event: message_start", *[b"event: ping"] * 3]
            gate.set()
            rest = await response.content.read()
    events = events_of(b"".join(frames) + rest)
    assert accumulate(events)["content"] == [{"type": "text", "text": " done"}]


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish(FinishReason.STOP_STRING, "END"), "stop_sequence", "END"),
        (Finish(FinishReason.OUTPUT_LIMIT), "max_tokens", None),
        (Finish(FinishReason.CONTEXT_CAPACITY), "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(rig: Rig, finish: Finish, reason: str, sequence: str | None) -> None:
    rig.engine.script = plays(text("a"), finish=finish)
    whole = (await ask(rig)).json()
    streamed = accumulate(events_of((await ask(rig, stream=True)).body))
    for message in (whole, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_a_call_that_is_cut_off_is_not_delivered(rig: Rig) -> None:
    rig.engine.script = plays(
        text("a"),
        call(0, "f", '{"k":', is_whole=False),
        finish=Finish(FinishReason.OUTPUT_LIMIT),
    )
    message = (await ask(rig, tools=[TOOL], tool_choice={"type": "any"})).json()
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "max_tokens"


async def test_hidden_thoughts_come_back_in_the_next_turn(rig: Rig) -> None:
    rig.engine.script = plays(think("secret"), text("a"))
    thinking = {"type": "enabled", "display": "omitted"}
    message = (await ask(rig, thinking=thinking)).json()
    assert message["content"][0]["thinking"] == ""
    turns = [USER, {"role": "assistant", "content": message["content"]}, USER]
    assert (await ask(rig, messages=turns)).status == 200
    assert rig.frontend.chats[-1].messages[1].reasoning_content == "secret"


# Counting.


async def test_count_is_the_prompt_of_the_same_message(rig: Rig) -> None:
    rig.engine.script = plays(text("a"), cached_tokens=3)
    fields: dict[str, Any] = {"system": "you", "tools": [TOOL], "messages": [USER]}
    usage = (await ask(rig, **fields)).json()["usage"]
    counted = await rig.post("/v1/messages/count_tokens?beta=true", {"model": "m", **fields})
    assert counted.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


async def test_more_messages_than_tokens_fit_are_refused_but_counted(rig: Rig) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}] * 65}
    answer = await rig.post("/v1/messages", body)
    assert answer.status == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: 65 tokens > 64 maximum")
    assert (await rig.post("/v1/messages/count_tokens", body)).json()["input_tokens"] > 64


async def test_counting_waits_for_nobody(rig: Rig) -> None:
    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    answer = await ask(rig, "/messages/count_tokens")
    assert answer.json() == {"input_tokens": 3}
    assert rig.engine.handles == []


async def test_what_would_be_summed_up_can_be_counted(rig: Rig) -> None:
    compaction = {"type": "summarize"}
    assert (await ask(rig, compaction=compaction)).status == 400
    assert (await ask(rig, "/v1/messages/count_tokens", compaction=compaction)).status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_both_check_the_same(rig: Rig, path: str) -> None:
    assert "'messages' is required" in error_of(await rig.post(path, {}))["message"]


async def test_a_prompt_beyond_the_context_is_counted_but_not_answered(rig: Rig) -> None:
    long = [{"role": "user", "content": "x" * 100}]
    counted = await ask(rig, "/v1/messages/count_tokens", messages=long)
    assert (counted.status, counted.json()) == (200, {"input_tokens": 101})
    message = error_of(await ask(rig, messages=long))["message"]
    assert message.startswith("prompt is too long: 101 tokens > 64 maximum")
    assert message.endswith("[context_length_exceeded]")


# Errors.


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"\xff", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[]", 400, "invalid_request_error"),
        ("POST", "/messages/", b"{}", 400, "invalid_request_error"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("GET", "/v1/messages/msg_1", None, 404, "not_found_error"),
        ("POST", "/v1/v1/messages", b"{}", 404, "not_found_error"),
    ],
)
async def test_errors_before_a_handler(
    rig: Rig, method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await rig.request(method, path, data=body, headers=headers)
    assert answer.status == status
    assert error_of(answer)["type"] == kind
    if status == 405:
        assert answer.headers["allow"] == "POST"


async def test_bodies_that_cannot_be_taken() -> None:
    limits = GatewayLimits(max_body_bytes=1000, body_timeout_s=0.2, body_timeout_per_mib_s=0.0)
    async with running_gateway(limits=limits) as rig:
        large = await ask(rig, system="x" * 2000)
        assert (large.status, error_of(large)["type"]) == (413, "request_too_large")
        odd = await rig.post_bytes("/v1/messages", b"{}", Content_Encoding="br")
        assert (odd.status, error_of(odd)["type"]) == (415, "invalid_request_error")
        reader, writer = await rig.open_socket()
        writer.write(
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.split()[1] == b"408"
        assert orjson.loads(body)["error"]["type"] == "timeout_error"


async def test_other_paths_keep_their_family(rig: Rig) -> None:
    for path in ("/v1/chat/completions", "/nowhere", "/generate"):
        answer = await rig.post(path, {"messages": 5})
        assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "has_delay"),
    [
        (Unavailable("server_overloaded", "full", 2.0), 529, "overloaded_error", True),
        (Unavailable("request_queue_timeout", "late", 2.0), 504, "timeout_error", True),
        (Unavailable("server_draining", "bye", 2.0), 503, "api_error", True),
        (NonFiniteLogits("x"), 500, "api_error", False),
        (bad_prompt(), 400, "invalid_request_error", False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_admission(
    rig: Rig, error: Any, status: int, kind: str, has_delay: bool, stream: bool
) -> None:
    rig.engine.script = fail(error, is_admitted=False)
    answer = await ask(rig, stream=stream)
    assert answer.status == status
    assert error_of(answer)["type"] == kind
    assert (answer.headers.get("retry-after") == "2") is has_delay


async def test_error_inside_a_stream(rig: Rig) -> None:
    rig.engine.script = fail(Unavailable("engine_unavailable", "The engine has stopped."), "Hel")
    answer = await ask(rig, stream=True)
    assert answer.status == 200
    events = events_of(answer.body)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "The engine has stopped."},
        "request_id": answer.headers["request-id"],
    }


async def test_threads_are_refused_in_words_that_libraries_know(rig: Rig) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = await ask(rig, thread=thread)
        assert answer.status == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_strict_names() -> None:
    options = ServeOptions(host=HOST, port=0, strict_model=True)
    async with running_gateway(options=options) as rig:
        answer = await ask(rig, model="claude-x")
        assert (answer.status, error_of(answer)["type"]) == (404, "not_found_error")


async def test_while_the_model_loads() -> None:
    async with running_gateway(is_attached=False) as rig:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await ask(rig, path)
            assert (answer.status, error_of(answer)["type"]) == (503, "api_error")
            assert answer.headers["retry-after"] == "5"


async def test_pictures_are_refused_by_name_where_there_is_no_vision(rig: Rig) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    content = [{"type": "image", "source": source}]
    answer = await ask(rig, messages=[{"role": "user", "content": content}])
    assert answer.status == 400
    assert "messages[0].content[0]" in error_of(answer)["message"]


# What clients send.


async def test_halves_of_characters_become_replacement_characters(rig: Rig) -> None:
    rig.engine.script = plays(text("a"))
    body = {
        "messages": [
            {"role": "user", "content": "cut \ud83d"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"k": "\udc00"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "\ud83d"}],
            },
        ],
        "tools": [{**TOOL, "description": "\ud83d"}],
        "stop_sequences": ["\ud83d"],
    }
    answer = await rig.post_bytes("/v1/messages", json.dumps(body).encode())
    assert answer.status == 200
    chat = rig.frontend.chats[-1]
    assert chat.messages[0].text == "cut \ufffd"
    assert chat.messages[1].tool_calls[0].arguments == {"k": "\ufffd"}
    assert chat.messages[2].text == "\ufffd"
    assert chat.tools[0]["function"]["description"] == "\ufffd"
    assert rig.frontend.params[-1].stop == ("\ufffd",)


async def test_leaving_cancels(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    body = {"messages": [USER], "stream": True}
    response = await rig.session.post(rig.url + "/v1/messages", json=body)
    await response.content.readuntil(b"content_block_delta")
    response.close()
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled


AGENT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": False,
                    "content": [{"type": "text", "text": "r"}],
                },
                {"type": "document", "source": {"type": "text", "data": "d"}},
            ],
        },
        {"role": "system", "content": "note"},
        {"role": "user", "content": "b"},
    ],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 5,
    "metadata": {"user_id": '{"session_id": "x"}'},
    "context_management": {"edits": []},
}


async def test_mutated_fields(rig: Rig) -> None:
    """Never a 5xx, never a hang, and the engine is free afterwards."""
    rig.engine.script = plays(text("a"))
    source = random.Random(11)
    assert (await rig.post("/v1/messages", AGENT)).status == 200
    statuses = set()
    for _ in range(150):
        request = mutated(AGENT, source)
        answer = await rig.post_bytes("/v1/messages", json.dumps(request).encode())
        statuses.add(answer.status)
        assert answer.status in (200, 400), (request, answer.body)
        if answer.status == 400:
            assert error_of(answer)["type"] == "invalid_request_error"
    assert statuses == {200, 400}
    assert rig.engine.num_open == 0


async def test_keys_are_asked_for_in_the_familys_words() -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",))
    async with running_gateway(options=options) as rig:
        rig.engine.script = plays(text("a"))
        for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}):
            answer = await rig.post("/v1/messages", {"messages": [USER]}, headers=headers)
            assert (answer.status, error_of(answer)["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = await rig.post("/v1/messages", {"messages": [USER]}, headers=headers)
            assert answer.status == 200
