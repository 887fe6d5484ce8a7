"""Rounds in the engine: the same answers, ends inside a round, memory, figures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import repeat

import pytest

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.generation import Finish, FinishReason, GenerationRequest
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.speculation.drafter import Guess, Hope, MakeDrafter
from tests.helpers.engine_rig import (
    VOCAB_SIZE,
    EngineRig,
    Transcript,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
)
from tests.helpers.fake_executor import Fault
from tests.helpers.known_drafter import KnownDrafter
from tests.helpers.masked_session import MaskedSession, MaskRule
from tests.helpers.oracle_drafter import oracles, sure
from tests.helpers.scripted_session import ScriptedSession

SAMPLED = SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, top_logprobs=2)


class PerfectDrafter:
    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self._coming = solo_tokens(request, 200)
        self._max_tokens = max_tokens

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        stop = len(accepted) + max(0, min(room, self._max_tokens))
        return sure(self._coming[len(accepted) : stop])

    def hope(self, room: int) -> Hope:
        return Hope()


def random_oracles(seed: int) -> MakeDrafter:
    return oracles(lambda request: solo_tokens(request, 200), VOCAB_SIZE, seed)


async def ask(rig: EngineRig, *requests: GenerationRequest) -> Sequence[Transcript]:
    return await asyncio.gather(*(read(rig.engine.submit(request)) for request in requests))


@pytest.mark.parametrize("draft_tokens", [1, 3, MAX_DRAFT_TOKENS])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_answers_are_those_without_drafts(
    draft_tokens: int, sampling: SamplingParams
) -> None:
    limits = capacity(lanes=4, draft_tokens=draft_tokens)
    async with running_engine(limits, make_drafter=random_oracles(draft_tokens)) as rig:
        requests = [
            rig.request(5 + 11 * index, 30 + 9 * index, sampling=sampling) for index in range(6)
        ]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, request.max_tokens)
            assert seen.finished.finish == Finish(FinishReason.OUTPUT_LIMIT)
        drafts = rig.engine.metrics.drafts
        assert 0 < drafts.accepted_total < drafts.drafted_total
        assert drafts.accepted_at == sorted(drafts.accepted_at, reverse=True)
        assert not any(drafts.accepted_at[draft_tokens:])
        assert rig.is_clean()


@pytest.mark.parametrize("num_right", range(6))
async def test_just_the_right_beginning_of_each_draft_is_accepted(num_right: int) -> None:
    def make(request: GenerationRequest, max_tokens: int) -> KnownDrafter:
        return KnownDrafter(solo_tokens(request, 90), max_tokens, VOCAB_SIZE, repeat(num_right))

    async with running_engine(capacity(lanes=3, draft_tokens=5), make_drafter=make) as rig:
        requests = [rig.request(5 + index, 1 + 6 * 7, sampling=SAMPLED) for index in range(3)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 43)
            drafts = seen.finished.timings.drafts
            assert drafts is not None
            # The last round has the length that the budget leaves.
            assert all(drafts.rounds - 1 <= count for count in drafts.accepted_at)
            assert len(drafts.accepted_at) == num_right
            assert 41 <= drafts.accepted + drafts.rounds <= 42


async def test_right_drafts_take_a_unit_for_many_tokens() -> None:
    limits = capacity(lanes=1, draft_tokens=4)
    async with running_engine(limits, make_drafter=PerfectDrafter) as rig:
        (seen,) = await ask(rig, rig.request(5, 31))
        # One token of the prompt's unit, then six rounds of five.
        assert rig.engine.metrics.num_decode_units == 6
        drafts = seen.finished.timings.drafts
        assert drafts is not None
        assert (drafts.rounds, drafts.drafted, drafts.accepted) == (6, 24, 24)
        assert seen.finished.usage.completion_tokens == 31


@pytest.mark.parametrize("finish_after", range(2, 9))
async def test_an_answer_ends_inside_a_round(finish_after: int) -> None:
    limits = capacity(lanes=1, draft_tokens=8)
    async with running_engine(limits, make_drafter=PerfectDrafter) as rig:
        request = rig.request(5, 60, session=ScriptedSession(finish_after=finish_after))
        (seen,) = await ask(rig, request)
        tokens = solo_tokens(request, finish_after)
        assert seen.token_ids == tokens
        assert seen.finished.finish == Finish(FinishReason.STOP_TOKEN, tokens[-1])
        assert rig.engine.metrics.completion_tokens_total == finish_after
        drafts = seen.finished.timings.drafts
        assert drafts is not None
        assert drafts.accepted == min(finish_after - 1, 8)
        assert rig.is_clean()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10])
async def test_no_draft_goes_past_the_budget(max_tokens: int) -> None:
    limits = capacity(lanes=1, draft_tokens=8, max_context=64)
    async with running_engine(limits, make_drafter=PerfectDrafter) as rig:
        budget, context = rig.request(5, max_tokens), rig.request(64 - max_tokens, 300)
        (seen, full) = await ask(rig, budget, context)
        assert seen.token_ids == solo_tokens(budget, max_tokens)
        assert full.token_ids == solo_tokens(context, max_tokens)
        assert full.finished.finish.reason is FinishReason.CONTEXT_CAPACITY
        assert rig.engine.metrics.drafts.rounds_total == 2 * (max_tokens > 2)


async def test_min_tokens_suppress_ends_inside_a_round() -> None:
    limits = capacity(lanes=1, draft_tokens=6)
    async with running_engine(limits, make_drafter=random_oracles(1)) as rig:
        prompt = prompt_of(7, 9)
        request = GenerationRequest(
            request_id="m",
            prompt=prompt,
            sampling=SamplingParams(),
            session=ScriptedSession(),
            max_tokens=40,
            min_tokens=20,
            suppressed_ids=tuple(range(0, VOCAB_SIZE, 2)),
        )
        (seen,) = await ask(rig, request)
        assert seen.token_ids == solo_tokens(request, 40)
        assert all(token % 2 for token in seen.token_ids[:20])
        assert not all(token % 2 for token in seen.token_ids)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
async def test_masked_answers_are_those_without_drafts(width: int, seed: int) -> None:
    async with running_engine(
        capacity(lanes=3, draft_tokens=8), make_drafter=random_oracles(seed)
    ) as rig:
        requests = []
        for index in range(3):
            begin = random.Random(seed + index).randint(0, 15)
            session = MaskedSession(MaskRule(begin, begin + 12, width, VOCAB_SIZE))
            sampling = SAMPLED if index % 2 else SamplingParams(temperature=1.0, seed=index)
            request = rig.request(6 + index, 40, session=session, mask=session, sampling=sampling)
            requests.append(request)
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 40)
        assert rig.engine.metrics.drafts.accepted_total > 0
        assert rig.is_clean()


async def test_a_dead_end_behind_right_drafts_shows_all_before_it() -> None:
    rule = MaskRule(0, 0, 1, VOCAB_SIZE, dead_end=7)
    async with running_engine(
        capacity(lanes=1, draft_tokens=8), make_drafter=PerfectBeforeDeadEnd
    ) as rig:
        session = MaskedSession(rule)
        request = rig.request(5, 40, session=session, mask=session)
        (seen,) = await ask(rig, request)
        assert seen.error_code == "constraint_dead_end"
        assert len(seen.token_ids) == 7
        assert rig.is_clean()


class PerfectBeforeDeadEnd(PerfectDrafter):
    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self._coming = [*solo_tokens(request, 7), 1, 2, 3]
        self._max_tokens = max_tokens


async def test_a_cancelled_row_takes_nothing_of_its_round() -> None:
    async with running_engine(
        capacity(lanes=2, draft_tokens=4), make_drafter=PerfectDrafter
    ) as rig:
        gate = rig.close_gate()
        requests = [rig.request(5, 60), rig.request(6, 60)]
        handle = rig.engine.submit(requests[0])
        tasks = [
            asyncio.create_task(read(handle)),
            asyncio.create_task(read(rig.engine.submit(requests[1]))),
        ]
        for _ in range(4):
            gate.step()
            await asyncio.sleep(0.01)
        handle.cancel()
        gate.open()
        cut, whole = await asyncio.gather(*tasks)
        assert cut.finished.finish.reason is FinishReason.CANCELLED
        assert cut.token_ids == solo_tokens(requests[0], len(cut.token_ids))
        assert whole.token_ids == solo_tokens(requests[1], 60)
        assert rig.is_clean()


@pytest.mark.parametrize("host_blocks", [0, 60], ids=["replay", "snapshot"])
async def test_paused_requests_go_on_the_same(host_blocks: int) -> None:
    limits = capacity(lanes=4, num_pages=5, draft_tokens=5, host_blocks=host_blocks)
    async with running_engine(limits, make_drafter=random_oracles(2)) as rig:
        requests = [rig.request(40, 120, sampling=SAMPLED) for _ in range(4)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 120)
        assert rig.engine.metrics.num_pauses > 0
        assert (rig.engine.metrics.num_replays > 0) == (host_blocks == 0)
        assert rig.is_clean()


async def test_drafts_take_no_pages_from_others() -> None:
    """Two rows fill the pool to the last page; no draft makes anybody wait."""
    limits = capacity(lanes=2, num_pages=4, max_context=128, draft_tokens=8)
    async with running_engine(limits, make_drafter=PerfectDrafter) as rig:
        requests = [rig.request(60, 68), rig.request(60, 68)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 68)
        assert rig.engine.metrics.num_pauses == 0


async def test_a_bad_row_ends_alone() -> None:
    async with running_engine(
        capacity(lanes=2, draft_tokens=4), make_drafter=PerfectDrafter
    ) as rig:
        rig.executor.faults[4] = Fault("non_finite", (0,))
        requests = [rig.request(5, 30), rig.request(6, 30)]
        seen = await ask(rig, *requests)
        assert rig.executor.calls[4].kind == "verify"
        assert seen[0].error_code == "non_finite_logits"
        assert seen[0].token_ids == solo_tokens(requests[0], len(seen[0].token_ids))
        assert seen[1].token_ids == solo_tokens(requests[1], 30)
        assert rig.is_clean()


async def test_a_session_that_fails_on_a_draft_ends_its_request() -> None:
    def fail(name: str) -> None:
        if name == "masks_behind":
            raise ValueError("broken")

    async with running_engine(
        capacity(lanes=2, draft_tokens=4), make_drafter=PerfectDrafter
    ) as rig:
        requests = [rig.request(5, 30, session=ScriptedSession(on_call=fail)), rig.request(6, 30)]
        seen = await ask(rig, *requests)
        assert seen[0].error_code == "internal_error"
        assert seen[1].token_ids == solo_tokens(requests[1], 30)
        assert rig.is_clean()


async def test_the_engines_own_drafts_change_nothing() -> None:
    async with running_engine(capacity(lanes=1, draft_tokens=8)) as rig:
        requests = [rig.request(5, 200) for _ in range(3)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 200)
        assert rig.engine.metrics.drafts.rounds_total > 0


async def test_nothing_is_drafted_when_it_is_off() -> None:
    def refuse(request: GenerationRequest, max_tokens: int) -> PerfectDrafter:
        raise AssertionError("a drafter was made")

    async with running_engine(capacity(lanes=1), make_drafter=refuse) as rig:
        (seen,) = await ask(rig, rig.request(5, 20))
        assert seen.finished.timings.drafts is None
        assert {call.kind for call in rig.executor.calls} == {"prefill", "decode"}
