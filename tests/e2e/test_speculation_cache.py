"""What the context cache keeps of an answer does not depend on drafts: a chat whose answer ends in
the middle of a round goes on from the same place, with the same bits, as without."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from ninfer.options import EngineOptions
from tests.helpers.served_model import served_demo_model

pytestmark = pytest.mark.no_cover

TEXTS = (
    "Copy this text: The little dog sees a red ball and runs to the old house.",
    "Repeat after me: 183 604 77 912 415 550",
    "Who are you?",
)
SYSTEM = "You are a helpful assistant. The sun is warm and the sea is blue. " * 6
"""Long enough to be worth keeping."""
PLACES = (6, 11, 17)
"""Characters of an answer before a stop string."""


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        found: dict[str, Any] = await response.json()
        assert response.status == 200, found
        return found


async def generate(
    session: aiohttp.ClientSession, token_ids: list[int], **params: Any
) -> dict[str, Any]:
    return await post(
        session,
        "/generate",
        input_ids=token_ids,
        sampling_params={"temperature": 0.0, "max_new_tokens": 24, **params},
        return_logprob=True,
    )


async def turns(session: aiohttp.ClientSession, text: str, place: int) -> list[Any]:
    """An answer that a stop string ends, and how it goes on: all that is said of them, and how much
    of the prompt was there."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    prompt = (await post(session, "/tokenize", model="demo", messages=messages))["tokens"]
    whole = await generate(session, prompt)
    stop = whole["text"][place : place + 3]
    first = await generate(session, prompt, stop=[stop], no_stop_trim=True)
    second = await generate(session, prompt + ids_of(first), ignore_eos=True)
    return [*map(shown, (first, second)), second["meta_info"]["cached_tokens"]]


def ids_of(turn: dict[str, Any]) -> list[int]:
    return [token_id for _, token_id, *_ in turn["meta_info"]["output_token_logprobs"]]


def shown(turn: dict[str, Any]) -> tuple[Any, ...]:
    meta = turn["meta_info"]
    return turn["text"], meta["output_token_logprobs"], meta["finish_reason"]


async def told(**options: Any) -> list[list[Any]]:
    asked = EngineOptions(
        executor="cpu", cpu_threads=1, max_concurrency=2, max_context=512, **options
    )
    async with served_demo_model(asked) as server, aiohttp.ClientSession(server.url) as session:
        found = [await turns(session, text, place) for text in TEXTS for place in PLACES]
        assert (server.engine.metrics.drafts.accepted_total > 0) == bool(options)
        return found


async def test_turns_behind_a_stop_are_those_without_drafts() -> None:
    plain = await told()
    assert max(turn[-1] for turn in plain) > 40
    for options in ({"spec": "ngram", "draft_tokens": 15}, {"spec": "mtp", "draft_tokens": 5}):
        assert await told(**options) == plain, options
