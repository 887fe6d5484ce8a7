"""The official client library against /v1/responses: sync and async, whole, streamed, parsed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ToolParam,
)
from pydantic import BaseModel

from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import Finish, FinishReason
from ninfer.gateway.limits import GatewayLimits
from tests.helpers.answer_scripts import call, plays, text, think
from tests.helpers.fake_engine import fail, hold, say
from tests.helpers.gateway_rig import Rig, running_gateway, until

TOOLS: list[ToolParam] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "box",
        "description": "A box.",
        "tools": [{"type": "function", "name": "g"}],
    },
    {"type": "web_search"},
]
TURN = plays(
    think("let "),
    think("me"),
    text("Hel", "lo"),
    call(0, "f", '{"a"', ":1}"),
    call(1, "patch", '{"input":"x', '\\ny"}'),
    call(2, "box.g", "{}"),
)


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with make_client(rig) as client:
        yield client


def make_client(rig: Rig, **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="none", **options)


def check_turn(response: Response) -> None:
    reasoning, message, function, custom, member = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["let me"]
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(function, ResponseFunctionToolCall)
    assert (function.name, function.arguments, function.namespace) == ("f", '{"a":1}', None)
    assert isinstance(custom, ResponseCustomToolCall)
    assert (custom.name, custom.input) == ("patch", "x\ny")
    assert isinstance(member, ResponseFunctionToolCall)
    assert (member.name, member.arguments, member.namespace) == ("g", "{}", "box")
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.input_tokens_details.cache_write_tokens == 0


async def test_whole_response(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = TURN
    raw = await client.responses.with_raw_response.create(model="gpt-5", input="hi", tools=TOOLS)
    response = raw.parse()
    assert raw.headers["x-request-id"]
    check_turn(response)
    assert response.error is None
    assert response.incomplete_details is None
    assert len(response.tools) == 4


async def test_stream_helper_adds_up_to_the_response(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = TURN
    texts, arguments = [], []
    async with client.responses.stream(model="gpt-5", input="hi", tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                texts.append((event.delta, event.snapshot))
            elif event.type == "response.function_call_arguments.delta":
                arguments.append((event.delta, event.snapshot))
        response = await stream.get_final_response()
    assert texts == [("Hel", "Hel"), ("lo", "Hello")]
    assert arguments == [('{"a"', '{"a"'), (":1}", '{"a":1}'), ("{}", "{}")]
    check_turn(response)


async def test_stream_helper_survives_silence() -> None:
    gate = asyncio.Event()
    async with running_gateway(limits=GatewayLimits(keep_alive_interval_s=0.03)) as rig:
        rig.engine.script = hold(gate, "a")
        async with (
            make_client(rig) as client,
            client.responses.stream(model="m", input="hi") as stream,
        ):
            num_silent = 0
            async for event in stream:
                num_silent += event.type == "response.in_progress"
                if num_silent == 4:
                    gate.set()
            response = await stream.get_final_response()
    assert response.output_text == "a done"


def test_sync_client() -> None:
    async def serve() -> tuple[str, str, list[str]]:
        async with running_gateway() as rig:
            rig.engine.script = say("Hel", "lo", reasoning=("hm",))
            return await asyncio.to_thread(use, rig.url)

    def use(url: str) -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model="m", input="hi")
            with client.responses.stream(model="m", input="hi") as stream:
                kinds = [str(event.type) for event in stream]
                final = stream.get_final_response()
            return whole.output_text, final.output_text, kinds

    whole, final, kinds = asyncio.run(serve())
    assert whole == final == "Hello"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


class Weather(BaseModel):
    city: str
    degrees: int


async def test_parse_helpers(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say('{"city": "Oslo"', ', "degrees": 3}')
    parsed = await client.responses.parse(model="m", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Oslo", degrees=3)
    constraint = rig.frontend.params[0].constraint
    assert constraint is not None
    assert constraint.is_strict
    assert list(json.loads(constraint.text)["properties"]) == ["city", "degrees"]
    async with client.responses.stream(model="m", input="hi", text_format=Weather) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Weather(city="Oslo", degrees=3)


async def test_parsed_arguments(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = plays(call(0, "Weather", '{"city":"Oslo","degrees":3}'))
    tool = openai.pydantic_function_tool(Weather)["function"]
    flat: ToolParam = {
        "type": "function",
        "name": tool["name"],
        "parameters": tool["parameters"],
        "strict": True,
    }
    response = await client.responses.parse(model="m", input="hi", tools=[flat])
    (item,) = response.output
    assert item.type == "function_call"
    assert item.parsed_arguments == {"city": "Oslo", "degrees": 3}
    rules = rig.frontend.params[0].tools
    assert rules is not None
    assert rules.tools[0].is_strict


async def test_a_turn_with_tools_over_a_chain(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = plays(call(0, "f", '{"a":1}'))
    first = await client.responses.create(model="m", input="hi", tools=TOOLS)
    (item,) = first.output
    assert isinstance(item, ResponseFunctionToolCall)
    rig.engine.script = say("done")
    second = await client.responses.create(
        model="m",
        tools=TOOLS,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "r"}],
    )
    assert second.output_text == "done"
    assert [message.role for message in rig.frontend.chats[-1].messages] == [
        "user",
        "assistant",
        "tool",
    ]


async def test_output_goes_back_as_input(rig: Rig, client: openai.AsyncOpenAI) -> None:
    """A client without a store sends the items it was given."""
    rig.engine.script = TURN
    first = await client.responses.create(
        model="m",
        input="hi",
        tools=TOOLS,
        store=False,
        include=["reasoning.encrypted_content"],
    )
    history: Any = [item.to_dict() for item in first.output]
    await client.responses.create(model="m", input=history, tools=TOOLS, store=False)
    (turn,) = rig.frontend.chats[-1].messages
    assert (turn.text, turn.reasoning_content) == ("Hello", "let me")
    assert [(one.name, one.arguments) for one in turn.tool_calls] == [
        ("f", {"a": 1}),
        ("patch", {"input": "x\ny"}),
        ("box.g", {}),
    ]


async def test_stored_responses(rig: Rig, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="m", input="one")
    second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
    assert await client.responses.retrieve(second.id) == second
    texts = []
    async for item in client.responses.input_items.list(second.id, limit=2, order="asc"):
        assert item.type == "message"
        texts.append([part.text for part in item.content if hasattr(part, "text")])
    assert texts == [["one"], ["Hello"], ["two"]]
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(second.id)
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(second.id)
    assert caught.value.code == "response_not_found"


async def test_input_tokens(client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model="m", input="abc")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 4)


async def test_logprobs(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("né", "e")
    response = await client.responses.create(
        model="m", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == "née"
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 4


async def test_a_cut_answer_is_incomplete(rig: Rig, client: openai.AsyncOpenAI) -> None:
    limit = Finish(FinishReason.OUTPUT_LIMIT)
    rig.engine.script = plays(text("a"), call(0, "f", "{", is_whole=False), finish=limit)
    async with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in last.response.output] == ["message", "function_call"]


async def test_errors_arrive_typed(rig: Rig, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(model="m", input="hi", temperature=3)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        await client.responses.create(model="m", input="x" * 100)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="m", input="x", previous_response_id="resp_x")
    assert missing.value.code == "response_not_found"
    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="m", input="hi", stream=True)


async def test_a_failure_inside_a_stream(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = fail(NonFiniteLogits("x"), "Hel")
    async with client.responses.stream(model="m", input="hi") as stream:
        events = [event async for event in stream]
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            await stream.get_final_response()
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"


async def test_leaving_a_stream_cancels_it(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    stream = await client.responses.create(model="m", input="hi", stream=True)
    assert (await anext(stream)).type == "response.created"
    await stream.close()
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled
