"""The official client library against /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from ninfer.contract.generation import Finish, FinishReason
from tests.helpers.fake_engine import hold, say
from tests.helpers.gateway_rig import Rig, until


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=rig.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_whole_answer(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("Hel", "lo", finish=Finish(FinishReason.OUTPUT_LIMIT))
    completion = await client.completions.create(
        model="m", prompt=["ab", "c"], n=2, echo=True, logprobs=1, max_tokens=5
    )
    assert completion.object == "text_completion"
    assert [choice.text for choice in completion.choices] == ["abHello"] * 2 + ["cHello"] * 2
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in completion.choices} == {"length"}
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("abHello")
    assert logprobs.text_offset == list(range(7))
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[:2] == [None, -0.98]
    assert completion.usage is not None
    assert completion.usage.total_tokens == 3 + 4 * 6


async def test_stream(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = say("Hel", "lo")
    stream = await client.completions.create(
        model="m",
        prompt=[97, 98],
        echo=True,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(part.text for part in parts) == "abHello"
    assert [part.finish_reason for part in parts][-1] == "stop"
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens or ()]
    assert tokens == list("abHello")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


async def test_errors_arrive_typed(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="m", prompt=[[1], []])
    assert (bad.value.code, bad.value.param) == ("invalid_value", "prompt[1]")
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        await client.completions.create(model="m", prompt="x" * 100)


async def test_sync_client(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")

    def use() -> list[str]:
        with openai.OpenAI(base_url=rig.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model="m", prompt="a").choices[0].text
            with client.completions.create(model="m", prompt="a", stream=True) as chunks:
                return [whole, "".join(chunk.choices[0].text for chunk in chunks)]

    assert await asyncio.to_thread(use) == ["Hello", "Hello"]


async def test_leaving_a_stream_cancels_it(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    stream = await client.completions.create(model="m", prompt="a", stream=True)
    await anext(stream)
    await stream.close()
    await until(lambda: rig.engine.num_open == 0)
    assert rig.engine.handles[0].is_cancelled
