"""The official client library against /v1/messages: sync and async, streams, tools, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import anthropic
import pydantic
import pytest
from anthropic.types import (
    Message,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolParam,
    ToolUseBlock,
)

from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import Event, Finish, FinishReason, GenerationRequest
from ninfer.gateway.limits import GatewayLimits
from tests.helpers.answer_scripts import call, plays, text, think
from tests.helpers.fake_engine import CARD, fail, hold
from tests.helpers.gateway_rig import Rig, running_gateway, until

T = TypeVar("T")
MESSAGES: list[MessageParam] = [{"role": "user", "content": "hi"}]
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "The weather somewhere.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
        yield client


async def in_thread(rig: Rig, use: Callable[[anthropic.Anthropic], T]) -> T:
    def run() -> T:
        with anthropic.Anthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def create(client: anthropic.AsyncAnthropic, *, max_tokens: int = 20) -> Message:
    return await client.messages.create(model="m", max_tokens=max_tokens, messages=MESSAGES)


async def test_whole_message(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = plays(think("hm"), text("Hel", "lo"), cached_tokens=1)
    message = await client.messages.create(
        model="claude-x", max_tokens=20, messages=MESSAGES, system="s"
    )
    thought, said = message.content
    assert isinstance(thought, ThinkingBlock)
    assert (thought.thinking, bool(thought.signature)) == ("hm", True)
    assert isinstance(said, TextBlock)
    assert said.text == "Hello"
    assert (message.model, message.stop_reason, message.role) == (
        "claude-x",
        "end_turn",
        "assistant",
    )
    assert message.usage.input_tokens == 4
    assert message.usage.cache_read_input_tokens == 1
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == 1


async def test_stream_helper(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = plays(
        think("hm"),
        text("Look", "ing"),
        call(0, "get_weather", '{"ci', 'ty": "Os', 'lo"}'),
        call(1, "get_weather"),
    )
    async with client.messages.stream(
        model="m", max_tokens=20, messages=MESSAGES, tools=[TOOL]
    ) as stream:
        pieces = [event.text async for event in stream if event.type == "text"]
        message = await stream.get_final_message()
    assert pieces == ["Look", "ing"]
    thought, said, first, second = message.content
    assert isinstance(thought, ThinkingBlock)
    assert (thought.thinking, bool(thought.signature)) == ("hm", True)
    assert isinstance(said, TextBlock)
    assert said.text == "Looking"
    assert isinstance(first, ToolUseBlock)
    assert (first.name, first.input) == ("get_weather", {"city": "Oslo"})
    assert isinstance(second, ToolUseBlock)
    assert second.input == {}
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 0


async def test_a_tool_round_trip(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = plays(think("hm"), call(0, "get_weather", '{"city": "Oslo"}'))
    message = await client.messages.create(
        model="m", max_tokens=20, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}
    )
    used = message.content[-1]
    assert isinstance(used, ToolUseBlock)
    rig.engine.script = plays(text("Rain."))
    turns: list[MessageParam] = [
        *MESSAGES,
        message.to_param(),
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "rain"}],
        },
    ]
    answer = await client.messages.create(model="m", max_tokens=20, messages=turns, tools=[TOOL])
    assert isinstance(answer.content[0], TextBlock)
    _, assistant, result = rig.frontend.chats[-1].messages
    assert assistant.reasoning_content == "hm"
    assert assistant.tool_calls[0].arguments == {"city": "Oslo"}
    assert (result.role, result.text, result.tool_call_id) == ("tool", "rain", used.id)


async def test_the_librarys_own_loop_of_tools(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    """It would leave the conversation to the server, and takes no for an answer."""
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "rain"

    def script(request: GenerationRequest) -> AsyncIterator[Event]:
        if asked:
            return plays(text("Rain."))(request)
        return plays(call(0, "get_weather", '{"city": "Oslo"}'))(request)

    rig.engine.script = script
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=20, tools=[get_weather], messages=[{"role": "user", "content": "?"}]
    )
    final = await runner.until_done()
    assert asked == ["Oslo"]
    assert final.content[0].type == "text"
    assert [message.role for message in rig.frontend.chats[-1].messages] == [
        "user",
        "assistant",
        "tool",
    ]


async def test_arguments_may_be_cut_anywhere(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    """The library parses what it has after every piece."""
    arguments = '{"a": "x\\n\\ud83d\\ude00\\"", "b": [1, -2.5e3, {"c": null}], "é": "日"}'
    rig.engine.script = plays(call(0, "f", *arguments))
    async with client.messages.stream(
        model="m", max_tokens=20, messages=MESSAGES, tools=[TOOL]
    ) as stream:
        [used] = (await stream.get_final_message()).content
    assert isinstance(used, ToolUseBlock)
    assert used.input == {"a": 'x\n😀"', "b": [1, -2500.0, {"c": None}], "é": "日"}


async def test_streamed_and_whole_messages_are_equal(
    rig: Rig, client: anthropic.AsyncAnthropic
) -> None:
    rig.engine.script = plays(
        think("é"), text("né", "e!"), finish=Finish(FinishReason.STOP_STRING, "END")
    )
    whole = await create(client)
    async with client.messages.stream(model="m", max_tokens=20, messages=MESSAGES) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "END")
    left, right = whole.model_dump(exclude={"id"}), streamed.model_dump(exclude={"id"})
    for block in right["content"]:
        block.pop("parsed_output", None)
    assert left == right


async def test_structured_output(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    class Place(pydantic.BaseModel):
        city: str

    rig.engine.script = plays(text('{"city"', ': "Oslo"}'))
    parsed = await client.messages.parse(
        model="m", max_tokens=20, messages=MESSAGES, output_format=Place
    )
    assert parsed.parsed_output == Place(city="Oslo")
    constraint = rig.frontend.params[-1].constraint
    assert constraint is not None
    assert '"city"' in constraint.text


async def test_beta_surface(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = plays(text("a"))
    message = await client.beta.messages.create(
        model="m",
        max_tokens=20,
        messages=[{"role": "user", "content": "hi"}],
        betas=["context-management-2025-06-27"],
        thinking={"type": "adaptive"},
    )
    assert message.content[0].type == "text"


async def test_sync_client(rig: Rig) -> None:
    rig.engine.script = plays(text("Hel", "lo"))

    def use(client: anthropic.Anthropic) -> tuple[str, str, int, list[str]]:
        with client.messages.stream(model="m", max_tokens=20, messages=MESSAGES) as stream:
            streamed = "".join(stream.text_stream)
        whole = client.messages.create(model="m", max_tokens=20, messages=MESSAGES)
        assert isinstance(whole.content[0], TextBlock)
        count = client.messages.count_tokens(model="m", messages=MESSAGES)
        models = [model.id for model in client.models.list()]
        return streamed, whole.content[0].text, count.input_tokens, models

    assert await in_thread(rig, use) == ("Hello", "Hello", 3, [CARD.name])


async def test_errors_arrive_typed(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 101 tokens") as bad:
        await client.messages.create(model="m", max_tokens=20, messages=long)
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id == bad.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.batches.list()
    assert missing.value.type == "not_found_error"
    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    with pytest.raises(anthropic.APIStatusError) as full:
        await create(client)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
    rig.engine.refusal = Unavailable("request_queue_timeout", "late", 2.0)
    with pytest.raises(anthropic.APIStatusError) as late:
        await create(client)
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


async def test_a_large_body_arrives_typed() -> None:
    async with (
        running_gateway(limits=GatewayLimits(max_body_bytes=1000)) as rig,
        anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as client,
    ):
        long: list[MessageParam] = [{"role": "user", "content": "x" * 2000}]
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(model="m", max_tokens=20, messages=long)
        assert large.value.status_code == 413


async def test_sync_errors_arrive_typed(rig: Rig) -> None:
    def use(client: anthropic.Anthropic) -> None:
        client.messages.create(model="m", max_tokens=20, messages=[])

    with pytest.raises(anthropic.BadRequestError, match="'messages' must not be empty"):
        await in_thread(rig, use)


async def test_error_inside_a_stream_is_raised(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = fail(NonFiniteLogits("x"), "Hel")
    async with client.messages.stream(model="m", max_tokens=20, messages=MESSAGES) as stream:
        pieces = aiter(stream.text_stream)
        assert await anext(pieces) == "Hel"
        with pytest.raises(anthropic.APIStatusError) as caught:
            await anext(pieces)
    assert caught.value.type == "api_error"


async def test_busy_server_is_retried_and_a_bad_prompt_of_ours_is_not(rig: Rig) -> None:
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=1) as client:
        rig.engine.script = fail(NonFiniteLogits("x"))
        with pytest.raises(anthropic.InternalServerError):
            await create(client)
        assert len(rig.engine.handles) == 1
        rig.engine.refusal = Unavailable("server_overloaded", "full", 1.0)
        asking = asyncio.create_task(create(client))
        await until(lambda: rig.gateway.counters.exchanges_total == 2)
        rig.engine.refusal, rig.engine.script = None, plays(text("now"))
        assert (await asking).content[0].type == "text"


async def test_leaving_a_stream_cancels_it(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    async with client.messages.stream(model="m", max_tokens=20, messages=MESSAGES) as stream:
        async for _ in stream.text_stream:
            break
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled
