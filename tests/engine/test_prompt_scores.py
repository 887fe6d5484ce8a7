"""Scores of prompts on the running engine: every asked token once, whatever else goes on."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.cache import CheckpointKind, MissReason
from ninfer.contract.errors import RequestError
from ninfer.contract.generation import FinishReason
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import PromptScoring
from ninfer.engine.context.limits import CacheMemory
from ninfer.engine.context_cache import ContextCache
from tests.helpers.engine_rig import (
    EngineRig,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
    spin,
)
from tests.helpers.fake_executor import PAGE_BYTES, SLOT_BYTES, Fault
from tests.helpers.prompt_scores import assert_scored, scores_of

ALL = PromptScoring(first=1, num_top=2)


@settings(max_examples=30)
@given(
    num_tokens=st.integers(2, 120),
    place=st.floats(0, 1),
    num_top=st.integers(0, 3),
    chunk=st.integers(1, 70),
    max_tokens=st.integers(0, 2),
)
async def test_any_chunks_score_every_asked_token_once(
    num_tokens: int, place: float, num_top: int, chunk: int, max_tokens: int
) -> None:
    scoring = PromptScoring(1 + round(place * (num_tokens - 2)), num_top)
    async with running_engine(capacity(chunk=chunk)) as rig:
        request = rig.request(num_tokens, max_tokens, scoring=scoring)
        transcript = await read(rig.engine.submit(request))
        assert_scored(transcript, request)
        assert transcript.token_ids == solo_tokens(request, max_tokens)
        assert transcript.finished.finish.reason is FinishReason.OUTPUT_LIMIT
        await spin()
        assert rig.is_clean()


async def test_running_streams_go_on_between_the_chunks_of_a_scored_prompt() -> None:
    async with running_engine() as rig:
        gate = rig.close_gate()
        stream, scored = rig.request(5, 40), rig.request(90, 1, scoring=ALL)
        reading = [asyncio.create_task(read(rig.engine.submit(r))) for r in (stream, scored)]
        gate.open()
        transcripts = await asyncio.gather(*reading)
        assert_scored(transcripts[1], scored)
        assert transcripts[0].token_ids == solo_tokens(stream, 40)
        kinds = [call.kind for call in rig.executor.calls]
        chunks = [index for index, kind in enumerate(kinds) if kind == "prefill"][1:]
        assert len(chunks) == 6
        assert all(b - a == 2 for a, b in itertools.pairwise(chunks)), kinds


@pytest.mark.parametrize("host_blocks", [0, 64])
async def test_a_pause_loses_no_score_and_tells_none_twice(host_blocks: int) -> None:
    """In the middle of the prompt; replayed without a host tier, from a Snapshot with one."""
    limits = capacity(lanes=2, num_pages=6, chunk=2, host_blocks=host_blocks)
    async with running_engine(limits) as rig:
        older, scored = rig.request(60, 190), rig.request(240, 2, scoring=ALL)
        transcripts = await asyncio.gather(
            *[read(rig.engine.submit(request)) for request in (older, scored)]
        )
        metrics = rig.engine.metrics
        assert metrics.num_pauses > 0
        assert (metrics.replayed_tokens_total > 0) is (host_blocks == 0)
        assert_scored(transcripts[1], scored)
        assert transcripts[1].token_ids == solo_tokens(scored, 2)
        await spin()
        assert rig.is_clean()


async def test_cancelled_between_two_chunks() -> None:
    async with running_engine() as rig:
        gate = rig.close_gate()
        handle = rig.engine.submit(rig.request(90, 1, scoring=ALL))
        reading = asyncio.create_task(read(handle))
        gate.step(2)
        await spin()
        handle.cancel()
        gate.open()
        transcript = await reading
        assert transcript.finished.finish.reason is FinishReason.CANCELLED
        parts = scores_of(transcript)
        assert parts
        assert parts[-1].stop < 90
        await spin()
        assert rig.is_clean()


async def test_logits_that_are_not_finite_end_the_request_alone() -> None:
    async with running_engine() as rig:
        rig.executor.faults[2] = Fault("non_finite")
        request = rig.request(90, 1, scoring=ALL)
        assert (await read(rig.engine.submit(request))).error_code == "non_finite_logits"
        again = rig.request(20, 1, scoring=ALL)
        assert_scored(await read(rig.engine.submit(again)), again)


@pytest.mark.parametrize("scoring", [PromptScoring(0, 1), PromptScoring(1, -1)])
async def test_impossible_scoring_is_refused(scoring: PromptScoring) -> None:
    async with running_engine() as rig:
        with pytest.raises(RequestError):
            rig.engine.submit(rig.request(5, 1, scoring=scoring))


def cached_rig() -> tuple[EngineRig, PreparedPrompt]:
    rig = EngineRig(
        capacity(cache_slots=6, num_pages=20),
        make_policy=lambda program: ContextCache(program, CacheMemory(PAGE_BYTES, SLOT_BYTES)),
    )
    plain = prompt_of(200)
    places = tuple(
        PromptFrontier(count, kind)
        for count, kind in (
            (70, CheckpointKind.STABLE_PREFIX),
            (130, CheckpointKind.RESPONSE_REPLAY),
            (199, CheckpointKind.PROMPT_TAIL),
        )
    )
    return rig, PreparedPrompt(plain.token_ids, frontiers=places)


@pytest.mark.parametrize(
    ("first", "num_cached", "miss"),
    [
        (1, 0, MissReason.PROMPT_LOGPROBS),
        (70, 0, MissReason.NO_STATE_AT_FRONTIER),
        (71, 70, MissReason.PROMPT_LOGPROBS),
        (130, 70, MissReason.NO_STATE_AT_FRONTIER),
        (131, 130, MissReason.PROMPT_LOGPROBS),
        (199, 130, MissReason.NO_STATE_AT_FRONTIER),
    ],
)
async def test_cached_tokens_end_before_the_first_scored_one(
    first: int, num_cached: int, miss: MissReason
) -> None:
    rig, prompt = cached_rig()
    await rig.engine.start()
    try:
        await read(rig.engine.submit(rig.request(prompt=prompt)))
        request = rig.request(prompt=prompt, max_tokens=1, scoring=PromptScoring(first, 1))
        transcript = await read(rig.engine.submit(request))
        assert_scored(transcript, request)
        cache = transcript.finished.usage.cache
        assert cache is not None
        assert (cache.num_tokens, cache.miss) == (num_cached, miss)
        unscored = await read(rig.engine.submit(rig.request(prompt=prompt, max_tokens=1)))
        assert unscored.finished.usage.cached_tokens == 199
    finally:
        await rig.engine.aclose()
