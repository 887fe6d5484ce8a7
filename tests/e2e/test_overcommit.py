"""The demo model with far too little memory for its requests: every answer is what it is alone,
bit for bit, whether requests are paused with a Snapshot or replayed, and whoever is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from ninfer.cli.loading import open_named_model
from ninfer.contract.arrays import Float32Array
from ninfer.contract.chat import ChatMessage, ChatPrompt, GenerationParams, TextPart
from ninfer.contract.generation import (
    Failed,
    Finish,
    Finished,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Progress,
)
from ninfer.contract.model import ModelSource
from ninfer.contract.sampling import GeneratedToken
from ninfer.contract.units import Capacity
from ninfer.engine.core import Engine
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import SamplingOptions
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.program import ModelProgram
from ninfer.program.weight_reader import read_weights

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

NUM_REQUESTS = 8
MAX_CONTEXT = 256
POOL_PAGES = 8
MAX_TOKENS = 100
WORDS = "Tell me a story about a little penguin who is afraid of deep water and of the dark. "


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client can see of one request."""

    text: tuple[tuple[str, str], ...]
    tokens: tuple[GeneratedToken, ...]
    finish: Finish | None

    def begins(self, whole: Answer) -> bool:
        return self.tokens == whole.tokens[: len(self.tokens)]


@dataclass(frozen=True, slots=True)
class Loaded:
    source: ModelSource
    weights: Mapping[str, Float32Array]
    frontend: ModelFrontend

    @asynccontextmanager
    async def engine(self, capacity: Capacity) -> AsyncIterator[tuple[Engine, ModelProgram]]:
        executor = CpuExecutor(self.source.config, self.weights, capacity, num_threads=1)
        program = ModelProgram(self.source.config, executor, capacity)
        engine = Engine(program, max_pending=NUM_REQUESTS, queue_timeout_s=600.0)
        await engine.start()
        try:
            yield engine, program
        finally:
            await engine.aclose()

    async def request(self, index: int) -> GenerationRequest:
        """Prompts of different lengths; every third one is greedy, the others are sampled."""
        message = ChatMessage("user", (TextPart(WORDS * (1 + index % 3)),))
        prompt = await self.frontend.prepare_chat(ChatPrompt(messages=(message,)))
        params = GenerationParams(
            temperature=0.0 if index % 3 == 0 else 0.9,
            presence_penalty=0.5 if index % 3 == 2 else 0.0,
            seed=index,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            top_logprobs=2,
        )
        return self.frontend.build_request(f"r{index}", prompt, params, now=0.0)


def capacity(*, lanes: int, num_pages: int, host_blocks: int = 0) -> Capacity:
    return Capacity(
        max_concurrency=lanes,
        max_context=MAX_CONTEXT,
        num_pages=num_pages,
        num_slots=2 * lanes + 1,
        prefill_chunk=128,
        num_host_blocks=host_blocks,
    )


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    source = open_named_model(None)
    weights = {name: np.array(array) for name, array in read_weights(source, lambda *_: None)}
    return Loaded(
        source, weights, ModelFrontend(source.config, source.resources, SamplingOptions())
    )


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[Answer]:
    """Every request with the engine to itself."""

    async def ask_all() -> list[Answer]:
        async with loaded.engine(capacity(lanes=1, num_pages=4)) as (engine, _):
            return [
                await answer(engine, await loaded.request(index)) for index in range(NUM_REQUESTS)
            ]

    return asyncio.run(ask_all())


async def answer(
    engine: Engine, request: GenerationRequest, *, cancel_after: int | None = None
) -> Answer:
    deltas: list[OutputDelta] = []
    finish: Finish | None = None
    num_tokens = 0
    async with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Progress | Finished):
                deltas += event.deltas
                num_tokens = event.usage.completion_tokens
            if cancel_after is not None and num_tokens >= cancel_after:
                handle.cancel()
            if isinstance(event, Finished):
                finish = event.finish
    texts: list[tuple[str, str]] = []
    for delta in deltas:
        if texts and texts[-1][0] == delta.channel:
            texts[-1] = (delta.channel, texts[-1][1] + delta.text)
        else:
            texts.append((delta.channel, delta.text))
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Answer(tuple(texts), tokens, finish)


def check_clean(engine: Engine, program: ModelProgram) -> None:
    program.check()
    occupancy = program.occupancy()
    assert (occupancy.lanes_used, occupancy.pages_used, occupancy.slots_used) == (0, 0, 0)
    assert (occupancy.host_blocks_used, occupancy.num_checkpoints) == (0, 0)
    assert engine.status().outstanding == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("host_blocks", [0, 400], ids=["replay", "snapshot"])
async def test_overcommitted_requests_answer_as_alone(
    loaded: Loaded, alone: list[Answer], host_blocks: int
) -> None:
    limits = capacity(lanes=NUM_REQUESTS, num_pages=POOL_PAGES, host_blocks=host_blocks)
    async with loaded.engine(limits) as (engine, program):
        requests = [await loaded.request(index) for index in range(NUM_REQUESTS)]
        pages = sum(program.pages_needed(r.prompt.num_tokens + MAX_TOKENS) for r in requests)
        assert pages >= 3 * POOL_PAGES
        together = await asyncio.gather(*(answer(engine, request) for request in requests))
        assert list(together) == alone
        metrics = engine.metrics
        assert metrics.num_pauses == metrics.num_resumes > 0
        if host_blocks:
            assert metrics.num_replays == 0
        else:
            assert metrics.num_replays == metrics.num_resumes
        check_clean(engine, program)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("host_blocks", [0, 400], ids=["replay", "snapshot"])
async def test_cancelled_ones_show_a_beginning_and_disturb_nobody(
    loaded: Loaded, alone: list[Answer], host_blocks: int
) -> None:
    limits = capacity(lanes=NUM_REQUESTS, num_pages=POOL_PAGES, host_blocks=host_blocks)
    async with loaded.engine(limits) as (engine, program):
        requests = [await loaded.request(index) for index in range(NUM_REQUESTS)]
        cancels = [None, 40, None, 0, 90, None, 1, 20]
        together = await asyncio.gather(
            *(
                answer(engine, request, cancel_after=count)
                for request, count in zip(requests, cancels, strict=True)
            )
        )
        for got, expected, count in zip(together, alone, cancels, strict=True):
            if count is None:
                assert got == expected
            else:
                assert got.finish == Finish(FinishReason.CANCELLED)
                assert got.begins(expected)
        check_clean(engine, program)
