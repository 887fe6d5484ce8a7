"""Forced tokens: accepted at once, fed several in a unit, and otherwise as if they were drawn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ninfer.contract.generation import Finish, FinishReason
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.token_rate import WINDOW_S
from tests.helpers.engine_rig import EngineRig, Transcript, capacity, read, solo_tokens
from tests.helpers.forcing import BoundSession, forcing


async def run(
    counts: dict[int, int],
    *,
    max_tokens: int = 40,
    session: BoundSession | None = None,
    sampling: SamplingParams | None = None,
) -> tuple[Transcript, EngineRig, list[int]]:
    rig = EngineRig(capacity())
    request = rig.request(20, max_tokens, sampling=sampling)
    wanted = solo_tokens(request, max_tokens)
    await rig.engine.start()
    try:
        target = forcing(request, session or BoundSession(), counts)
        transcript = await read(rig.engine.submit(target))
        assert rig.is_clean()
    finally:
        await rig.engine.aclose()
    return transcript, rig, wanted


@pytest.mark.parametrize(
    ("counts", "most_steps"), [({1: 1}, 39), ({2: 10}, 30), ({1: 16, 20: 18}, 8), ({3: 35}, 5)]
)
async def test_forced_tokens_are_part_of_the_answer(
    counts: dict[int, int], most_steps: int
) -> None:
    transcript, rig, wanted = await run(counts)
    assert transcript.token_ids == wanted
    assert transcript.finished.finish == Finish(FinishReason.OUTPUT_LIMIT)
    assert transcript.finished.usage.completion_tokens == 40
    assert rig.engine.metrics.completion_tokens_total == 40
    assert rig.engine.metrics.completion_rate.per_second(rig.clock() + 1) == 40 / WINDOW_S
    assert rig.engine.metrics.num_decode_units <= most_steps


async def test_the_last_token_of_a_budget_is_drawn() -> None:
    transcript, _, wanted = await run({1: 50}, max_tokens=6)
    assert transcript.token_ids == wanted
    assert transcript.finished.finish == Finish(FinishReason.OUTPUT_LIMIT)


async def test_an_answer_does_not_end_among_forced_tokens() -> None:
    transcript, _, wanted = await run({1: 20}, session=BoundSession(finish_after=5))
    assert transcript.token_ids == wanted[:5]


async def test_with_log_probabilities_every_token_is_drawn() -> None:
    sampling = SamplingParams(top_logprobs=1)
    transcript, rig, wanted = await run({1: 20}, sampling=sampling)
    assert transcript.token_ids == wanted
    assert rig.engine.metrics.num_decode_units == 39


async def test_a_session_that_fails_on_forced_tokens_ends_its_request() -> None:
    class Failing(BoundSession):
        def preview(self, tokens, limit):  # type: ignore[no-untyped-def]
            if len(tokens) > 1:
                raise ZeroDivisionError
            return super().preview(tokens, limit)

    transcript, _, _ = await run({1: 5}, session=Failing())
    assert transcript.error_code == "internal_error"


@pytest.mark.parametrize("host_blocks", [0, 16])
async def test_pauses_among_forced_tokens(host_blocks: int) -> None:
    rig = EngineRig(capacity(num_pages=4, chunk=64, host_blocks=host_blocks))
    requests = [rig.request(62, 72) for _ in range(2)]
    wanted = [solo_tokens(request, 72) for request in requests]
    targets = [forcing(request, BoundSession(), {1: 3, 20: 16, 50: 17}) for request in requests]
    await rig.engine.start()
    try:
        transcripts = await asyncio.gather(*(read(rig.engine.submit(item)) for item in targets))
        assert rig.engine.metrics.num_pauses > 0
        assert rig.is_clean()
    finally:
        await rig.engine.aclose()
    assert [transcript.token_ids for transcript in transcripts] == wanted


async def test_mates_are_not_disturbed() -> None:
    rig = EngineRig(capacity())
    plain, other = rig.request(9, 30), rig.request(11, 30)
    bound = forcing(replace(other), BoundSession(), {2: 12, 18: 5})
    await rig.engine.start()
    try:
        transcripts = await asyncio.gather(
            read(rig.engine.submit(plain)), read(rig.engine.submit(bound))
        )
    finally:
        await rig.engine.aclose()
    assert [item.token_ids for item in transcripts] == [
        solo_tokens(plain, 30),
        solo_tokens(other, 30),
    ]
