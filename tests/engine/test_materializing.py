"""A request whose source must come up a tier first: it has a lane, and waits for the transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from ninfer.contract.cache import CacheMode, CacheRequest, CacheUse, CheckpointId, MissReason
from ninfer.contract.generation import Admitted, FinishReason, GenerationRequest
from ninfer.contract.program import Amounts, Program, SequenceHandle, Source, Transfer, TransferKind
from ninfer.contract.prompt import PreparedPrompt
from ninfer.engine.admission import MAX_MOVES
from ninfer.engine.context_protocol import SourceChoice, TransferPlan
from ninfer.engine.no_cache import NoCache
from tests.helpers.engine_rig import (
    EngineRig,
    Maker,
    StepGate,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
    spin,
    step_until,
)
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.watched_program import WatchedProgram

LIMITS = capacity(lanes=2, num_pages=8, chunk=64, cache_slots=2, host_blocks=40)


class Shelf(NoCache):
    """Keeps what the first finished request leaves, on the host alone.

    is_stubborn   it is never content with what a transfer has brought
    """

    def __init__(self, program: Program, *, is_stubborn: bool = False) -> None:
        self._program = program
        self._is_stubborn = is_stubborn
        self._kept: CheckpointId | None = None
        self.num_choices = 0
        self.num_failed = 0

    def choose(self, ticket: int) -> SourceChoice:
        self.num_choices += 1
        if self._kept is None:
            return SourceChoice(None, CacheUse())
        facts = self._program.checkpoint(self._kept)
        if self.num_failed and not self._is_stubborn:
            return SourceChoice(None, CacheUse(miss=MissReason.NOT_RESTORED))
        if facts.is_on_device and self._is_stubborn:
            self._program.drop_device(self._kept)
            facts = self._program.checkpoint(self._kept)
        if not facts.is_on_device:
            plan = TransferPlan(TransferKind.RESTORE, self._kept)
            return SourceChoice(None, CacheUse(), plan)
        use = CacheUse(num_tokens=facts.frontier)
        return SourceChoice(Source(self._kept, facts.frontier), use)

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        if self._kept is not None:
            return False
        self._kept = self._program.pause(handle, keeps_state=True).checkpoint
        return True

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        if self._kept is None or self._program.checkpoint(self._kept).is_on_host:
            return None
        return TransferPlan(TransferKind.DEMOTE, self._kept)

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        self.num_failed += not is_ok
        if plan.kind is TransferKind.DEMOTE:
            self._program.drop_device(plan.checkpoint)

    def relieve(self, need: Amounts) -> bool:
        assert self._kept is not None
        facts = self._program.checkpoint(self._kept)
        if not facts.is_on_device or facts.is_leased:
            return False
        self._program.drop_device(self._kept)
        return True

    def flush(self) -> None:
        if self._kept is not None and not self._program.checkpoint(self._kept).is_leased:
            self._program.release(self._kept)
            self._kept = None


class Case:
    """An engine with something on the host that `follow_up` goes on from."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.shelf: Shelf | None = None
        self._is_stubborn = is_stubborn
        self.first: GenerationRequest | None = None

    def make_policy(self, program: Program) -> Shelf:
        self.shelf = Shelf(program, is_stubborn=self._is_stubborn)
        return self.shelf

    async def fill(self, rig: EngineRig) -> None:
        self.first = rig.request(100, max_tokens=3)
        await read(rig.engine.submit(self.first))
        while rig.model_program.occupancy().pages_used:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert rig.model_program.occupancy().host_blocks_used > 0

    def prompt(self, num_more: int = 30) -> PreparedPrompt:
        """102 tokens that were fed, and more."""
        assert self.first is not None
        said = solo_tokens(self.first, 3)
        rest = prompt_of(num_more, seed=99).token_ids.tolist()
        token_ids = [*self.first.prompt.token_ids.tolist(), *said[:2], *rest]
        return PreparedPrompt(np.array(token_ids, dtype=np.int32))

    def follow_up(self, rig: EngineRig, **options: float | None) -> GenerationRequest:
        return rig.request(prompt=self.prompt(), max_tokens=5, **options)  # type: ignore[arg-type]


async def is_moving(rig: EngineRig) -> None:
    for _ in range(100):
        if rig.executor.is_moving:
            return
        await asyncio.sleep(0)
    raise AssertionError("no copy runs")


async def flush(rig: EngineRig) -> None:
    rig.engine.flush_cache()
    await spin()
    assert rig.is_clean()
    assert rig.model_program.occupancy().host_blocks_used == 0


async def test_request_starts_from_what_was_restored_for_it() -> None:
    case = Case()
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        num_calls = len(rig.executor.calls)
        request = case.follow_up(rig)
        transcript = await read(rig.engine.submit(request))
        assert transcript.token_ids == solo_tokens(request, 5)
        first = transcript.events[0]
        assert isinstance(first, Admitted)
        assert first.usage.cached_tokens == transcript.finished.usage.cached_tokens == 102
        chunks = [c.num_tokens for c in rig.executor.calls[num_calls:] if c.kind == "prefill"]
        assert chunks == [26, 4]
        assert rig.engine.metrics.prompt_tokens_total == 100 + 30
        assert rig.engine.metrics.cached_tokens_total == 102
        await flush(rig)


async def test_others_run_while_it_waits() -> None:
    case = Case()
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        moves = rig.executor.move_gate = StepGate()
        request = case.follow_up(rig)
        task = asyncio.create_task(read(rig.engine.submit(request)))
        await is_moving(rig)
        other = rig.request(20, max_tokens=30, cache=CacheRequest(mode=CacheMode.OFF))
        assert (await read(rig.engine.submit(other))).token_ids == solo_tokens(other, 30)
        assert not task.done()
        assert rig.engine.status().running == 1
        moves.open()
        assert (await task).token_ids == solo_tokens(request, 5)
        await flush(rig)


@pytest.mark.parametrize("how", ["cancel", "deadline", "queue timeout"])
async def test_cut_off_while_it_waits(how: str) -> None:
    case = Case()
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        moves = rig.executor.move_gate = StepGate()
        deadline_s = rig.clock.now_s + 5.0 if how == "deadline" else None
        timeout_s = 5.0 if how == "queue timeout" else None
        request = case.follow_up(rig, deadline_s=deadline_s, queue_timeout_s=timeout_s)
        handle = rig.engine.submit(request)
        await is_moving(rig)
        rig.clock.advance(6.0)
        if how == "cancel":
            handle.cancel()
        # An idle worker looks up when something happens.
        other = rig.request(20, max_tokens=3, cache=CacheRequest(mode=CacheMode.OFF))
        assert (await read(rig.engine.submit(other))).finished
        if how != "queue timeout":
            assert rig.engine.status().running == 0
            assert rig.executor.is_moving
        moves.open()
        transcript = await read(handle)
        if how == "cancel":
            assert transcript.finished.finish.reason is FinishReason.CANCELLED
            assert not transcript.was_admitted
        elif how == "deadline":
            assert transcript.error_code == "deadline_exceeded"
        else:
            assert transcript.token_ids == solo_tokens(request, 5)
        await spin()
        await flush(rig)


async def test_two_requests_take_turns_at_the_transfer_slot() -> None:
    case = Case()
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        moves = rig.executor.move_gate = StepGate()
        requests = [case.follow_up(rig) for _ in range(2)]
        tasks = [asyncio.create_task(read(rig.engine.submit(request))) for request in requests]
        await is_moving(rig)
        assert rig.engine.status().running == 2
        moves.open()
        for request, task in zip(requests, tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, 5)
        # The first restore served both.
        assert len(rig.executor.moves) == 2
        await flush(rig)


class Lender(Shelf):
    """Never gives up its copy on the device: pages of it that a row shares would not be free."""

    def relieve(self, need: Amounts) -> bool:
        return False


async def test_page_for_the_copy_of_a_shared_one_is_not_given_to_the_paused() -> None:
    """One page is left beside the source, and a younger request has it when the source is there:
    it is paused for the copy, and must not come back before that is made."""
    policy, wrap = Maker(Lender), Maker(WatchedProgram)
    limits = capacity(lanes=2, max_context=192, num_pages=3, chunk=64, host_blocks=40)
    async with running_engine(limits, make_policy=policy, wrap=wrap) as rig:
        case = Case()
        await case.fill(rig)
        gate, moves = rig.close_gate(), StepGate()
        rig.executor.move_gate = moves
        older = rig.request(prompt=case.prompt(5), max_tokens=5)
        younger = rig.request(5, max_tokens=50, cache=CacheRequest(mode=CacheMode.OFF))
        tasks = [asyncio.create_task(read(rig.engine.submit(r))) for r in (older, younger)]
        num_before = rig.engine.metrics.completion_tokens_total
        await step_until(gate, lambda: rig.engine.metrics.completion_tokens_total >= num_before + 3)
        assert rig.model_program.free().pages == 0
        moves.open()
        await step_until(gate, tasks[0].done)
        gate.open()
        transcripts = await asyncio.gather(*tasks)
        for request, transcript in zip((older, younger), transcripts, strict=True):
            assert transcript.token_ids == solo_tokens(request, request.max_tokens)
        assert transcripts[0].finished.usage.cached_tokens == 102
        assert wrap.made.log[1:] == ["pause r3", "resume r3"]
        await flush(rig)


class NoRoom(FaultyProgram):
    """Nothing can be restored."""

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        if kind is TransferKind.RESTORE:
            return None
        return super().begin_transfer(kind, checkpoint, note)


async def test_without_room_for_its_source_it_starts_from_the_empty_state() -> None:
    case = Case()
    async with running_engine(
        LIMITS,
        make_policy=case.make_policy,
        wrap=lambda program: NoRoom(program, lambda name: None),
    ) as rig:
        await case.fill(rig)
        request = case.follow_up(rig)
        transcript = await read(rig.engine.submit(request))
        assert transcript.token_ids == solo_tokens(request, 5)
        use = transcript.finished.usage.cache
        assert use is not None
        assert (use.num_tokens, use.miss) == (0, MissReason.NOT_RESTORED)
        assert case.shelf is not None
        assert case.shelf.num_failed == 1
        await flush(rig)


async def test_policy_that_always_wants_another_transfer_is_not_asked_for_ever() -> None:
    case = Case(is_stubborn=True)
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        request = case.follow_up(rig)
        transcript = await read(rig.engine.submit(request))
        assert transcript.token_ids == solo_tokens(request, 5)
        use = transcript.finished.usage.cache
        assert use is not None
        assert (use.num_tokens, use.miss) == (0, MissReason.NOT_RESTORED)
        assert case.shelf is not None
        assert len(rig.executor.moves) == 1 + MAX_MOVES
        await flush(rig)


async def test_request_without_cache_neither_reads_nor_leaves_anything() -> None:
    case = Case()
    async with running_engine(LIMITS, make_policy=case.make_policy) as rig:
        await case.fill(rig)
        assert case.shelf is not None
        num_choices = case.shelf.num_choices
        request = rig.request(
            prompt=case.prompt(), max_tokens=5, cache=CacheRequest(mode=CacheMode.OFF)
        )
        transcript = await read(rig.engine.submit(request))
        assert transcript.token_ids == solo_tokens(request, 5)
        use = transcript.finished.usage.cache
        assert use is not None
        assert (use.num_tokens, use.miss) == (0, MissReason.DISABLED)
        assert case.shelf.num_choices == num_choices
        assert rig.model_program.occupancy().num_checkpoints == 1
        await flush(rig)
