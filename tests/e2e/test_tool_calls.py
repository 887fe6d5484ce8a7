"""The demo model calls a function over chat, takes its result and answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import openai
import pytest

from ninfer.options import EngineOptions
from tests.helpers.served_model import served_demo_model
from tests.helpers.weather_tool import WEATHER_QUESTION, WEATHER_TOOL

QUESTION: Final[Any] = {"role": "user", "content": WEATHER_QUESTION}
WEATHER: Final[Any] = WEATHER_TOOL
RESULT: Final = json.dumps({"temperature": 12, "condition": "windy"})


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    options = EngineOptions(executor="cpu", max_concurrency=2, max_context=1024, host_cache_bytes=0)
    async with (
        served_demo_model(options) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    completion = await client.chat.completions.create(
        model="demo", messages=list(messages), tools=[WEATHER], temperature=0, **fields
    )
    return completion.choices[0]


async def test_weather_question_is_answered_with_the_help_of_a_tool(
    client: openai.AsyncOpenAI,
) -> None:
    asked = await ask(client, QUESTION)
    assert asked.finish_reason == "tool_calls"
    assert asked.message.content is None
    (call,) = asked.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Hamburg"}
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    told = await ask(client, QUESTION, asked.message, result)
    assert told.finish_reason == "stop"
    assert "12" in told.message.content
    parts = {
        **result,
        "content": [{"type": "text", "text": part} for part in (RESULT[:9], RESULT[9:])],
    }
    same = await ask(client, QUESTION, asked.message, parts)
    assert same.message.content == told.message.content


async def test_stream_says_the_same_and_ends_with_the_only_call(
    client: openai.AsyncOpenAI,
) -> None:
    asked = await ask(client, QUESTION)
    async with client.chat.completions.stream(
        model="demo",
        messages=[QUESTION],
        tools=[WEATHER],
        temperature=0,
        parallel_tool_calls=False,
    ) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    (call,) = streamed.message.tool_calls or []
    assert streamed.finish_reason == "tool_calls"
    assert call.function.arguments == asked.message.tool_calls[0].function.arguments


async def test_no_call_when_none_is_wanted(client: openai.AsyncOpenAI) -> None:
    """The tool is still described to the model, which would call it."""
    choice = await ask(client, QUESTION, tool_choice="none", max_tokens=24)
    assert choice.message.tool_calls is None
    assert "<tool_call>" not in choice.message.content


async def test_demanded_call_comes(client: openai.AsyncOpenAI) -> None:
    choice = await ask(
        client, {"role": "user", "content": "What is 3 + 4?"}, tool_choice="required"
    )
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


async def test_half_a_call_is_not_delivered(client: openai.AsyncOpenAI) -> None:
    choice = await ask(client, QUESTION, max_tokens=8)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == ""
