"""Requests on the CUDA executor over a made-up device: steps that start ahead change no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from ninfer.contract.generation import Finished, GenerationRequest, Progress
from ninfer.contract.program import Draft, PendingBatch, SequenceHandle
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.core import Engine
from ninfer.options import EngineOptions
from ninfer.program.program import ModelProgram
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.scripted_session import ScriptedSession
from tests.helpers.slow_cuda import SlowCuda
from tests.program.executors.test_cuda import build, small_config

OPTIONS = EngineOptions(
    max_concurrency=3,
    max_context=256,
    prefill_chunk=64,
    weights="bf16",
    memory_budget=96 << 20,
    host_cache_bytes=2 << 20,
)
NUM_REQUESTS = 24


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    max_tokens: int
    finish_after: int | None
    leaves_after: int | None
    sampling: SamplingParams

    def request(self, name: str) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            prompt=PreparedPrompt(np.array(self.prompt, np.int32)),
            sampling=self.sampling,
            session=ScriptedSession(finish_after=self.finish_after),
            max_tokens=self.max_tokens,
        )


def make_case(rng: random.Random) -> Case:
    return Case(
        prompt=tuple(rng.randrange(101) for _ in range(rng.choice([1, 5, 60, 63, 64, 65, 130]))),
        max_tokens=rng.choice([1, 2, 7, 40, 90]),
        finish_after=rng.choice([None, None, 3, 20]),
        leaves_after=rng.choice([None, None, None, 2, 30]),
        sampling=SamplingParams(
            temperature=1.0,
            seed=rng.randrange(1 << 30),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
        ),
    )


class Patient(FaultyProgram):
    """A Program whose units never go on."""

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        return super().launch_decode(handles)


@asynccontextmanager
async def running(seed: int, *, goes_on: bool) -> AsyncIterator[tuple[Engine, SlowCuda]]:
    rng = random.Random(seed)
    cuda = SlowCuda(lambda: rng.choice([0, 1, 3, 9]))
    config = small_config()
    built = build(cuda, config, OPTIONS)
    cuda.executor = built.executor
    program = ModelProgram(config, built.executor, built.plan.memory.capacity)
    chosen = program if goes_on else Patient(program, lambda name: None)
    engine = Engine(chosen, max_pending=NUM_REQUESTS, queue_timeout_s=60.0)
    await engine.start()
    try:
        yield engine, cuda
        while engine.status().running:  # noqa: ASYNC110, the engine signals no idleness
            await asyncio.sleep(0)
        program.check()
        assert program.occupancy().lanes_used == 0
    finally:
        await engine.aclose()


async def tokens_of(engine: Engine, case: Case, name: str) -> list[int]:
    tokens: list[int] = []
    async with engine.submit(case.request(name)) as handle:
        async for event in handle:
            if isinstance(event, Progress | Finished):
                tokens += [token.token_id for delta in event.deltas for token in delta.tokens]
            if case.leaves_after is not None and len(tokens) >= case.leaves_after:
                break
    return tokens


@pytest.mark.parametrize("seed", range(4))
async def test_a_busy_engine_answers_as_an_idle_one_without_steps_ahead(seed: int) -> None:
    rng = random.Random(seed)
    cases = [make_case(rng) for _ in range(NUM_REQUESTS)]
    async with running(seed, goes_on=False) as (engine, cuda):
        alone = [await tokens_of(engine, case, "alone") for case in cases]
    num_alone = cuda.num_steps

    async def arrive(index: int) -> list[int]:
        for _ in range(rng.randrange(400)):
            await asyncio.sleep(0)
        return await tokens_of(engine, cases[index], f"r{index}")

    async with running(seed, goes_on=True) as (engine, cuda):
        together = await asyncio.gather(*map(arrive, range(NUM_REQUESTS)))
    for index, (want, got) in enumerate(zip(alone, together, strict=True)):
        shared = min(len(want), len(got)) if cases[index].leaves_after is not None else len(want)
        assert got[:shared] == want[:shared], f"request {index}"
    assert cuda.num_steps < num_alone
