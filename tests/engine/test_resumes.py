"""How paused requests come back: whose turn it is, from where, and when their Snapshot cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ninfer.contract.cache import CacheUse, CheckpointId
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.program import (
    Program,
    SequenceHandle,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.contract.units import Capacity
from ninfer.engine.context_protocol import SourceChoice, TransferPlan
from ninfer.engine.no_cache import NoCache
from tests.helpers.engine_rig import (
    EngineRig,
    Maker,
    StepGate,
    Transcript,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
    spin,
    step_until,
)
from tests.helpers.watched_program import WatchedProgram


class Watched(WatchedProgram):
    """`refuses` says which restores find no room."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.refuses: Callable[[], bool] = lambda: False

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        if kind is TransferKind.RESTORE and self.refuses():
            self.log.append("refused")
            return None
        return super().begin_transfer(kind, checkpoint, note)


def limits(*, lanes: int, num_pages: int, host_blocks: int = 64) -> Capacity:
    return capacity(
        lanes=lanes, max_context=256, num_pages=num_pages, chunk=64, host_blocks=host_blocks
    )


def ask(rig: EngineRig, request: GenerationRequest) -> asyncio.Task[Transcript]:
    return asyncio.create_task(read(rig.engine.submit(request)))


async def test_oldest_paused_gets_the_lane_of_the_youngest_when_all_are_younger() -> None:
    wrap = Maker(Watched)
    async with running_engine(limits(lanes=2, num_pages=6), wrap=wrap) as rig:
        gate, moves = rig.close_gate(), StepGate()
        rig.executor.move_gate = moves
        first = rig.engine.submit(rig.request(30, max_tokens=220))
        first_task = asyncio.create_task(read(first))
        second = rig.request(30, max_tokens=220)
        second_task = ask(rig, second)
        await step_until(gate, lambda: wrap.made.log == ["pause r2"])
        # The first goes while the second's Snapshot still moves, and two others take the lanes.
        first.cancel()
        others = [rig.request(5, max_tokens=50) for _ in range(2)]
        other_tasks = [ask(rig, request) for request in others]
        await step_until(gate, lambda: rig.engine.status().running == 2)
        assert (await first_task).finished.finish.reason is FinishReason.CANCELLED
        moves.open()
        await step_until(gate, lambda: len(wrap.made.log) > 1)
        gate.open()
        for request, task in zip((second, *others), (second_task, *other_tasks), strict=True):
            assert (await task).token_ids == solo_tokens(request, request.max_tokens)
        assert wrap.made.log[:3] == ["pause r2", "pause r4", "resume r2"]
        await spin()
        assert rig.is_clean()


async def test_while_a_snapshot_moves_nobody_else_is_paused() -> None:
    wrap = Maker(Watched)
    async with running_engine(limits(lanes=3, num_pages=6), wrap=wrap) as rig:
        gate, moves = rig.close_gate(), StepGate()
        rig.executor.move_gate = moves
        requests = [rig.request(30, max_tokens=150) for _ in range(3)]
        tasks = [ask(rig, request) for request in requests]
        await step_until(gate, lambda: wrap.made.log == ["pause r3"])
        for _ in range(20):
            gate.step()
            await spin(12)
        assert wrap.made.log == ["pause r3"]
        moves.open()
        gate.open()
        for request, task in zip(requests, tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, 150)
        assert rig.is_clean()


async def test_restore_that_finds_no_room_is_tried_again() -> None:
    wrap = Maker(Watched)
    async with running_engine(limits(lanes=2, num_pages=4), wrap=wrap) as rig:
        refusals = iter([True, True])
        requests = [rig.request(30, max_tokens=200) for _ in range(2)]
        tasks = [ask(rig, request) for request in requests]
        await spin()
        wrap.made.refuses = lambda: next(refusals, False)
        for request, task in zip(requests, tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, 200)
        assert "refused" in wrap.made.log
        assert rig.is_clean()


async def test_snapshot_that_can_never_come_back_is_replayed() -> None:
    wrap = Maker(Watched)
    async with running_engine(limits(lanes=2, num_pages=4), wrap=wrap) as rig:
        requests = [rig.request(30, max_tokens=200) for _ in range(2)]
        tasks = [ask(rig, request) for request in requests]
        await spin()
        wrap.made.refuses = lambda: True
        for request, task in zip(requests, tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, 200)
        assert rig.engine.metrics.num_snapshots_lost == 1
        assert rig.engine.metrics.num_replays == 1
        assert rig.is_clean()


class Shared(NoCache):
    """Keeps the prompt of the first request at 128 tokens and offers it to everybody after."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kept: CheckpointId | None = None
        self.is_offering = False

    def stops(self, ticket: int) -> tuple[int, ...]:
        return (128,) if ticket == 0 else ()

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        self._kept = self._program.capture(handle)

    def choose(self, ticket: int) -> SourceChoice:
        if self._kept is None or not self.is_offering:
            return SourceChoice(None, CacheUse())
        return SourceChoice(Source(self._kept, 128), CacheUse(num_tokens=128))

    def flush(self) -> None:
        if self._kept is not None:
            self._program.release(self._kept)
            self._kept = None


async def pause_at(frontier: int, num_tokens_before: int) -> list[int]:
    """Pause a request that replays at `frontier` or after so much output; what it resumed from."""
    wrap = Maker(Watched)
    make_policy = Maker(Shared)
    sizes = capacity(lanes=2, num_pages=16, chunk=64, cache_slots=4)
    async with running_engine(sizes, wrap=wrap, make_policy=make_policy) as rig:
        prompt = prompt_of(200, seed=5)
        first = rig.request(prompt=prompt, max_tokens=1)
        assert (await read(rig.engine.submit(first))).finished
        gate = rig.close_gate()
        older = rig.request(5, max_tokens=30)
        older_task = ask(rig, older)
        await step_until(gate, lambda: rig.engine.metrics.completion_tokens_total >= 3)
        request = rig.request(prompt=prompt, max_tokens=20)
        task = ask(rig, request)
        metrics = rig.engine.metrics
        num_before = metrics.prompt_tokens_total
        await step_until(gate, lambda: rig.engine.status().running == 2)
        await step_until(gate, lambda: metrics.prompt_tokens_total >= num_before + frontier)
        num_before = metrics.completion_tokens_total
        if num_tokens_before:
            await step_until(
                gate,
                lambda: metrics.completion_tokens_total >= num_before + 2 * num_tokens_before,
            )
        make_policy.made.is_offering = True
        wrap.made.denies = lambda handle: handle.lane == 0 and metrics.num_pauses == 0
        await step_until(gate, lambda: metrics.num_pauses == 1)
        gate.open()
        assert (await task).token_ids == solo_tokens(request, 20)
        assert (await older_task).token_ids == solo_tokens(older, 30)
        rig.engine.flush_cache()
        await spin()
        assert rig.is_clean()
    return wrap.made.sources


async def test_replay_starts_from_what_the_cache_has_of_its_history() -> None:
    assert await pause_at(200, num_tokens_before=3) == [128]


async def test_replay_starts_from_nothing_beyond_where_it_was_paused() -> None:
    assert await pause_at(0, num_tokens_before=0) == [0]


class Mover(NoCache):
    """Keeps what the first request leaves, and moves it to the host when it is told to."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kept: CheckpointId | None = None
        self.wants_move = False

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        if self._kept is not None:
            return False
        self._kept = self._program.pause(handle, keeps_state=True).checkpoint
        return True

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        if not self.wants_move or self._kept is None:
            return None
        self.wants_move = False
        return TransferPlan(TransferKind.DEMOTE, self._kept)

    def flush(self) -> None:
        if self._kept is not None:
            self._program.release(self._kept)
            self._kept = None


async def test_last_one_that_gave_its_lane_back_gets_it_again() -> None:
    """Its restore waited for the transfer slot, found no room, and nobody else is left."""
    wrap = Maker(Watched)
    make_policy = Maker(Mover)
    sizes = capacity(lanes=2, num_pages=16, chunk=64, cache_slots=4, host_blocks=64)
    async with running_engine(sizes, wrap=wrap, make_policy=make_policy) as rig:
        assert (await read(rig.engine.submit(rig.request(40, max_tokens=2)))).finished
        gate, moves = rig.close_gate(), StepGate()
        rig.executor.move_gate = moves
        first = rig.engine.submit(rig.request(10, max_tokens=240))
        first_task = asyncio.create_task(read(first))
        second = rig.request(10, max_tokens=60)
        second_task = ask(rig, second)
        metrics = rig.engine.metrics
        await step_until(gate, lambda: metrics.completion_tokens_total > 8)
        wrap.made.denies = lambda handle: handle.lane == 0 and not rig.executor.moves
        await step_until(gate, lambda: rig.executor.is_moving)
        # The Snapshot is on the host now; its way back is refused, then the slot is taken.
        refusals = iter([True, True])
        wrap.made.refuses = lambda: next(refusals, False)
        make_policy.made.wants_move = True
        moves.step()
        await step_until(gate, lambda: wrap.made.log[-1] == "refused")
        await step_until(gate, lambda: rig.executor.is_moving)
        newcomer = rig.engine.submit(rig.request(5, max_tokens=2))
        await step_until(gate, lambda: rig.engine.status().running == 2)
        newcomer.cancel()
        first.cancel()
        gate.step(2)
        assert (await read(newcomer)).finished
        assert (await first_task).finished.finish.reason is FinishReason.CANCELLED
        moves.open()
        gate.open()
        assert (await second_task).token_ids == solo_tokens(second, 60)
        assert wrap.made.log[1:] == ["pause r3", "refused", "refused", "resume r3"]
        rig.engine.flush_cache()
        await spin()
        assert rig.is_clean()


async def test_what_was_fed_before_a_pause_is_fed_again_many_tokens_at_once() -> None:
    wrap = Maker(Watched)
    async with running_engine(limits(lanes=2, num_pages=4, host_blocks=0), wrap=wrap) as rig:
        requests = [rig.request(30, max_tokens=150) for _ in range(2)]
        tasks = [ask(rig, request) for request in requests]
        for request, task in zip(requests, tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, 150)
        metrics = rig.engine.metrics
        assert metrics.num_replays == 1
        num_outputs = metrics.replayed_tokens_total - 30
        assert num_outputs > 32
        assert wrap.made.num_forced_units == -(-num_outputs // 16)
        assert rig.is_clean()
