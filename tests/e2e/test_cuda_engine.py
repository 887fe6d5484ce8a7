"""The demo model on the device behind the Engine: many conversations, each as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from ninfer.cli.loading import LoadedModel, load_model, open_named_model, running_engine
from ninfer.contract.chat import ChatMessage, ChatPrompt, GenerationParams, TextPart
from ninfer.contract.generation import EngineHealth, Failed, Finished, Progress
from ninfer.engine.core import Engine
from ninfer.options import EngineOptions, SamplingOptions
from tests.helpers.cuda_models import require_device

pytestmark = pytest.mark.gpu

OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=4,
    memory_budget=4 << 30,
    host_cache_bytes=256 << 20,
)
QUESTIONS = (
    "hi",
    "What is a volcano?",
    "Name three farm animals.",
    "What is 48 + 37?",
    "Tell me a story about a little penguin who is afraid of deep water.",
    "Write one sentence with the word river. " * 20,
)


@dataclass(frozen=True)
class Running:
    model: LoadedModel
    engine: Engine


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    require_device()
    model = load_model(open_named_model(None), OPTIONS, SamplingOptions(), lambda *_: None)
    async with running_engine(model, OPTIONS) as engine:
        yield Running(model, engine)


async def answer(running: Running, index: int, *, leaves_after: int | None = None) -> list[int]:
    """Token ids of one streamed answer; every third one is greedy."""
    frontend, engine = running.model.frontend, running.engine
    message = ChatMessage("user", (TextPart(QUESTIONS[index % len(QUESTIONS)]),))
    prompt = await frontend.prepare_chat(ChatPrompt(messages=(message,)))
    params = GenerationParams(
        temperature=0.0 if index % 3 == 0 else 0.9, top_p=0.9, seed=index, max_tokens=24,
        top_logprobs=2,
    )  # fmt: skip
    request = frontend.build_request(f"r{index}", prompt, params, now=0.0)
    tokens: list[int] = []
    finish = None
    async with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Progress | Finished):
                tokens += [token.token_id for delta in event.deltas for token in delta.tokens]
            if isinstance(event, Finished):
                finish = event.finish
            if leaves_after is not None and len(tokens) >= leaves_after:
                return tokens
    assert finish is not None
    return tokens


async def test_conversations_do_not_disturb_each_other(running: Running) -> None:
    alone = [await answer(running, index) for index in range(12)]
    assert sum(len(tokens) for tokens in alone) > 60
    together = await asyncio.gather(*(answer(running, index) for index in range(12)))
    assert list(together) == alone


async def test_clients_that_leave_give_everything_back(running: Running) -> None:
    await asyncio.gather(
        *(answer(running, index, leaves_after=1 + index % 5) for index in range(16))
    )
    while running.engine.status().running:  # noqa: ASYNC110, the engine signals no idleness
        await asyncio.sleep(0.01)
    assert running.engine.status().health is EngineHealth.READY
    assert await answer(running, 1) == await answer(running, 1)
    running.engine.flush_cache()
    await asyncio.sleep(0.1)
    occupancy = running.model.program.occupancy()
    assert occupancy.lanes_used == occupancy.pages_used == occupancy.slots_used == 0
    running.model.program.check()
