"""The official client library against the server: sync and async, whole and streamed, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from ninfer.contract.errors import NonFiniteLogits, Unavailable
from tests.helpers.fake_engine import CARD, fail, hold, say
from tests.helpers.gateway_rig import Rig, until

T = TypeVar("T")
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=rig.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def in_thread(rig: Rig, use: Callable[[openai.OpenAI], T]) -> T:
    def run() -> T:
        with openai.OpenAI(base_url=rig.url + "/v1", api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_async_whole_answer(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("Hel", "lo", reasoning=("hm",))
    raw = await client.chat.completions.with_raw_response.create(
        model="gpt-5", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    completion = raw.parse()
    assert raw.request_id == raw.headers["x-request-id"]
    choice = completion.choices[0]
    assert choice.message.content == "Hello"
    assert choice.message.model_extra == {"reasoning_content": "hm"}
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 5
    assert completion.usage is not None
    assert completion.usage.total_tokens == 3 + 8
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2


async def test_stream_helper_accumulates_all_choices(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("Hel", "l", "o", reasoning=("h", "m"))
    async with client.chat.completions.stream(
        model="gpt-5", messages=MESSAGES, n=3, stream_options={"include_usage": True}
    ) as stream:
        completion = await stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == ["Hello"] * 3
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert all(choice.finish_reason == "stop" for choice in completion.choices)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3 * 8


async def test_streamed_and_whole_answers_are_equal(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("né", "e", "!")
    whole = await client.chat.completions.create(
        model="m", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    async with client.chat.completions.stream(
        model="m", messages=MESSAGES, logprobs=True, top_logprobs=2
    ) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content == "née!"
    assert streamed.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert streamed.choices[0].logprobs.content == whole.choices[0].logprobs.content


async def test_sync_client(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")

    def use(client: openai.OpenAI) -> tuple[str, str | None, list[str]]:
        with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as chunks:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        whole = client.chat.completions.create(model="m", messages=MESSAGES)
        models = [model.id for model in client.models.list()]
        return text, whole.choices[0].message.content, models

    assert await in_thread(rig, use) == ("Hello", "Hello", [CARD.name])


async def test_model_with_a_slash(client: openai.AsyncOpenAI) -> None:
    assert (await client.models.retrieve(CARD.name)).id == CARD.name
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


async def test_errors_arrive_typed(rig: Rig, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=MESSAGES, temperature=3)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    assert bad.value.type == "invalid_request_error"

    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        await client.chat.completions.create(model="m", messages=long)

    rig.engine.refusal = Unavailable("server_overloaded", "full", 2.0)
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert full.value.code == "server_overloaded"


async def test_sync_errors_arrive_typed(rig: Rig) -> None:
    def use(client: openai.OpenAI) -> None:
        client.chat.completions.create(model="m", messages=[])

    with pytest.raises(openai.BadRequestError) as caught:
        await in_thread(rig, use)
    assert caught.value.param == "messages"


async def test_error_inside_a_stream_is_raised(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = fail(NonFiniteLogits("x"), "Hel")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert texts == ["", "Hel"]
    with pytest.raises(openai.APIError) as caught:
        await anext(stream)
    assert caught.value.code == "internal_error"


async def test_busy_server_is_retried_and_a_bad_prompt_of_ours_is_not(rig: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=rig.url, api_key="none", max_retries=1) as client:
        rig.engine.script = fail(NonFiniteLogits("x"))
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert len(rig.engine.handles) == 1
        rig.engine.refusal = Unavailable("server_overloaded", "full", 1.0)
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        await until(lambda: rig.gateway.counters.exchanges_total == 2)
        rig.engine.refusal, rig.engine.script = None, say("now")
        assert (await asking).choices[0].message.content == "now"


async def test_leaving_a_stream_cancels_it(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await anext(stream)
    await stream.close()
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled
