"""Anthropic messages with the demo model: from the client library to the kernels' references."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from ninfer.options import EngineOptions
from tests.helpers.served_model import served_demo_model

SYSTEM = "You answer in short words. " * 20
QUESTION: Any = {"role": "user", "content": "What is a volcano?"}
LATER: Any = {"role": "user", "content": "And a river?"}


@pytest.fixture
async def client() -> AsyncIterator[anthropic.AsyncAnthropic]:
    options = EngineOptions(executor="cpu", max_concurrency=2, max_context=1024, host_cache_bytes=0)
    async with (
        served_demo_model(options) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: anthropic.AsyncAnthropic, *messages: Any, **fields: Any) -> Any:
    return await client.messages.create(
        model="demo",
        max_tokens=fields.pop("max_tokens", 16),
        system=SYSTEM,
        messages=messages,
        extra_body={"temperature": 0, **fields},
    )


def prompt_tokens(usage: Any) -> int:
    assert usage.cache_creation_input_tokens == 0
    return int(usage.input_tokens + usage.cache_read_input_tokens)


async def test_streams_say_what_whole_messages_say(client: anthropic.AsyncAnthropic) -> None:
    whole = await ask(client, QUESTION, thinking={"type": "disabled"})
    async with client.messages.stream(
        model="demo",
        max_tokens=16,
        system=SYSTEM,
        messages=[QUESTION],
        extra_body={"temperature": 0, "thinking": {"type": "disabled"}},
    ) as stream:
        streamed = await stream.get_final_message()
    assert whole.content[0].text
    assert [block.text for block in whole.content] == [
        block.text for block in streamed.content if block.type == "text"
    ]
    assert whole.stop_reason == streamed.stop_reason
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    counted = await client.messages.count_tokens(
        model="demo",
        system=SYSTEM,
        messages=[QUESTION],
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert counted.input_tokens == prompt_tokens(whole.usage) == prompt_tokens(streamed.usage)
    assert whole.usage.cache_read_input_tokens == 0
    assert 0 < (streamed.usage.cache_read_input_tokens or 0) < counted.input_tokens


async def test_the_next_turn_goes_on_from_the_last(client: anthropic.AsyncAnthropic) -> None:
    first = await ask(client, QUESTION)
    history = [QUESTION, first.to_param(), LATER]
    later = await ask(client, *history, metadata={"user_id": "u_session_1"})
    assert later.usage.cache_read_input_tokens > 0
    assert later.content == (await ask(client, *history, cache="off")).content


async def test_a_begun_answer_is_gone_on_with(client: anthropic.AsyncAnthropic) -> None:
    whole = await ask(client, QUESTION, thinking={"type": "disabled"})
    text = whole.content[0].text
    begun = text[: text.index(" ", 10)]
    rest = await ask(client, QUESTION, {"role": "assistant", "content": begun}, max_tokens=4)
    assert text.startswith(begun + rest.content[0].text)


async def test_the_context_is_the_limit(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024"):
        await ask(client, {"role": "user", "content": "rain " * 3000})
    nothing = await ask(client, QUESTION, max_tokens=0)
    assert (nothing.content, nothing.stop_reason) == ([], "max_tokens")
    assert (await ask(client, QUESTION)).usage.cache_read_input_tokens > 0


WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
IN_PARIS: Any = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_a_call_its_result_and_the_answer(
    client: anthropic.AsyncAnthropic, display: str
) -> None:
    """The thought comes back, in the open or in its signature, so that the second prompt begins
    with the first one and its answer."""
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 16, "display": display},
        "max_tokens": 60,
    }
    called = await ask(client, IN_PARIS, **fields)
    thought, use = called.content
    assert called.stop_reason == "tool_use"
    assert bool(thought.thinking) is (display == "summarized")
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees, rain"}
    turns = [IN_PARIS, called.to_param(), {"role": "user", "content": [result]}]
    answer = await ask(client, *turns, **fields)
    assert answer.stop_reason == "end_turn"
    assert answer.content[-1].type == "text"
    assert answer.usage.cache_read_input_tokens > prompt_tokens(called.usage)


async def test_a_schema_is_kept(client: anthropic.AsyncAnthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    message = await ask(
        client,
        {"role": "user", "content": "Name a city."},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "disabled"},
        max_tokens=60,
    )
    value = json.loads(message.content[0].text)
    assert list(value) == ["city", "size"]
    assert len(value["city"]) <= 8
    assert value["size"] in (1, 2)
