"""Promises between the worker's parts that no client sees at once: the end of a protection, whose
Snapshot is given up, that the context cache hears of every end, what is stored at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ninfer.contract.cache import CheckpointId
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.program import (
    PausedSequence,
    Program,
    SequenceHandle,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.engine.context_protocol import TransferPlan
from ninfer.engine.no_cache import NoCache
from tests.helpers.engine_rig import (
    EngineRig,
    Maker,
    capacity,
    read,
    running_engine,
    solo_tokens,
    spin,
    step_until,
)
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.memory_disk import MemoryDisk
from tests.helpers.watched_program import WatchedProgram


class Listener(NoCache):
    """Counts whom it was told of."""

    def __init__(self, program: Program) -> None:
        self.there: set[int] = set()
        self.arrived: list[int] = []

    def arrive(self, ticket: int, request: GenerationRequest) -> None:
        self.there.add(ticket)
        self.arrived.append(ticket)

    def left(self, ticket: int) -> None:
        self.there.remove(ticket)


async def test_policy_hears_once_of_every_end() -> None:
    """Of one that waits, one that runs, one that ends and one that fails."""
    make_policy = Maker(Listener)
    async with running_engine(capacity(lanes=1), make_policy=make_policy) as rig:
        gate = rig.close_gate()
        running = rig.engine.submit(rig.request(20, max_tokens=200))
        waiting = rig.engine.submit(rig.request(20, max_tokens=5))
        late = rig.engine.submit(rig.request(20, max_tokens=5, queue_timeout_s=0.5))
        last = rig.engine.submit(rig.request(20, max_tokens=5))
        await spin()
        assert make_policy.made.there == {0, 1, 2, 3}
        waiting.cancel()
        rig.clock.advance(1.0)
        gate.step()
        await spin()
        assert make_policy.made.there == {0, 3}
        running.cancel()
        gate.open()
        for handle in (running, waiting, late, last):
            await read(handle)
        assert make_policy.made.there == set()
        assert make_policy.made.arrived == [0, 1, 2, 3]


class Stocks(NoCache):
    """Keeps what every request leaves, and stores all of it once the engine is to stop."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.kept: list[CheckpointId] = []
        self.refused: set[CheckpointId] = set()
        self.stored: list[CheckpointId] = []
        self.is_storing = False

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        checkpoint = self._program.pause(handle, keeps_state=True).checkpoint
        assert checkpoint is not None
        self.kept.append(checkpoint)
        return True

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        if not (self.is_storing and is_idle):
            return None
        for checkpoint in self.kept:
            if (
                checkpoint not in self.refused
                and not self._program.checkpoint(checkpoint).is_on_disk
            ):
                return TransferPlan(TransferKind.STORE, checkpoint, {})
        return None

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        if is_ok:
            self.stored.append(plan.checkpoint)
        else:
            self.refused.add(plan.checkpoint)

    def left(self, ticket: int) -> None:
        return None


class Narrow(FaultyProgram):
    """Finds no room for the second store."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, lambda name: None)
        self._num_asked = 0

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        self._num_asked += 1
        if self._num_asked == 2:
            return None
        return super().begin_transfer(kind, checkpoint, note)


async def test_one_file_that_does_not_fit_keeps_no_other_from_being_stored_at_the_end() -> None:
    make_policy = Maker(Stocks)
    limits = capacity(lanes=2, num_pages=16, cache_slots=6, host_blocks=64)
    rig = EngineRig(
        limits,
        wrap=Narrow,
        make_policy=make_policy,
        disk=MemoryDisk(0, max_files=10, failures=0.0),
    )
    await rig.engine.start()
    for _ in range(3):
        assert (await read(rig.engine.submit(rig.request(70, max_tokens=3)))).finished
    policy = make_policy.made
    assert len(policy.kept) == 3
    policy.is_storing = True
    await rig.engine.aclose()
    assert policy.refused == {policy.kept[1]}
    assert policy.stored == [policy.kept[0], policy.kept[2]]
    assert rig.model_program.occupancy().disk_bytes_used == 2


class Stops(NoCache):
    """Wants checkpoints of the second request and notes where it could have had them."""

    def __init__(self, program: Program) -> None:
        self.reached_at: list[int] = []

    def stops(self, ticket: int) -> tuple[int, ...]:
        return (64, 256) if ticket == 1 else ()

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        self.reached_at.append(frontier)


async def test_protection_ends_with_the_first_progress() -> None:
    """Nothing is captured while it lasts; a place that is reached behind it counts again."""
    make_policy = Maker(Stops)
    wrap = Maker(lambda program: FaultyProgram(program, lambda name: None))
    limits = capacity(lanes=2, max_context=512, num_pages=16, chunk=64)
    async with running_engine(limits, wrap=wrap, make_policy=make_policy) as rig:
        gate, metrics = rig.close_gate(), rig.engine.metrics
        older = rig.engine.submit(rig.request(5, max_tokens=200))
        second = rig.request(300, max_tokens=3)
        task = asyncio.create_task(read(rig.engine.submit(second)))
        await step_until(gate, lambda: make_policy.made.reached_at == [64])
        wrap.made.denies = lambda handle: handle.lane == 0 and metrics.num_pauses == 0
        await step_until(gate, lambda: metrics.num_pauses == 1)
        older.cancel()
        gate.open()
        await read(older)
        assert (await task).token_ids == solo_tokens(second, 3)
        assert metrics.num_replays + metrics.num_resumes >= 1
        assert make_policy.made.reached_at == [64, 256]
        await spin()
        assert rig.is_clean()


class Cornered(WatchedProgram):
    """Lets "r3" be paused for "r1", which is cancelled then; once "r3" is back it is refused memory
    until a Snapshot has been given up for it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.cancel_first: Callable[[], None] = lambda: None
        self.is_ready = False
        self.is_enough: Callable[[], bool] = lambda: True
        self._back: SequenceHandle | None = None
        self.denies = self._is_denied

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        paused = super().pause(handle, keeps_state=keeps_state)
        if len(self.log) == 1:
            self.cancel_first()
        return paused

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        handle = super().resume(paused, source)
        if self._back is None:
            self._back = handle
        return handle

    def _is_denied(self, handle: SequenceHandle) -> bool:
        if not self.log:
            return self.is_ready and handle.lane == 0
        return handle == self._back and not self.is_enough()


async def test_snapshot_of_an_older_one_is_given_up_for_the_protected_row() -> None:
    """The second came first but was overtaken; it has run only since the third is protected."""
    wrap = Maker(Cornered)
    limits = capacity(lanes=2, max_context=512, num_pages=8, chunk=64, host_blocks=1)
    async with running_engine(limits, wrap=wrap) as rig:
        gate, metrics, program = rig.close_gate(), rig.engine.metrics, wrap.made
        first = rig.engine.submit(rig.request(200, max_tokens=100))
        second, third = rig.request(200, max_tokens=5), rig.request(30, max_tokens=20)
        tasks = [asyncio.create_task(read(rig.engine.submit(r))) for r in (second, third)]
        program.cancel_first = first.cancel
        program.is_enough = lambda: metrics.num_snapshots_lost == 1
        await step_until(gate, lambda: metrics.completion_tokens_total >= 6)
        program.is_ready = True
        await step_until(gate, lambda: bool(program.log))
        gate.open()
        assert (await read(first)).finished.finish.reason is FinishReason.CANCELLED
        for request, task in zip((second, third), tasks, strict=True):
            assert (await task).token_ids == solo_tokens(request, request.max_tokens)
        assert program.log == ["pause r3", "resume r3", "pause r2", "resume r2"]
        await spin()
        assert rig.is_clean()
