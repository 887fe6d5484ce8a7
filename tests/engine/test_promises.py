"""Promises between the worker's parts that no client sees at once: the end of a protection, whose
Snapshot is given up, that the context cache hears of every end, what is stored at the end."""

from __future__ import annotations

from collections.abc import Mapping

from ninfer.contract.cache import CheckpointId
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import (
    Program,
    SequenceHandle,
    Transfer,
    TransferKind,
)
from ninfer.engine.context_protocol import TransferPlan
from ninfer.engine.no_cache import NoCache
from tests.helpers.engine_rig import (
    EngineRig,
    capacity,
    read,
    running_engine,
    spin,
)
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.memory_disk import MemoryDisk


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
    policies: list[Listener] = []

    def make_policy(program: Program) -> Listener:
        policies.append(Listener(program))
        return policies[0]

    async with running_engine(capacity(lanes=1), make_policy=make_policy) as rig:
        gate = rig.close_gate()
        running = rig.engine.submit(rig.request(20, max_tokens=200))
        waiting = rig.engine.submit(rig.request(20, max_tokens=5))
        late = rig.engine.submit(rig.request(20, max_tokens=5, queue_timeout_s=0.5))
        last = rig.engine.submit(rig.request(20, max_tokens=5))
        await spin()
        assert policies[0].there == {0, 1, 2, 3}
        waiting.cancel()
        rig.clock.advance(1.0)
        gate.step()
        await spin()
        assert policies[0].there == {0, 3}
        running.cancel()
        gate.open()
        for handle in (running, waiting, late, last):
            await read(handle)
        assert policies[0].there == set()
        assert policies[0].arrived == [0, 1, 2, 3]


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
    policies: list[Stocks] = []

    def make_policy(program: Program) -> Stocks:
        policies.append(Stocks(program))
        return policies[0]

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
    policy = policies[0]
    assert len(policy.kept) == 3
    policy.is_storing = True
    await rig.engine.aclose()
    assert policy.refused == {policy.kept[1]}
    assert policy.stored == [policy.kept[0], policy.kept[2]]
    assert rig.model_program.occupancy().disk_bytes_used == 2
