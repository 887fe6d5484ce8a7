"""Prompts round the server's context, which is shorter here than what the model was trained for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import aiohttp
import pytest

from ninfer.options import EngineOptions
from tests.helpers.served_model import served_demo_model

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

CONTEXT = 128
Post: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    async with (
        served_demo_model(EngineOptions(executor="cpu", max_context=CONTEXT)) as server,
        aiohttp.ClientSession() as session,
    ):

        async def send(path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with session.post(server.url + path, json=fields) as response:
                return response.status, await response.json()

        yield send


async def test_prompts_round_the_context(post: Post) -> None:
    for length, max_new_tokens, status in (
        (127, 1, 200),
        (128, 0, 200),
        (128, 1, 400),
        (129, 0, 400),
    ):
        fields = {
            "input_ids": [5] * length,
            "sampling_params": {"max_new_tokens": max_new_tokens},
        }
        given, answer = await post("/generate", fields)
        assert given == status, answer
        if status == 400:
            error = answer["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "input_ids")
            limit = CONTEXT - max_new_tokens
            assert f"prompt is too long: {length} tokens > {limit} maximum" in error["message"]


@pytest.mark.parametrize("count", [130, 200_000])
async def test_text_beyond_the_context_is_refused_by_the_field_it_came_in(
    post: Post, count: int
) -> None:
    text = "one " * count
    message = {"role": "user", "content": text}
    for path, fields, param in (
        ("/generate", {"text": text}, "text"),
        ("/generate", {"text": ["a", text]}, "text[1]"),
        ("/v1/chat/completions", {"messages": [message]}, "messages"),
    ):
        status, answer = await post(path, fields)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == param
        assert f"maximum context length is {CONTEXT} tokens" in answer["error"]["message"]
        assert ("at least" in answer["error"]["message"]) == (count > 1000)
