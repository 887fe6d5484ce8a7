"""Random lives of sequences and checkpoints: capture, fork, move, pause, resume, moves between all
tiers, lost files, failed copies. Counts hold after every step, tokens equal the pure function, and
at the end nothing is left."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import DeviceError
from ninfer.contract.program import (
    Amounts,
    PausedSequence,
    PendingBatch,
    SequenceHandle,
    SequenceSpec,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskLayout, DiskStore
from tests.helpers.fake_executor import (
    PAGE_BYTES,
    STATE_BLOCKS,
    FakeExecutor,
    Fault,
    expected_tokens,
)
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import tokens_of

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

VOCAB_SIZE = 11
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=330,
    num_pages=14,
    num_slots=8,
    prefill_chunk=90,
    num_host_blocks=16,
)
SAMPLINGS = st.sampled_from((SamplingParams(), SamplingParams(presence_penalty=1, seed=4)))
ENDINGS = st.sampled_from(("commit",) * 6 + ("abort", "device_error", "refuse"))


@dataclass(eq=False)
class Sequence:
    """A request as seen from outside; `handle` or `paused`."""

    spec: SequenceSpec
    handle: SequenceHandle
    frontier: int
    accepted: list[int] = field(default_factory=list)
    paused: PausedSequence | None = None
    has_ended: bool = False
    num_checked: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.spec.prompt.token_ids.tolist(), *self.accepted)

    @property
    def fed(self) -> tuple[int, ...]:
        return self.tokens[: self.frontier]

    @property
    def num_prompt_left(self) -> int:
        return max(0, self.spec.prompt.num_tokens - self.frontier)

    @property
    def is_decoding(self) -> bool:
        return self.num_prompt_left == 0 and bool(self.accepted) and not self.has_ended

    @property
    def num_replay_left(self) -> int:
        return max(0, len(self.tokens) - 1 - self.frontier) if self.accepted else 0


class CheckpointMachine(RuleBasedStateMachine):
    has_states = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.executor = FakeExecutor(VOCAB_SIZE, CAPACITY, has_states=self.has_states)
        num_state_blocks = STATE_BLOCKS if self.has_states else 0
        self.layout = DiskLayout("fake", PAGE_BYTES, num_state_blocks)
        self.file_bytes = 4096 + (6 + num_state_blocks) * PAGE_BYTES
        self.program = self.build()
        self.residents: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.checkpoints: dict[CheckpointId, tuple[int, ...]] = {}
        self.transfer: Transfer | None = None
        self.rng = np.random.default_rng(0)
        self.num_opened = 0

    def build(self) -> ModelProgram:
        disk = DiskStore(Path(self.folder.name), 2 * self.file_bytes, self.layout)
        config = hybrid_config(vocab_size=VOCAB_SIZE, mixers="GA" if self.has_states else "AA")
        return ModelProgram(config, self.executor, CAPACITY, disk)

    def teardown(self) -> None:
        self.end_transfer()
        for sequence in self.residents:
            self.program.close_sequence(sequence.handle)
        for checkpoint in self.checkpoints:
            self.program.release(checkpoint)
        self.program.check()
        free = self.program.free()
        slots = CAPACITY.num_slots - 1
        assert (free.pages, free.slots, free.host_blocks) == (14, slots, 16)
        assert self.program.occupancy().num_checkpoints == 0
        self.program.close()
        assert not list(Path(self.folder.name).iterdir())
        self.loop.close()
        self.folder.cleanup()

    # Sequences

    @precondition(lambda self: len(self.residents) < CAPACITY.max_concurrency)
    @rule(num_tokens=st.integers(1, 200), sampling=SAMPLINGS)
    def open(self, num_tokens: int, sampling: SamplingParams) -> None:
        spec = self.spec_of((), num_tokens, sampling)
        self.residents.append(Sequence(spec, self.program.open_sequence(spec), 0))

    @precondition(lambda self: len(self.residents) < CAPACITY.max_concurrency and self.sources())
    @rule(data=st.data(), tail=st.integers(1, 80), sampling=SAMPLINGS, consumes=st.booleans())
    def open_from_checkpoint(
        self, data: st.DataObject, tail: int, sampling: SamplingParams, consumes: bool
    ) -> None:
        source = self.source_of(data, data.draw(st.sampled_from(self.sources())), consumes)
        fed = self.checkpoints[source.checkpoint][: source.num_tokens]
        spec = self.spec_of(fed, min(tail, 320 - len(fed)), sampling)
        handle = self.program.open_sequence(spec, source)
        self.consumed(source)
        assert self.program.frontier(handle) == len(fed)
        self.residents.append(Sequence(spec, handle, len(fed)))

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.residents))
        self.program.close_sequence(sequence.handle)
        self.residents.remove(sequence)

    @precondition(lambda self: any(not s.has_ended for s in self.residents))
    @rule(data=st.data(), keeps_state=st.booleans())
    def pause(self, data: st.DataObject, keeps_state: bool) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.residents if not s.has_ended]))
        paused = self.program.pause(sequence.handle, keeps_state=keeps_state)
        assert paused.accepted == tuple(sequence.accepted)
        assert paused.frontier == sequence.frontier
        assert (paused.checkpoint is not None) == (keeps_state and sequence.frontier > 0)
        if paused.checkpoint is not None:
            self.checkpoints[paused.checkpoint] = sequence.fed
        sequence.paused = paused
        self.residents.remove(sequence)
        self.paused.append(sequence)

    @precondition(lambda self: self.paused and len(self.residents) < CAPACITY.max_concurrency)
    @rule(data=st.data(), is_replay=st.booleans(), consumes=st.booleans())
    def resume(self, data: st.DataObject, is_replay: bool, consumes: bool) -> None:
        """From the Snapshot, any other checkpoint of its history, or nothing."""
        sequence = data.draw(st.sampled_from(self.paused))
        assert sequence.paused is not None
        fitting = [
            checkpoint
            for checkpoint in self.sources()
            if self.checkpoints[checkpoint] == sequence.fed[: len(self.checkpoints[checkpoint])]
        ]
        source = None
        if fitting and not is_replay:
            source = self.source_of(data, data.draw(st.sampled_from(fitting)), consumes)
        sequence.handle = self.program.resume(sequence.paused, source)
        sequence.paused, sequence.frontier = None, 0 if source is None else source.num_tokens
        if source is not None:
            self.consumed(source)
        self.paused.remove(sequence)
        self.residents.append(sequence)

    # Units

    @precondition(lambda self: any(s.num_prompt_left and not s.has_ended for s in self.residents))
    @rule(data=st.data(), ending=ENDINGS)
    def prefill(self, data: st.DataObject, ending: str) -> None:
        candidates = [s for s in self.residents if s.num_prompt_left and not s.has_ended]
        sequence = data.draw(st.sampled_from(candidates))
        limit = min(sequence.num_prompt_left, CAPACITY.prefill_chunk)
        num_tokens = data.draw(st.integers(1, limit) | st.just(limit))
        if self.reserve(sequence, num_tokens):
            if ending == "device_error":
                self.executor.faults[len(self.executor.calls)] = Fault("device_error")
            self.run([sequence], ending, num_tokens)

    @precondition(lambda self: any(not s.has_ended for s in self.residents))
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        """The rest of the prompt and of what was fed before a pause."""
        sequence = data.draw(st.sampled_from([s for s in self.residents if not s.has_ended]))
        while sequence.num_prompt_left or sequence.num_replay_left:
            num_tokens = min(sequence.num_prompt_left, 50) or 1
            if not self.reserve(sequence, num_tokens):
                return
            self.run([sequence], "commit", num_tokens)

    @precondition(lambda self: any(s.is_decoding for s in self.residents))
    @rule(data=st.data(), ending=ENDINGS, num_steps=st.integers(1, 30))
    def decode(self, data: st.DataObject, ending: str, num_steps: int) -> None:
        """Some steps of some rows; the last one ends as drawn."""
        candidates = [s for s in self.residents if s.is_decoding]
        chosen = data.draw(st.permutations(candidates))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        for step in range(num_steps):
            rows = [s for s in chosen if s.frontier < CAPACITY.max_context and self.reserve(s, 1)]
            if not rows:
                return
            is_last = step == num_steps - 1
            if is_last and ending == "device_error":
                self.executor.faults[len(self.executor.calls)] = Fault("device_error")
            self.run(rows, ending if is_last else "commit", 1)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self.program.missing(sequence.handle, num_tokens)
        before = self.program.occupancy()
        free = self.program.free()
        assert missing.pages == 0 or missing.pages <= num_tokens // PAGE_TOKENS + 2
        is_reserved = self.program.reserve_units(sequence.handle, num_tokens)
        assert is_reserved == (missing == Amounts())
        after = self.program.occupancy()
        assert is_reserved or after == before
        assert after.pages_used - before.pages_used <= free.pages
        return is_reserved

    def run(self, rows: list[Sequence], ending: str, num_tokens: int) -> None:
        self.loop.run_until_complete(self.run_unit(rows, ending, num_tokens))

    async def run_unit(self, rows: list[Sequence], ending: str, num_tokens: int) -> None:
        replays = [self.program.num_replay_left(s.handle) for s in rows]
        assert replays == [s.num_replay_left for s in rows]
        if rows[0].num_prompt_left:
            batch = self.program.launch_prefill(rows[0].handle, num_tokens)
        else:
            handles = [s.handle for s in rows]
            batch = self.program.launch_decode(handles, goes_on=ending != "abort")
        if not await self.complete(batch) or ending == "abort":
            self.program.abort(batch)
            return
        tokens = tokens_of(batch)
        accepted = [0 if token is None else 1 for token in tokens]
        if ending == "refuse" and accepted[0]:
            accepted[0], rows[0].has_ended = 0, True
        self.program.commit(batch, accepted)
        for sequence, inputs, token in zip(rows, batch.num_inputs, tokens, strict=True):
            if sequence.has_ended:
                continue
            was_replay = sequence.num_replay_left > 0
            sequence.frontier += inputs
            assert not was_replay or token is None
            if token is not None:
                sequence.accepted.append(token)

    async def complete(self, batch: PendingBatch) -> bool:
        try:
            await self.program.complete(batch)
        except DeviceError:
            return False
        return True

    # Checkpoints

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def capture(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.residents))
        before = self.program.occupancy()
        checkpoint = self.program.capture(sequence.handle)
        after = self.program.occupancy()
        assert (after.pages_used, after.slots_used) == (before.pages_used, before.slots_used)
        if checkpoint is None:
            assert sequence.frontier == 0 or self.program.free().slots == 0
        else:
            assert self.program.checkpoint(checkpoint).frontier == sequence.frontier
            self.checkpoints[checkpoint] = sequence.fed

    @precondition(lambda self: self.unleased())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Some checkpoints; what becomes free is what was promised."""
        chosen = data.draw(st.sets(st.sampled_from(self.unleased()), min_size=1))
        promised, before = self.program.reclaimable(chosen), self.program.free()
        for checkpoint in chosen:
            self.program.release(checkpoint)
            del self.checkpoints[checkpoint]
        after = self.program.free()
        assert after.pages - before.pages == promised.pages
        assert after.slots - before.slots == promised.slots
        assert after.host_blocks - before.host_blocks == promised.host_blocks

    @precondition(lambda self: self.unleased())
    @rule(data=st.data(), is_device=st.booleans())
    def drop(self, data: st.DataObject, is_device: bool) -> None:
        checkpoint = data.draw(st.sampled_from(self.unleased()))
        facts = self.program.checkpoint(checkpoint)
        copies = (facts.is_on_device, facts.is_on_host, facts.is_on_disk)
        if sum(copies) > 1 and copies[0 if is_device else 1]:
            (self.program.drop_device if is_device else self.program.drop_host)(checkpoint)

    # Transfers

    @precondition(lambda self: self.transfer is None and self.checkpoints)
    @rule(data=st.data(), fails=st.booleans() | st.just(False))
    def begin(self, data: st.DataObject, fails: bool) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.checkpoints)))
        facts = self.program.checkpoint(checkpoint)
        kinds = [
            kind
            for kind, is_legal in (
                (TransferKind.DEMOTE, facts.is_on_device and not facts.is_on_host),
                (TransferKind.RESTORE, facts.is_on_host and not facts.is_on_device),
                (
                    TransferKind.STORE,
                    (facts.is_on_device or facts.is_on_host) and not facts.is_on_disk,
                ),
                (TransferKind.FETCH, facts.is_on_disk and not facts.is_on_host),
            )
            if is_legal
        ]
        if kinds:
            self.executor.move_faults = {len(self.executor.moves)} if fails else set()
            self.loop.run_until_complete(self.start(data.draw(st.sampled_from(kinds)), checkpoint))

    async def start(self, kind: TransferKind, checkpoint: CheckpointId) -> None:
        before = self.program.occupancy()
        note = {"tokens": list(self.checkpoints[checkpoint])}
        self.transfer = self.program.begin_transfer(kind, checkpoint, note)
        if self.transfer is None:
            assert self.program.occupancy() == before

    @precondition(lambda self: self.transfer is not None)
    @rule()
    def settle(self) -> None:
        self.end_transfer()

    def end_transfer(self) -> None:
        transfer, self.transfer = self.transfer, None
        if transfer is None:
            return
        facts = self.program.checkpoint(transfer.checkpoint)
        assert facts.is_leased
        self.loop.run_until_complete(self.wait_for(transfer))
        try:
            is_ok = self.program.settle_transfer(transfer)
        except DeviceError:
            is_ok = False
            assert self.program.checkpoint(transfer.checkpoint).is_on_disk == facts.is_on_disk
        now = self.program.checkpoint(transfer.checkpoint)
        assert not now.is_leased
        assert now.is_on_device == (
            facts.is_on_device or (is_ok and transfer.kind is TransferKind.RESTORE)
        )
        assert now.is_on_host == (
            facts.is_on_host
            or (is_ok and transfer.kind in (TransferKind.DEMOTE, TransferKind.FETCH))
        )

    async def wait_for(self, transfer: Transfer) -> None:
        done = asyncio.Event()
        transfer.add_done_callback(done.set)
        await done.wait()
        assert transfer.is_done

    @precondition(lambda self: any(self.program.checkpoint(c).is_on_disk for c in self.checkpoints))
    @rule(index=st.integers(0, 3), is_gone=st.booleans(), place=st.floats(0, 1, exclude_max=True))
    def damage_a_file(self, index: int, is_gone: bool, place: float) -> None:
        files = sorted(Path(self.folder.name).glob("*.ninfer-checkpoint"), key=_age_of)
        if index >= len(files):
            return
        if is_gone:
            files[index].unlink(missing_ok=True)
            return
        # One that was just discarded may go meanwhile; it must not come back.
        with suppress(FileNotFoundError), files[index].open("r+b") as file:
            content = bytearray(file.read())
            content[int(place * len(content))] ^= 0xFF
            file.seek(0)
            file.write(content)

    # Helpers and invariants

    def spec_of(
        self, fed: tuple[int, ...], num_more: int, sampling: SamplingParams
    ) -> SequenceSpec:
        self.num_opened += 1
        more = self.rng.integers(VOCAB_SIZE, size=num_more, dtype=np.int32)
        prompt = PreparedPrompt(np.concatenate([np.array(fed, np.int32), more]))
        return SequenceSpec(f"request {self.num_opened}", prompt, sampling)

    def sources(self) -> list[CheckpointId]:
        return [c for c in self.checkpoints if self.program.checkpoint(c).is_on_device]

    def unleased(self) -> list[CheckpointId]:
        return [c for c in self.checkpoints if not self.program.checkpoint(c).is_leased]

    def source_of(self, data: st.DataObject, checkpoint: CheckpointId, consumes: bool) -> Source:
        facts = self.program.checkpoint(checkpoint)
        num_tokens = facts.frontier
        if not self.has_states:
            num_tokens = data.draw(st.integers(1, num_tokens) | st.just(num_tokens))
        return Source(checkpoint, num_tokens, consumes and not facts.is_leased)

    def consumed(self, source: Source) -> None:
        if source.consumes:
            del self.checkpoints[source.checkpoint]

    @invariant()
    def counts_agree(self) -> None:
        self.program.check()
        occupancy = self.program.occupancy()
        assert occupancy.lanes_used == len(self.residents)
        assert occupancy.num_checkpoints == len(self.checkpoints)
        assert occupancy.pages_used == 14 - self.program.free().pages
        longest = max((len(s.fed) for s in self.residents), default=0)
        assert occupancy.pages_used >= -(-longest // PAGE_TOKENS)

    @invariant()
    def tokens_are_those_of_the_pure_function(self) -> None:
        for sequence in self.residents:
            assert self.program.frontier(sequence.handle) == sequence.frontier
            if len(sequence.accepted) == sequence.num_checked:
                continue
            sequence.num_checked = len(sequence.accepted)
            assert sequence.accepted == expected_tokens(
                sequence.spec.prompt,
                sequence.spec.sampling,
                len(sequence.accepted),
                VOCAB_SIZE,
                has_states=self.has_states,
            )


def _age_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class AttentionMachine(CheckpointMachine):
    has_states = False


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestAttentionMachine = AttentionMachine.TestCase
TestAttentionMachine.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
