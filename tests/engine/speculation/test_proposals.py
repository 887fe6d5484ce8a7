"""Proposals of a draft model in the engine: asked for, drafted, forgotten, and never in the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.program import Draft, PendingBatch, Program, SequenceHandle
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.engine.speculation.drafter import NO_GUESS, Guess, Hope
from tests.helpers.engine_rig import (
    VOCAB_SIZE,
    EngineRig,
    Transcript,
    capacity,
    read,
    running_engine,
    solo_tokens,
)
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.masked_session import MaskedSession, MaskRule
from tests.helpers.oracle_drafter import oracles, sure
from tests.helpers.scripted_session import ScriptedSession

SAMPLED = SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, top_logprobs=2)


class Follower:
    """Drafts all that is proposed and asks for as much as there may be; knows what it saw."""

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        self.seen.append((len(accepted), proposal))
        return sure(proposal[: max(0, room)], DraftSource.MODEL) if proposal else NO_GUESS

    def hope(self, room: int) -> Hope:
        return Hope((1.0,) * max(0, min(room, self._max_tokens)))


class Followers:
    """Makes them and keeps them by request."""

    def __init__(self) -> None:
        self.made: dict[str, Follower] = {}

    def __call__(self, request: GenerationRequest, max_tokens: int) -> Follower:
        self.made[request.request_id] = Follower(request, max_tokens)
        return self.made[request.request_id]


class Asked(FaultyProgram):
    """Remembers what each decode step was asked to propose."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, lambda name: None)
        self.num_proposed: list[tuple[int, ...]] = []

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        assert not goes_on
        self.num_proposed.append(tuple(num_proposed))
        return super().launch_decode(
            handles, drafts=drafts, num_proposed=num_proposed, goes_on=goes_on
        )


def with_model(draft_tokens: int = 5, lanes: int = 2, **limits: int) -> Capacity:
    return capacity(lanes=lanes, draft_tokens=draft_tokens, has_draft_model=True, **limits)


async def ask(rig: EngineRig, *requests: GenerationRequest) -> Sequence[Transcript]:
    return await asyncio.gather(*(read(rig.engine.submit(request)) for request in requests))


@pytest.mark.parametrize("draft_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_what_the_model_proposes_is_drafted(
    draft_tokens: int, sampling: SamplingParams
) -> None:
    async with running_engine(with_model(draft_tokens, lanes=3), make_drafter=Followers()) as rig:
        requests = [
            rig.request(5 + 11 * index, 30 + 9 * index, sampling=sampling) for index in range(5)
        ]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, request.max_tokens)
        drafts = rig.engine.metrics.drafts
        assert 0 < drafts.accepted_total < drafts.drafted_total
        assert drafts.accepted_at == sorted(drafts.accepted_at, reverse=True)
        assert drafts.by_source[DraftSource.MODEL].rounds_total == drafts.rounds_total
        assert {call.kind for call in rig.executor.calls} == {"prefill", "verify"}
        assert rig.is_clean()


async def test_the_first_step_has_no_draft_and_asks_for_one() -> None:
    programs: list[Asked] = []

    def wrap(program: Program) -> Asked:
        programs.append(Asked(program))
        return programs[-1]

    followers = Followers()
    async with running_engine(with_model(4, lanes=1), make_drafter=followers, wrap=wrap) as rig:
        request = rig.request(5, 12)
        (seen,) = await ask(rig, request)
        assert seen.token_ids == solo_tokens(request, 12)
        first, *others = followers.made[request.request_id].seen
        assert first == (1, ())
        assert all(len(proposal) > 0 for num_accepted, proposal in others if num_accepted < 11)
        # A proposal is for the round after, which takes a token itself.
        assert programs[0].num_proposed[0] == (4,)
        for (num_accepted, _), asked in zip(
            (first, *others), programs[0].num_proposed, strict=True
        ):
            assert sum(asked) == max(0, min(4, 12 - num_accepted - 2))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("max_context", [64, 70])
async def test_budget_and_context_end_drafts_and_proposals(
    max_tokens: int, max_context: int
) -> None:
    limits = with_model(8, max_context=max_context)
    async with running_engine(limits, make_drafter=Followers()) as rig:
        budget = rig.request(5, max_tokens)
        context = rig.request(max_context - max_tokens, 300)
        (seen, full) = await ask(rig, budget, context)
        assert seen.token_ids == solo_tokens(budget, max_tokens)
        assert full.token_ids == solo_tokens(context, max_tokens)
        assert full.finished.finish.reason is FinishReason.CONTEXT_CAPACITY
        assert rig.is_clean()


@pytest.mark.parametrize("finish_after", range(2, 9))
async def test_an_answer_ends_inside_a_round(finish_after: int) -> None:
    async with running_engine(with_model(8), make_drafter=Followers()) as rig:
        request = rig.request(5, 60, session=ScriptedSession(finish_after=finish_after))
        other = rig.request(6, 40)
        (seen, whole) = await ask(rig, request, other)
        assert seen.token_ids == solo_tokens(request, finish_after)
        assert whole.token_ids == solo_tokens(other, 40)
        assert rig.is_clean()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
async def test_forced_tokens_make_a_proposal_worthless(width: int, seed: int) -> None:
    followers = Followers()
    async with running_engine(with_model(8, lanes=3), make_drafter=followers) as rig:
        requests = []
        for index in range(3):
            begin = random.Random(seed + index).randint(4, 15)
            session = MaskedSession(MaskRule(begin, begin + 12, width, VOCAB_SIZE))
            sampling = SamplingParams(temperature=1.0, seed=index)
            requests.append(
                rig.request(6 + index, 40, session=session, mask=session, sampling=sampling)
            )
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 40)
        assert rig.engine.metrics.drafts.accepted_total > 0
        assert rig.is_clean()
    if width == 1:
        for request in requests:
            # All the restricted part was forced; the step behind it knew of no proposal.
            counts = [seen[0] for seen in followers.made[request.request_id].seen]
            behind = max(range(1, len(counts)), key=lambda place: counts[place] - counts[place - 1])
            assert counts[behind] - counts[behind - 1] >= 12
            assert followers.made[request.request_id].seen[behind][1] == ()


@pytest.mark.parametrize("host_blocks", [0, 60], ids=["replay", "snapshot"])
async def test_paused_requests_go_on_the_same(host_blocks: int) -> None:
    limits = with_model(5, lanes=4, num_pages=5, host_blocks=host_blocks)
    async with running_engine(limits, make_drafter=Followers()) as rig:
        requests = [rig.request(40, 120, sampling=SAMPLED) for _ in range(4)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 120)
        assert rig.engine.metrics.num_pauses > 0
        assert rig.engine.metrics.drafts.accepted_total > 0
        assert rig.is_clean()


async def test_drafts_and_proposals_take_no_pages_from_others() -> None:
    """Two rows fill the pool to the last page; nobody is paused for a guess."""
    limits = with_model(8, num_pages=4, max_context=128)
    async with running_engine(limits, make_drafter=Followers()) as rig:
        requests = [rig.request(60, 68), rig.request(60, 68)]
        for request, seen in zip(requests, await ask(rig, *requests), strict=True):
            assert seen.token_ids == solo_tokens(request, 68)
        assert rig.engine.metrics.num_pauses == 0
        assert rig.engine.metrics.drafts.accepted_total > 0


async def test_a_cancelled_row_takes_nothing() -> None:
    async with running_engine(with_model(4), make_drafter=Followers()) as rig:
        gate = rig.close_gate()
        requests = [rig.request(5, 60), rig.request(6, 60)]
        handle = rig.engine.submit(requests[0])
        tasks = [
            asyncio.create_task(read(handle)),
            asyncio.create_task(read(rig.engine.submit(requests[1]))),
        ]
        for _ in range(5):
            gate.step()
            await asyncio.sleep(0.01)
        handle.cancel()
        gate.open()
        cut, whole = await asyncio.gather(*tasks)
        assert cut.token_ids == solo_tokens(requests[0], len(cut.token_ids))
        assert whole.token_ids == solo_tokens(requests[1], 60)
        assert rig.is_clean()


async def test_both_sources_draft_and_are_counted() -> None:
    limits = with_model(6, lanes=3)
    drafters = oracles(lambda request: solo_tokens(request, 200), VOCAB_SIZE, 4)
    async with running_engine(limits, make_drafter=drafters) as rig:
        requests = [rig.request(5 + index, 90, sampling=SAMPLED) for index in range(3)]
        found = await ask(rig, *requests)
        for request, seen in zip(requests, found, strict=True):
            assert seen.token_ids == solo_tokens(request, 90)
        total = rig.engine.metrics.drafts
        for source, counts in total.by_source.items():
            assert 0 < counts.accepted_total < counts.drafted_total, source
        parts = [seen.finished.timings.drafts for seen in found]
        assert all(part is not None for part in parts)
        summed = parts[0]
        for part in parts[1:]:
            assert summed is not None
            assert part is not None
            summed = summed + part
        assert summed is not None
        assert summed.rounds == total.rounds_total
        assert summed.drafted == total.drafted_total == summed.ngram.drafted + summed.model.drafted
        assert summed.accepted == total.accepted_total
        assert list(summed.accepted_at) == [count for count in total.accepted_at if count]
        # What rounds produced, less the prompt's token and what plain steps produced.
        assert summed.accepted + rig.engine.metrics.decode_rows_total == 3 * 89


async def test_the_engines_own_drafts_change_nothing() -> None:
    """The model guesses two of three tokens right, and is asked for as many as that is worth."""
    async with running_engine(with_model(5, lanes=1)) as rig:
        request = rig.request(5, 200)
        (seen,) = await ask(rig, request)
        assert seen.token_ids == solo_tokens(request, 200)
        model = rig.engine.metrics.drafts.by_source[DraftSource.MODEL]
        assert model.accepted_total > model.drafted_total / 2
        assert rig.engine.metrics.num_decode_units < 120
