"""The whole server on a device: with every kind of speculation it answers as without, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ninfer.options import EngineOptions
from tests.e2e.test_cuda_speculation import DRAFTS
from tests.helpers.cuda_models import require_device
from tests.helpers.dflash_checkpoints import write_dflash
from tests.helpers.served_model import served_demo_model

pytestmark = pytest.mark.gpu

COPY = "Repeat after me: the red fox, the red hen, the red fox, the red hen, the red fox."
BODIES: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": COPY}], "temperature": 0.0},
    {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0.9, "seed": 3},
    {
        "messages": [{"role": "user", "content": "Tell me a story about a penguin."}],
        "temperature": 0.7,
        "seed": 5,
        "presence_penalty": 0.4,
        "logprobs": True,
        "top_logprobs": 2,
    },
    {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "seed": 1,
        "regex": "[A-Z][a-z ]{8,30}[.]",
    },
)
Answer = tuple[Any, ...]


async def ask(url: str) -> list[Answer]:
    """All requests at once: what is said, why it ends, log probabilities."""
    async with aiohttp.ClientSession(url) as session:

        async def one(body: Mapping[str, Any]) -> Answer:
            whole = {"model": "demo", "max_tokens": 60, **body}
            async with session.post("/v1/chat/completions", json=whole) as response:
                assert response.status == 200, await response.text()
                (choice,) = (await response.json())["choices"]
                return choice["message"], choice["finish_reason"], choice.get("logprobs")

        return await asyncio.gather(*map(one, BODIES))


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def served(**options: Any) -> tuple[list[Answer], float]:
    """The answers, and how many tokens were drafted for them."""
    require_device()
    asked = EngineOptions(
        executor="cuda", max_concurrency=4, max_context=512, memory_budget=4 << 30, **options
    )
    async with served_demo_model(asked) as server:
        found = await ask(server.url)
        drafted = 0.0
        if options:
            drafted = await metric(server.url, "ninfer_drafted_tokens_total")
        return found, drafted


async def test_answers_are_the_same_with_every_kind_of_speculation(tmp_path: Path) -> None:
    plain, _ = await served()
    kinds: dict[str, dict[str, Any]] = {"ngram": {"spec": "ngram"}, "mtp": {"spec": "mtp"}}
    for name, spec in DRAFTS.items():
        folder = write_dflash(tmp_path / name, spec)
        kinds[name] = {"spec": "dflash", "draft_model": str(folder)}
    for name, options in kinds.items():
        found, drafted = await served(**options)
        assert found == plain, name
        print(f"{name}: {drafted:.0f} tokens drafted")
        assert drafted > 0 or name.startswith("dflash")
