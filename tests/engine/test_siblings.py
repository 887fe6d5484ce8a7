"""Several answers to one prompt: it is computed once, whatever becomes of the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.cache import CacheMode, CacheRequest, CheckpointKind
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import PromptScoring, SamplingParams
from ninfer.contract.units import Capacity
from ninfer.engine.context.limits import CacheMemory
from ninfer.engine.context_cache import ContextCache
from tests.helpers.engine_rig import (
    EngineRig,
    Transcript,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
    spin,
)
from tests.helpers.fake_executor import PAGE_BYTES, SLOT_BYTES, Fault

NUM_TOKENS = 200
ROOMY = capacity(lanes=4, num_pages=40, cache_slots=8)


def question(num_tokens: int = NUM_TOKENS, seed: int = 0) -> PreparedPrompt:
    plain = prompt_of(num_tokens, seed)
    tail = PromptFrontier(num_tokens - 1, CheckpointKind.PROMPT_TAIL)
    return PreparedPrompt(plain.token_ids, frontiers=(tail,))


@asynccontextmanager
async def cached_engine(
    limits: Capacity = ROOMY, queue_timeout_s: float = 100.0
) -> AsyncIterator[EngineRig]:
    async with running_engine(
        limits,
        queue_timeout_s=queue_timeout_s,
        make_policy=lambda program: ContextCache(program, CacheMemory(PAGE_BYTES, SLOT_BYTES)),
    ) as rig:
        yield rig


def choices_of(
    rig: EngineRig, count: int, prompt: PreparedPrompt, cache: CacheRequest | None = None
) -> list[GenerationRequest]:
    return [
        rig.request(
            prompt=prompt,
            max_tokens=3,
            cache=cache,
            sampling=SamplingParams(temperature=1.0, seed=seed),
        )
        for seed in range(count)
    ]


async def read_all(rig: EngineRig, requests: list[GenerationRequest]) -> list[Transcript]:
    return list(await asyncio.gather(*[read(rig.engine.submit(r)) for r in requests]))


def assert_alone(transcripts: list[Transcript], requests: list[GenerationRequest]) -> None:
    for transcript, request in zip(transcripts, requests, strict=True):
        assert transcript.token_ids == solo_tokens(request, 3)


@pytest.mark.parametrize("lanes", [1, 2, 4])
async def test_a_prompt_is_computed_once(lanes: int) -> None:
    async with cached_engine(capacity(lanes=lanes, num_pages=40, cache_slots=8)) as rig:
        requests = choices_of(rig, 4, question())
        transcripts = await read_all(rig, requests)
        assert_alone(transcripts, requests)
        assert rig.engine.metrics.prompt_tokens_total == NUM_TOKENS + 3
        cached = [transcript.finished.usage.cached_tokens for transcript in transcripts]
        assert cached == [0, NUM_TOKENS - 1, NUM_TOKENS - 1, NUM_TOKENS - 1]


@pytest.mark.parametrize(
    "cache",
    [[CacheRequest(mode=CacheMode.OFF)] * 2, [CacheRequest(salt="a"), CacheRequest(salt="b")]],
    ids=["off", "salts"],
)
async def test_what_may_not_be_shared_is_not_waited_for(cache: list[CacheRequest]) -> None:
    async with cached_engine() as rig:
        gate = rig.close_gate()
        prompt = question()
        requests = [choices_of(rig, 1, prompt, own)[0] for own in cache]
        reading = asyncio.create_task(read_all(rig, requests))
        await spin()
        assert rig.engine.status().running == 2
        gate.open()
        assert_alone(await reading, requests)
        assert rig.engine.metrics.prompt_tokens_total == 2 * NUM_TOKENS


async def test_nothing_is_waited_for_that_will_not_be_kept() -> None:
    """Prompts that are too short, and such that a checkpoint of is there already."""
    async with cached_engine() as rig:
        short, known = question(40, seed=1), question(seed=2)
        await read(rig.engine.submit(rig.request(prompt=known)))
        for prompt in (short, known):
            gate = rig.close_gate()
            reading = asyncio.create_task(read_all(rig, choices_of(rig, 3, prompt)))
            await spin()
            assert rig.engine.status().running == 3
            gate.open()
            await reading


async def test_requests_with_a_prompt_of_their_own_go_past() -> None:
    async with cached_engine() as rig:
        gate = rig.close_gate()
        requests = [*choices_of(rig, 2, question()), rig.request(5, 3)]
        reading = asyncio.create_task(read_all(rig, requests))
        await spin()
        assert (rig.engine.status().running, rig.engine.status().waiting) == (2, 1)
        gate.open()
        assert_alone(await reading, requests)


async def test_however_many_wait_for_siblings_a_free_lane_is_for_others() -> None:
    async with cached_engine() as rig:
        gate = rig.close_gate()
        requests = [
            *choices_of(rig, 4, question(seed=1)),
            *choices_of(rig, 4, question(seed=2)),
            rig.request(5, 3),
        ]
        reading = asyncio.create_task(read_all(rig, requests))
        await spin()
        assert (rig.engine.status().running, rig.engine.status().waiting) == (3, 6)
        gate.open()
        assert_alone(await reading, requests)
        assert rig.engine.metrics.prompt_tokens_total == 2 * (NUM_TOKENS + 3) + 5


async def test_the_next_one_leads_when_the_first_is_cancelled() -> None:
    async with cached_engine() as rig:
        gate = rig.close_gate()
        requests = choices_of(rig, 3, question())
        handles = [rig.engine.submit(request) for request in requests]
        reading = asyncio.gather(*map(read, handles))
        gate.step(3)
        await spin()
        handles[0].cancel()
        gate.open()
        transcripts = list(await reading)
        assert transcripts[0].finished.finish.reason is FinishReason.CANCELLED
        assert_alone(transcripts[1:], requests[1:])
        cached = [transcript.finished.usage.cached_tokens for transcript in transcripts]
        assert cached == [0, 0, NUM_TOKENS - 1]


async def test_the_next_one_leads_when_the_first_fails() -> None:
    async with cached_engine() as rig:
        rig.executor.faults[2] = Fault("non_finite")
        requests = choices_of(rig, 3, question())
        transcripts = await read_all(rig, requests)
        assert transcripts[0].error_code == "non_finite_logits"
        assert_alone(transcripts[1:], requests[1:])


@pytest.mark.parametrize("queue_timeout_s", [0.0, 5.0])
async def test_waiting_for_a_sibling_is_no_waiting_for_a_lane(queue_timeout_s: float) -> None:
    async with cached_engine(queue_timeout_s=queue_timeout_s) as rig:
        gate = rig.close_gate()
        requests = choices_of(rig, 3, question())
        reading = asyncio.create_task(read_all(rig, requests))
        for _ in range(4):
            rig.clock.advance(20.0)
            gate.step()
            await spin()
        gate.open()
        assert_alone(await reading, requests)


async def test_a_scored_choice_is_computed_whole_and_leads_all_the_same() -> None:
    async with cached_engine() as rig:
        prompt = question()
        scored = rig.request(prompt=prompt, max_tokens=3, scoring=PromptScoring(1, 0))
        requests = [scored, *choices_of(rig, 2, prompt)]
        transcripts = await read_all(rig, requests)
        assert_alone(transcripts, requests)
        assert rig.engine.metrics.prompt_tokens_total == NUM_TOKENS + 2


@settings(max_examples=40)
@given(
    lanes=st.integers(1, 4),
    num_pages=st.integers(4, 14),
    cache_slots=st.integers(0, 3),
    host_blocks=st.sampled_from([0, 30]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    chunk=st.sampled_from([16, 70, 200]),
)
async def test_any_memory_serves_all_choices(
    lanes: int, num_pages: int, cache_slots: int, host_blocks: int, counts: list[int], chunk: int
) -> None:
    limits = capacity(
        lanes=lanes,
        num_pages=num_pages,
        cache_slots=cache_slots,
        host_blocks=host_blocks,
        chunk=chunk,
    )
    async with cached_engine(limits) as rig:
        requests = [
            request
            for seed, count in enumerate(counts)
            for request in choices_of(rig, count, question(150 + 40 * seed, seed))
        ]
        async with asyncio.timeout(30):
            assert_alone(await read_all(rig, requests), requests)
        rig.engine.flush_cache()
        await spin()
        assert rig.is_clean()


async def test_a_full_pool_gives_up_the_checkpoint_that_would_cost_its_row_a_page() -> None:
    """The row alone shares its last page with what it started from, and there is none for a
    copy."""
    async with cached_engine(capacity(lanes=1, num_pages=4, cache_slots=1, chunk=200)) as rig:
        prompt = question(230)
        for num_cached in (0, 229):
            (request,) = choices_of(rig, 1, prompt)
            transcript = await read(rig.engine.submit(request))
            assert_alone([transcript], [request])
            assert transcript.finished.usage.cached_tokens == num_cached
