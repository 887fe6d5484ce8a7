"""Memory runs out: who gives, who waits, and that nobody's answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from ninfer.contract.cache import CheckpointId, MissReason
from ninfer.contract.generation import Admitted, Finished, FinishReason, GenerationRequest, Progress
from ninfer.contract.program import Amounts, PausedSequence, Program, SequenceHandle, TransferKind
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.engine.context_protocol import SourceChoice, TransferPlan
from ninfer.engine.no_cache import NoCache
from tests.helpers.engine_rig import (
    EngineRig,
    StepGate,
    Transcript,
    capacity,
    read,
    running_engine,
    solo_tokens,
    spin,
    step_until,
)
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.scripted_session import ScriptedSession

HOST_BLOCKS = 64


def tight(*, lanes: int = 3, num_pages: int = 4, host_blocks: int = 0) -> Capacity:
    """One context of four pages fits, and nothing beside it."""
    return capacity(
        lanes=lanes, max_context=256, num_pages=num_pages, chunk=64, host_blocks=host_blocks
    )


async def read_all(rig: EngineRig, requests: list[GenerationRequest]) -> list[Transcript]:
    return await asyncio.gather(*(read(rig.engine.submit(request)) for request in requests))


def assert_solo(requests: list[GenerationRequest], transcripts: list[Transcript]) -> None:
    for request, transcript in zip(requests, transcripts, strict=True):
        num_tokens = transcript.finished.usage.completion_tokens
        assert transcript.token_ids == solo_tokens(request, num_tokens)
        assert sum(isinstance(event, Admitted) for event in transcript.events) == 1


class TestOvercommit:
    @pytest.mark.no_cover
    @pytest.mark.parametrize("host_blocks", [0, 15, 200])
    @pytest.mark.parametrize("lanes", [2, 8])
    async def test_eight_contexts_of_three_times_the_pool_end_as_alone(
        self, lanes: int, host_blocks: int
    ) -> None:
        limits = capacity(
            lanes=lanes, max_context=512, num_pages=21, chunk=64, host_blocks=host_blocks
        )
        async with running_engine(limits) as rig:
            requests = [rig.request(20 + 17 * i, max_tokens=500 - 17 * i) for i in range(8)]
            total = sum(rig.model_program.pages_needed(512) for _ in requests)
            assert total > 3 * limits.num_pages
            transcripts = await read_all(rig, requests)
            assert_solo(requests, transcripts)
            metrics = rig.engine.metrics
            assert all(t.finished.finish.reason is not FinishReason.CANCELLED for t in transcripts)
            if lanes > 2:
                assert metrics.num_pauses > 0
                assert metrics.num_pauses == metrics.num_resumes
            if host_blocks == 0:
                assert metrics.num_replays == metrics.num_resumes
            if host_blocks == 200:
                assert metrics.num_replays == 0
            assert rig.is_clean()

    async def test_sampled_rows_with_penalties_survive_pauses(self) -> None:
        async with running_engine(tight(lanes=4)) as rig:
            requests = [
                rig.request(
                    30,
                    max_tokens=200,
                    sampling=SamplingParams(temperature=1.0, seed=i, presence_penalty=1.0),
                )
                for i in range(4)
            ]
            assert_solo(requests, await read_all(rig, requests))
            assert rig.engine.metrics.num_replays > 0


class TestOrder:
    async def test_youngest_resident_goes_first(self) -> None:
        paused: list[str] = []
        limits = tight(lanes=3, num_pages=6)
        async with running_engine(limits, wrap=lambda p: PauseLog(p, paused)) as rig:
            requests = [rig.request(30, max_tokens=200) for _ in range(3)]
            assert_solo(requests, await read_all(rig, requests))
            assert paused[:2] == ["r3", "r2"]
            assert "r1" not in paused

    async def test_nobody_is_paused_for_a_younger_row(self) -> None:
        """The younger row needs the last page first, and waits until it is paused itself."""
        paused: list[str] = []
        limits = tight(lanes=2, num_pages=4)
        async with running_engine(limits, wrap=lambda p: PauseLog(p, paused)) as rig:
            requests = [rig.request(10, max_tokens=240), rig.request(60, max_tokens=190)]
            assert_solo(requests, await read_all(rig, requests))
            assert set(paused) == {"r2"}

    async def test_snapshot_goes_to_the_host_and_comes_back(self) -> None:
        async with running_engine(tight(lanes=2, host_blocks=HOST_BLOCKS)) as rig:
            requests = [rig.request(30, max_tokens=200) for _ in range(2)]
            assert_solo(requests, await read_all(rig, requests))
            metrics = rig.engine.metrics
            assert (metrics.num_pauses, metrics.num_resumes) == (1, 1)
            assert (metrics.num_replays, metrics.replayed_tokens_total) == (0, 0)
            assert metrics.prompt_tokens_total == 60
            kinds = [len(move.pages) > 0 for move in rig.executor.moves]
            assert kinds == [True, True]
            assert rig.is_clean()

    async def test_snapshot_that_finds_no_room_on_the_host_becomes_replay(self) -> None:
        async with running_engine(tight(lanes=2, host_blocks=2)) as rig:
            requests = [rig.request(30, max_tokens=200) for _ in range(2)]
            assert_solo(requests, await read_all(rig, requests))
            metrics = rig.engine.metrics
            assert (metrics.num_snapshots_lost, metrics.num_replays) == (1, 1)
            assert metrics.replayed_tokens_total > 0
            assert metrics.prompt_tokens_total == 60
            assert rig.executor.moves == []

    async def test_optional_checkpoints_go_before_anybody_is_paused(self) -> None:
        hoards: list[Hoard] = []

        def make_policy(program: Program) -> Hoard:
            hoards.append(Hoard(program))
            return hoards[0]

        limits = capacity(lanes=2, max_context=256, num_pages=8, chunk=64, cache_slots=8)
        async with running_engine(limits, make_policy=make_policy) as rig:
            for _ in range(4):
                request = rig.request(100, max_tokens=2)
                assert_solo([request], await read_all(rig, [request]))
            assert rig.model_program.occupancy().pages_used == 8
            requests = [rig.request(100, max_tokens=156) for _ in range(2)]
            assert_solo(requests, await read_all(rig, requests))
            assert rig.engine.metrics.num_pauses == 0
            assert hoards[0].num_released >= 4


class PauseLog(FaultyProgram):
    """Notes who is paused."""

    def __init__(self, program: Program, paused: list[str]) -> None:
        super().__init__(program, lambda name: None)
        self._paused = paused

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        result = super().pause(handle, keeps_state=keeps_state)
        self._paused.append(result.spec.request_id)
        return result


class Hoard(NoCache):
    """Keeps every finished sequence and never uses one."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kept: list[CheckpointId] = []
        self.num_released = 0
        self.num_chosen = 0

    def choose(self, ticket: int) -> SourceChoice:
        self.num_chosen += 1
        return super().choose(ticket)

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        checkpoint = self._program.pause(handle, keeps_state=True).checkpoint
        assert checkpoint is not None
        self._kept.append(checkpoint)
        return True

    def relieve(self, need: Amounts) -> bool:
        if not self._kept:
            return False
        self._program.release(self._kept.pop(0))
        self.num_released += 1
        return True

    def reclaimable(self) -> Amounts:
        return self._program.reclaimable(self._kept)

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        facts = [(c, self._program.checkpoint(c)) for c in self._kept]
        movable = [c for c, fact in facts if fact.is_on_device and not fact.is_on_host]
        return TransferPlan(TransferKind.DEMOTE, movable[0]) if movable and is_idle else None


class Moody(Hoard):
    """Gives nothing at every first question."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.num_questions = 0

    def relieve(self, need: Amounts) -> bool:
        self.num_questions += 1
        return self.num_questions % 2 == 0 and super().relieve(need)


async def test_lone_row_asks_again_before_it_is_given_up() -> None:
    limits = capacity(lanes=1, max_context=256, num_pages=4, chunk=64, cache_slots=8)
    async with running_engine(limits, make_policy=Moody) as rig:
        for _ in range(2):
            assert (await read(rig.engine.submit(rig.request(60, max_tokens=2)))).finished
        request = rig.request(100, max_tokens=150)
        assert_solo([request], await read_all(rig, [request]))


class TestAdmissionScans:
    async def test_run_on_events_and_not_on_every_step(self) -> None:
        hoards: list[Hoard] = []

        def make_policy(program: Program) -> Hoard:
            hoards.append(Hoard(program))
            return hoards[0]

        async with running_engine(tight(lanes=2), make_policy=make_policy) as rig:
            gate = rig.close_gate()
            running = asyncio.create_task(read(rig.engine.submit(rig.request(150, max_tokens=100))))
            await step_until(gate, lambda: rig.engine.metrics.completion_tokens_total > 2)
            waiting = asyncio.create_task(read(rig.engine.submit(rig.request(150, max_tokens=2))))
            await step_until(gate, lambda: rig.engine.metrics.completion_tokens_total > 5)
            num_chosen = hoards[0].num_chosen
            await step_until(gate, lambda: rig.engine.metrics.completion_tokens_total > 60)
            assert hoards[0].num_chosen == num_chosen
            gate.open()
            assert (await running).finished
            assert (await waiting).finished
            assert hoards[0].num_chosen > num_chosen


async def paused_request(
    rig: EngineRig, gate: StepGate, **options: float
) -> tuple[
    asyncio.Task[Transcript], asyncio.Task[Transcript], Callable[[], None], GenerationRequest
]:
    """An older request runs; a younger one that had some output is paused."""
    older = asyncio.create_task(read(rig.engine.submit(rig.request(30, max_tokens=220))))
    request = rig.request(
        30,
        max_tokens=220,
        session=ScriptedSession(hold_back=1),
        deadline_s=None if not options else rig.clock.now_s + options["deadline_s"],
    )
    handle = rig.engine.submit(request)
    younger = asyncio.create_task(read(handle))
    await step_until(gate, lambda: rig.engine.metrics.num_pauses == 1)
    return older, younger, handle.cancel, request


class TestCutOff:
    """Cancels and deadlines reach a request in the states that only pressure brings."""

    @pytest.mark.parametrize("host_blocks", [0, HOST_BLOCKS])
    @pytest.mark.parametrize("how", ["cancel", "deadline"])
    async def test_while_paused(self, how: str, host_blocks: int) -> None:
        async with running_engine(tight(lanes=2, host_blocks=host_blocks)) as rig:
            gate = rig.close_gate()
            options = {"deadline_s": 5.0} if how == "deadline" else {}
            older, younger, cancel, request = await paused_request(rig, gate, **options)
            if how == "cancel":
                cancel()
            else:
                rig.clock.advance(6.0)
            gate.step(2)
            transcript = await younger
            self._check(transcript, request, how)
            assert len(transcript.token_ids) > 60
            gate.open()
            assert (await older).finished
            assert rig.is_clean()

    @pytest.mark.parametrize("moment", ["demotion", "restore"])
    @pytest.mark.parametrize("how", ["cancel", "deadline"])
    async def test_while_its_snapshot_moves(self, how: str, moment: str) -> None:
        async with running_engine(tight(lanes=2, host_blocks=HOST_BLOCKS)) as rig:
            gate, moves = rig.close_gate(), StepGate()
            rig.executor.move_gate = moves
            options = {"deadline_s": 5.0} if how == "deadline" else {}
            older, younger, cancel, request = await paused_request(rig, gate, **options)
            if moment == "restore":
                moves.step()
                await step_until(gate, lambda: len(rig.executor.moves) == 2)
                assert older.done()
            assert rig.executor.is_moving
            if how == "cancel":
                cancel()
            else:
                rig.clock.advance(6.0)
            gate.step(2)
            moves.open()
            transcript = await younger
            self._check(transcript, request, how)
            gate.open()
            assert (await older).finished
            await spin()
            assert rig.is_clean()
            assert rig.model_program.occupancy().host_blocks_used == 0

    @pytest.mark.parametrize("how", ["cancel", "deadline"])
    async def test_while_it_replays(self, how: str) -> None:
        async with running_engine(tight(lanes=2)) as rig:
            gate = rig.close_gate()
            options = {"deadline_s": 5.0} if how == "deadline" else {}
            older, younger, cancel, request = await paused_request(rig, gate, **options)
            await step_until(gate, lambda: rig.engine.metrics.replayed_tokens_total > 33)
            assert (await older).finished
            num_before = rig.engine.metrics.completion_tokens_total
            if how == "cancel":
                cancel()
            else:
                rig.clock.advance(6.0)
            gate.step(2)
            transcript = await younger
            self._check(transcript, request, how)
            assert rig.engine.metrics.completion_tokens_total == num_before
            assert rig.is_clean()

    def _check(self, transcript: Transcript, request: GenerationRequest, how: str) -> None:
        if how == "cancel":
            assert transcript.finished.finish.reason is FinishReason.CANCELLED
        else:
            assert transcript.error_code == "deadline_exceeded"
        tokens = transcript.token_ids
        assert tokens == solo_tokens(request, len(tokens))
        assert len(tokens) == transcript.terminal.usage.completion_tokens

    async def test_queue_timeout_does_not_touch_the_paused(self) -> None:
        async with running_engine(tight(lanes=2), queue_timeout_s=10.0) as rig:
            gate = rig.close_gate()
            older, younger, _, request = await paused_request(rig, gate)
            rig.clock.advance(100.0)
            gate.open()
            assert (await older).finished
            assert_solo([request], [await younger])

    async def test_paused_request_keeps_its_outstanding_place(self) -> None:
        async with running_engine(tight(lanes=2)) as rig:
            gate = rig.close_gate()
            older, younger, _, _ = await paused_request(rig, gate)
            status = rig.engine.status()
            assert (status.running, status.waiting, status.outstanding) == (1, 1, 2)
            gate.open()
            await asyncio.gather(older, younger)
            assert rig.engine.status().outstanding == 0


class TestShutdown:
    @pytest.mark.parametrize("host_blocks", [0, HOST_BLOCKS])
    async def test_closing_ends_the_paused_too(self, host_blocks: int) -> None:
        async with running_engine(tight(lanes=2, host_blocks=host_blocks)) as rig:
            gate = rig.close_gate()
            older, younger, _, _ = await paused_request(rig, gate)
            closing = asyncio.create_task(rig.engine.aclose())
            await spin()
            gate.open()
            await closing
            codes = [(await older).error_code, (await younger).error_code]
            assert codes == ["engine_unavailable"] * 2
            assert rig.is_clean()


class TestDecodeGap:
    async def test_chunks_beside_a_stream_fit_the_gap(self) -> None:
        limits = capacity(lanes=2, max_context=4096, chunk=1024)
        async with running_engine(limits, max_decode_gap_s=0.3) as rig:
            gate = TickingGate(rig)
            rig.executor.gate = gate
            stream = asyncio.create_task(read(rig.engine.submit(rig.request(5, max_tokens=60))))
            await spin()
            gate.is_ticking = True
            long = rig.request(3000, max_tokens=3)
            assert_solo([long], [await read(rig.engine.submit(long))])
            assert (await stream).finished
            chunks = [c.num_tokens for c in rig.executor.calls if c.kind == "prefill"][1:]
            assert sum(chunks) == 3000
            assert chunks[0] == 128
            assert max(chunks) == 256
            assert all(chunk % 128 == 0 for chunk in chunks[:-1])

    async def test_long_prompt_alone_takes_whole_chunks(self) -> None:
        limits = capacity(lanes=2, max_context=4096, chunk=1024)
        async with running_engine(limits, max_decode_gap_s=0.3) as rig:
            gate = TickingGate(rig)
            gate.is_ticking = True
            rig.executor.gate = gate
            assert (await read(rig.engine.submit(rig.request(3000, max_tokens=3)))).finished
            chunks = [call.num_tokens for call in rig.executor.calls if call.kind == "prefill"]
            assert chunks == [1024, 1024, 952]


class TickingGate(StepGate):
    """Every prefill call takes a millisecond a token of the manual clock."""

    def __init__(self, rig: EngineRig) -> None:
        super().__init__()
        self._rig = rig
        self.is_ticking = False
        self.open()

    async def wait(self) -> Literal[True]:
        call = self._rig.executor.calls[-1]
        if self.is_ticking and call.kind == "prefill":
            self._rig.clock.advance(call.num_tokens / 1000)
        return await super().wait()


async def test_engine_without_a_cache_says_so() -> None:
    async with running_engine() as rig:
        transcript = await read(rig.engine.submit(rig.request()))
        use = transcript.finished.usage.cache
        assert use is not None
        assert (use.num_tokens, use.miss) == (0, MissReason.DISABLED)
        assert any(isinstance(event, Progress | Finished) for event in transcript.events)
