"""The Responses API with the demo model: tools, conversations and formats, none of it scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from ninfer.options import EngineOptions
from tests.helpers.served_model import served_demo_model

QUESTION = "What is the weather in Oslo?"
RESULT = '{"temperature": 3, "condition": "rain"}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": PARAMETERS,
}
FUNCTION: Any = {"type": "function", **WEATHER}
NAMESPACE: Any = {"type": "namespace", "name": "sky", "tools": [FUNCTION]}


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    options = EngineOptions(executor="cpu", max_concurrency=2, max_context=1024, host_cache_bytes=0)
    async with (
        served_demo_model(options) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, said: Any, **fields: Any) -> Any:
    return await client.responses.create(
        model="demo", input=said, **{"temperature": 0, "max_output_tokens": 100, **fields}
    )


def result_of(call: Any) -> Any:
    return {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}


async def test_weather_over_a_chain(client: openai.AsyncOpenAI) -> None:
    first = await ask(client, QUESTION, tools=[FUNCTION])
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert first.status == "completed"
    fields: Any = {"previous_response_id": first.id, "tools": [FUNCTION]}
    async with client.responses.stream(
        model="demo", input=[result_of(call)], temperature=0, max_output_tokens=100, **fields
    ) as stream:
        streamed = await stream.get_final_response()
    assert "Oslo" in streamed.output_text
    assert "3" in streamed.output_text
    assert streamed.usage is not None
    assert streamed.usage.input_tokens_details.cached_tokens > 0
    counted = await client.responses.input_tokens.count(input=[result_of(call)], **fields)
    assert counted.input_tokens == streamed.usage.input_tokens

    history = [{"role": "user", "content": QUESTION}, call.to_dict(), result_of(call)]
    whole = await ask(client, history, tools=[FUNCTION], store=False)
    assert whole.usage.input_tokens == counted.input_tokens
    assert whole.output_text == streamed.output_text


async def test_a_demanded_call_of_a_namespace(client: openai.AsyncOpenAI) -> None:
    choice = {"type": "function", "name": "get_weather", "namespace": "sky"}
    response = await ask(
        client, QUESTION, tools=[NAMESPACE], tool_choice=choice, parallel_tool_calls=False
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [("sky", "get_weather")]
    assert isinstance(json.loads(calls[0].arguments)["city"], str)
    nothing = await ask(
        client, QUESTION, tools=[NAMESPACE], tool_choice="none", max_output_tokens=12
    )
    assert [item.type for item in nothing.output] == ["message"]


async def test_text_follows_its_schema(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "wet": {"type": "boolean"}},
        "required": ["city", "wet"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "weather", "schema": schema, "strict": True}
    response = await ask(client, QUESTION, text={"format": form})
    value = json.loads(response.output_text)
    assert list(value) == ["city", "wet"]
    assert isinstance(value["wet"], bool)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, QUESTION, text={"format": {**form, "schema": {"$ref": "#/nowhere"}}})
    assert caught.value.param is not None
    assert caught.value.param.startswith("text.format.schema")
