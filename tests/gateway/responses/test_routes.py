"""/v1/responses over real sockets: whole answers, streams, errors, what agents send."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import Finish, FinishReason
from ninfer.gateway.limits import GatewayLimits
from tests.helpers.answer_scripts import call, events_of, plays, text, think
from tests.helpers.compression import zstd_compress
from tests.helpers.fake_engine import CARD, bad_prompt, fail, hold, say
from tests.helpers.gateway_rig import PATIENCE_S, Rig, running_gateway, until
from tests.helpers.responses_rig import (
    DEFAULT_ECHO,
    accumulate,
    create,
    created,
    said_to,
    streamed_events,
    without_ids,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def test_whole_response_has_every_field(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo", reasoning=("think",))
    response = await created(rig, model="gpt-5", temperature=0.5, instructions="be brief")
    assert response["id"].startswith("resp_")
    assert response["created_at"] <= response["completed_at"]
    assert "output_text" not in response
    assert without_ids(response) == {
        "id": "resp",
        "object": "response",
        "created_at": None,
        "completed_at": None,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": "gpt-5",
        "output": [
            {
                "id": "rs",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "think"}],
                "status": "completed",
            },
            {
                "id": "msg",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
            },
        ],
        **DEFAULT_ECHO,
        "instructions": "be brief",
        "temperature": rig.engine.handles[0].request.sampling.temperature,
        "top_p": 1.0,
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 11,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 23,
        },
    }
    assert said_to(rig) == [("system", "be brief"), ("user", "hi")]


async def test_streamed_and_whole_responses_are_equal(rig: Rig) -> None:
    rig.engine.script = plays(think("hm"), text("Hel", "lo"), call(0, "f", '{"a"', ":1}"))
    fields = {"tools": [TOOL], "metadata": {"a": "b"}}
    events = await streamed_events(rig, **fields)
    assert events[0]["response"]["metadata"] == {"a": "b"}
    assert without_ids(accumulate(events)) == without_ids(await created(rig, **fields))


async def test_tools_reach_the_prompt_and_the_session(rig: Rig) -> None:
    await created(rig, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    function = {"name": "f", "parameters": {"type": "object"}}
    assert rig.frontend.chats[0].tools == ({"type": "function", "function": function},)
    rules = rig.frontend.params[0].tools
    assert rules is not None
    assert (rules.choice, rules.parallel) == ("required", False)


async def test_silence_is_broken_while_the_prompt_is_read() -> None:
    """Codex counts parsed events only (openai/codex#31539)."""
    gate = asyncio.Event()
    async with running_gateway(limits=GatewayLimits(keep_alive_interval_s=0.03)) as quick:
        quick.engine.script = hold(gate)
        answer = asyncio.create_task(create(quick, stream=True))
        await until(lambda: quick.engine.num_open == 1)
        await asyncio.sleep(0.2)
        gate.set()
        events = events_of((await answer).body)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created"] + ["response.in_progress"] * 3
    assert accumulate(events)["status"] == "completed"


async def test_created_goes_out_at_admission(rig: Rig) -> None:
    gate = asyncio.Event()
    rig.engine.script = hold(gate)
    body = {"input": "hi", "stream": True}
    async with asyncio.timeout(PATIENCE_S):
        async with rig.session.post(rig.url + "/v1/responses", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert first.startswith(b"event: response.created\n")
            gate.set()
            await response.read()


async def test_zstd_bodies(rig: Rig) -> None:
    """QuantumNous/new-api#4914."""
    whole = zstd_compress(orjson.dumps({"input": "hi"}))
    answer = await rig.post_bytes("/v1/responses", whole, Content_Encoding="zstd")
    assert answer.status == 200
    cut = await rig.post_bytes("/v1/responses", whole[:-4], Content_Encoding="zstd")
    assert (cut.status, cut.error["code"]) == (400, "invalid_request_encoding")
    async with running_gateway(limits=GatewayLimits(max_body_bytes=4096)) as small:
        bomb = zstd_compress(orjson.dumps({"input": "x" * 100_000}))
        large = await small.post_bytes("/v1/responses", bomb, Content_Encoding="zstd")
        assert (large.status, large.error["code"]) == (413, "request_too_large")


async def test_system_messages_stay_where_they_are(rig: Rig) -> None:
    """ggml-org/llama.cpp#27367."""
    turns = [("user", "a"), ("assistant", "b"), ("system", "c"), ("developer", "d"), ("user", "e")]
    await created(rig, input=[{"role": role, "content": content} for role, content in turns])
    assert said_to(rig) == turns


async def test_lone_surrogates_are_replaced(rig: Rig) -> None:
    """JustVugg/colibri#1589."""
    body = rb'{"input":[{"role":"user","content":"cut \ud83d"}],"tools":[{"type":"function",'
    body += rb'"name":"f","description":"\ud83d"}],"metadata":{"a":"\ud83d"}}'
    answer = await rig.post_bytes("/v1/responses", body)
    assert answer.status == 200
    assert said_to(rig) == [("user", "cut \ufffd")]
    assert answer.json()["metadata"] == {"a": "\ufffd"}
    stored = await rig.get(f"/v1/responses/{answer.json()['id']}")
    assert stored.json() == answer.json()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/responses", "POST"),
        ("GET", "/v1/responses/input_tokens", "POST"),
        ("POST", "/v1/responses/resp_1", "GET, DELETE, HEAD"),
        ("POST", "/v1/responses/resp_1/input_items", "GET, HEAD"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
    ],
)
async def test_wrong_methods(rig: Rig, method: str, path: str, allowed: str) -> None:
    answer = await rig.request(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/v1/responses/a/b", "/v1/responses//input_items", "/responses/a/b/c"]
)
async def test_unknown_paths(rig: Rig, path: str) -> None:
    answer = await rig.get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_input_tokens_are_those_of_the_prompt(rig: Rig) -> None:
    first = await created(rig, input="abc")
    fields = {"previous_response_id": first["id"], "input": "de", "model": None, "tools": [TOOL]}
    counted = await rig.post("/v1/responses/input_tokens", fields)
    assert counted.status == 200
    num_tokens = len("abc|Hello|de|")
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert len(rig.engine.handles) == 1
    assert (await created(rig, **fields))["usage"]["input_tokens"] == num_tokens
    bad = await rig.post("/v1/responses/input_tokens", {"input": []})
    assert (bad.status, bad.error["param"]) == (400, "input")


async def test_more_items_than_tokens_fit_are_refused_but_counted(rig: Rig) -> None:
    items = [{"role": "user", "content": "a"}] * 65
    answer = await rig.post("/v1/responses", {"input": [*items, {"role": "nobody"}]})
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert answer.error["code"] == "context_length_exceeded"
    counted = await rig.post("/v1/responses/input_tokens", {"input": items})
    assert counted.json()["input_tokens"] > 65


async def test_input_tokens_never_wait_for_the_engine(rig: Rig) -> None:
    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    assert (await rig.post("/v1/responses/input_tokens", {"input": "a"})).status == 200


async def test_input_tokens_beyond_the_context_are_counted(rig: Rig) -> None:
    counted = await rig.post("/v1/responses/input_tokens", {"input": "x" * 100})
    assert (counted.status, counted.json()["input_tokens"]) == (200, 101)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_answer_are_statuses(rig: Rig, stream: bool) -> None:
    long = await create(rig, input="x" * 100, stream=stream)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert long.error["param"] == "input"
    assert "maximum context length is" in long.error["message"]
    full = await create(rig, input="x" * (CARD.max_context - 1), stream=stream)
    assert (full.status, full.error["param"]) == (400, "input")
    rig.frontend.error = bad_prompt()
    bad = await create(rig, stream=stream)
    assert (bad.status, bad.error["code"], bad.error["param"]) == (400, "invalid_template", "input")
    rig.frontend.error = None
    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    busy = await create(rig, stream=stream)
    assert (busy.status, busy.headers["retry-after"]) == (429, "2")
    rig.engine.refusal = None
    rig.engine.script = fail(NonFiniteLogits("x"))
    failed = await create(rig)
    assert (failed.status, failed.headers["x-should-retry"]) == (500, "false")


async def test_errors_inside_a_stream_are_its_last_event(rig: Rig) -> None:
    rig.engine.script = fail(Unavailable("server_draining", "The server is shutting down."), "Hel")
    events = await streamed_events(rig)
    response = accumulate(events)
    assert events[-1]["type"] == "response.failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "The server is shutting down.",
    }
    assert response["output"][0]["status"] == "incomplete"
    assert (await rig.get(f"/v1/responses/{response['id']}")).json() == response


CODEX: dict[str, Any] = {
    "model": "gpt-5-codex",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions/>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "Done!"}],
        },
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "",
            "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "xhigh", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"session": "1"},
}


async def test_a_turn_of_a_coding_agent(rig: Rig) -> None:
    rig.engine.script = plays(
        think("look"),
        call(0, "apply_patch", '{"input": "*** Begin', '"}'),
        call(1, "mcp__docs.find", "{}"),
    )
    body = zstd_compress(orjson.dumps(CODEX))
    answer = await rig.post_bytes("/v1/responses", body, Content_Encoding="zstd")
    events = events_of(answer.body)
    response = accumulate(events)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    thought, patch, found = done
    assert [part["text"] for part in thought["summary"]] == ["look"]
    assert (patch["name"], patch["input"]) == ("apply_patch", "*** Begin")
    assert (found["namespace"], found["name"], found["arguments"]) == ("mcp__docs", "find", "{}")
    assert response["tools"] == CODEX["tools"]
    assert said_to(rig) == [
        ("system", "You are a coding agent."),
        ("developer", "<permissions/>"),
        ("user", "fix"),
        ("assistant", ""),
        ("tool", "a.py"),
        ("assistant", ""),
        ("tool", "Done!"),
    ]
    chat = rig.frontend.chats[-1]
    assert [tool["function"]["name"] for tool in chat.tools] == [
        "shell",
        "apply_patch",
        "mcp__docs.find",
    ]
    assert chat.template_kwargs["enable_thinking"] is True
    assert rig.engine.handles[0].request.cache.session_key == "thread-1"


async def test_an_empty_answer(rig: Rig) -> None:
    rig.engine.script = say(finish=Finish(FinishReason.OUTPUT_LIMIT))
    response = await created(rig, max_output_tokens=0)
    assert (response["status"], response["output"]) == ("incomplete", [])
    assert rig.frontend.params[0].max_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(rig: Rig, stream: bool) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    asking = asyncio.create_task(create(rig, stream=stream))
    await until(lambda: rig.engine.num_open == 1)
    asking.cancel()
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled


async def test_the_model_name_is_echoed(rig: Rig) -> None:
    assert (await created(rig, model=None))["model"] == CARD.name
    assert (await created(rig, model="gpt-5"))["model"] == "gpt-5"
