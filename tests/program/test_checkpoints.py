"""ModelProgram with checkpoints over FakeExecutor: forks, moves, pauses and transfers, case by
case; `test_checkpoint_machine.py` has their combinations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import (
    Amounts,
    CheckpointFacts,
    PausedSequence,
    SequenceHandle,
    SequenceSpec,
    Source,
    TransferKind,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskLayout, DiskStore
from tests.helpers import program_driver
from tests.helpers.fake_executor import (
    PAGE_BYTES,
    STATE_BLOCKS,
    FakeExecutor,
    Fault,
    expected_tokens,
)
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import decode, prefill, tokens_of

VOCAB_SIZE = 97
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=256,
    num_pages=12,
    num_slots=9,
    prefill_chunk=100,
    num_host_blocks=20,
)
DEMOTE, RESTORE = TransferKind.DEMOTE, TransferKind.RESTORE
STORE, FETCH = TransferKind.STORE, TransferKind.FETCH


class Rig:
    """A Program with all tiers; attention only with `has_states` False."""

    def __init__(
        self, folder: Path, capacity: Capacity = CAPACITY, *, has_states: bool = True
    ) -> None:
        self.folder = folder
        self.capacity = capacity
        self.has_states = has_states
        self.executor = FakeExecutor(VOCAB_SIZE, capacity, has_states=has_states)
        config = hybrid_config(vocab_size=VOCAB_SIZE, mixers="GA" if has_states else "AA")
        layout = DiskLayout("fake", PAGE_BYTES, STATE_BLOCKS if has_states else 0)
        disk = DiskStore(folder, 1 << 20, layout)
        self.program = ModelProgram(config, self.executor, capacity, disk)

    def expected(self, spec: SequenceSpec, count: int) -> list[int]:
        return expected_tokens(
            spec.prompt, spec.sampling, count, VOCAB_SIZE, has_states=self.has_states
        )

    async def started(
        self, spec: SequenceSpec, num_tokens: int, source: Source | None = None
    ) -> SequenceHandle:
        """A sequence with so much of its prompt fed."""
        handle = self.program.open_sequence(spec, source)
        await self.feed(handle, num_tokens - self.program.frontier(handle))
        return handle

    async def feed(self, handle: SequenceHandle, num_tokens: int) -> None:
        """Prompt inputs that sample nothing."""
        while num_tokens:
            count = min(num_tokens, self.capacity.prefill_chunk)
            assert self.program.reserve_units(handle, count)
            batch = self.program.launch_prefill(handle, count)
            await self.program.complete(batch)
            assert tokens_of(batch) == [None]
            self.program.commit(batch, [0])
            self.program.check()
            num_tokens -= count

    async def finish(self, handle: SequenceHandle, spec: SequenceSpec, count: int = 4) -> list[int]:
        """The rest of the prompt and some tokens."""
        tokens = [await prefill(self.program, handle, spec, chunk=100)]
        while len(tokens) < count:
            tokens += await decode(self.program, [handle])
        return tokens

    async def captured(self, spec: SequenceSpec, num_tokens: int) -> CheckpointId:
        """A checkpoint whose sequence is gone."""
        handle = await self.started(spec, num_tokens)
        checkpoint = self.program.capture(handle)
        assert checkpoint is not None
        self.program.close_sequence(handle)
        return checkpoint

    async def transfer(self, kind: TransferKind, checkpoint: CheckpointId) -> bool:
        transfer = self.program.begin_transfer(kind, checkpoint, {"kind": "test"})
        assert transfer is not None
        assert (transfer.kind, transfer.checkpoint) == (kind, checkpoint)
        done = asyncio.Event()
        transfer.add_done_callback(done.set)
        await done.wait()
        is_ok = self.program.settle_transfer(transfer)
        self.program.check()
        return is_ok

    def tiers(self, checkpoint: CheckpointId) -> str:
        facts = self.program.checkpoint(checkpoint)
        tiers = zip("dhf", (facts.is_on_device, facts.is_on_host, facts.is_on_disk), strict=True)
        return "".join(letter for letter, is_there in tiers if is_there)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    built = Rig(tmp_path)
    yield built
    built.program.close()


@pytest.fixture
def attention(tmp_path: Path) -> Iterator[Rig]:
    built = Rig(tmp_path, has_states=False)
    yield built
    built.program.close()


def spec_of(num_tokens: int, name: str = "request") -> SequenceSpec:
    return program_driver.spec_of(num_tokens, name, vocab_size=VOCAB_SIZE)


def spec_behind(spec: SequenceSpec, num_tokens: int, more: int, name: str) -> SequenceSpec:
    """A prompt that begins with so many tokens of another."""
    tail = spec_of(more, name).prompt.token_ids
    token_ids = np.concatenate([spec.prompt.token_ids[:num_tokens], tail])
    return SequenceSpec(name, PreparedPrompt(token_ids), SamplingParams())


# Forks and moves


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
async def test_forks_and_the_origin_go_their_own_ways(rig: Rig, num_tokens: int) -> None:
    spec = spec_of(150)
    origin = await rig.started(spec, num_tokens)
    checkpoint = rig.program.capture(origin)
    assert checkpoint is not None
    forks = [spec_behind(spec, num_tokens, 20 + index, f"fork {index}") for index in range(2)]
    handles = [rig.program.open_sequence(s, Source(checkpoint, num_tokens)) for s in forks]
    assert [rig.program.frontier(handle) for handle in handles] == [num_tokens] * 2
    tokens = [[await prefill(rig.program, origin, spec, chunk=100)]]
    for handle, fork in zip(handles, forks, strict=True):
        tokens.append([await prefill(rig.program, handle, fork, chunk=100)])
    for _ in range(30):
        newest = await decode(rig.program, [origin, *handles])
        for row, token in zip(tokens, newest, strict=True):
            row.append(token)
    assert tokens == [rig.expected(each, 31) for each in (spec, *forks)]


async def test_full_pages_and_the_slot_are_shared_and_the_partial_page_is_copied(rig: Rig) -> None:
    spec = spec_of(200)
    origin = await rig.started(spec, 70)
    checkpoint = rig.program.capture(origin)
    assert checkpoint is not None
    before = rig.program.free()
    handle = rig.program.open_sequence(spec_behind(spec, 70, 9, "fork"), Source(checkpoint, 70))
    assert rig.program.free() == before
    assert rig.program.reserve_units(handle, 9)
    after = rig.program.free()
    assert (before.pages - after.pages, before.slots - after.slots) == (1, 1)


async def test_an_aligned_frontier_needs_no_copy(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 64)
    fork = spec_behind(spec, 64, 9, "fork")
    handle = rig.program.open_sequence(fork, Source(checkpoint, 64))
    before = rig.program.free()
    assert rig.program.reserve_units(handle, 9)
    assert before.pages - rig.program.free().pages == 1
    assert await rig.finish(handle, fork) == rig.expected(fork, 4)
    assert rig.executor.moves == []


@pytest.mark.parametrize("is_early", [True, False])
async def test_the_only_holder_of_a_page_writes_it_in_place(rig: Rig, is_early: bool) -> None:
    """A move, and a fork whose checkpoint was released before its first reservation."""
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    fork = spec_behind(spec, 70, 9, "fork")
    handle = rig.program.open_sequence(fork, Source(checkpoint, 70, consumes=is_early))
    if not is_early:
        rig.program.release(checkpoint)
    with pytest.raises(InvariantError, match="is not there"):
        rig.program.checkpoint(checkpoint)
    before = rig.program.free()
    assert rig.program.reserve_units(handle, 9)
    assert rig.program.free().pages == before.pages
    assert await rig.finish(handle, fork) == rig.expected(fork, 4)


async def test_a_copy_is_made_again_after_an_abort_and_a_failure(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    fork = spec_behind(spec, 70, 9, "fork")
    handle = rig.program.open_sequence(fork, Source(checkpoint, 70))
    assert rig.program.reserve_units(handle, 9)
    rig.executor.faults[len(rig.executor.calls)] = Fault("device_error")
    for _ in range(2):
        batch = rig.program.launch_prefill(handle, 9)
        with suppress(DeviceError):
            await rig.program.complete(batch)
        rig.program.abort(batch)
        rig.program.check()
    assert await rig.finish(handle, fork) == rig.expected(fork, 4)
    again = rig.program.open_sequence(fork, Source(checkpoint, 70))
    assert await rig.finish(again, fork) == rig.expected(fork, 4)


async def test_a_fork_that_is_paused_before_its_first_unit_keeps_what_it_shares(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    fork = spec_behind(spec, 70, 9, "fork")
    handle = rig.program.open_sequence(fork, Source(checkpoint, 70))
    assert rig.program.reserve_units(handle, 9)
    inner = rig.program.capture(handle)
    paused = rig.program.pause(handle, keeps_state=True)
    rig.program.check()
    assert inner is not None
    assert paused.checkpoint is not None
    rig.program.release(checkpoint)
    rig.program.release(inner)
    handle = rig.program.resume(paused, Source(paused.checkpoint, 70, consumes=True))
    assert await rig.finish(handle, fork) == rig.expected(fork, 4)


async def test_missing_counts_the_copy(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    other = rig.program.open_sequence(spec_of(250, "other"))
    assert rig.program.reserve_units(other, 250)
    third = rig.program.open_sequence(spec_of(250, "third"))
    assert rig.program.reserve_units(third, 250)
    handle = rig.program.open_sequence(spec_behind(spec, 70, 130, "fork"), Source(checkpoint, 70))
    assert rig.program.free().pages == 2
    assert rig.program.missing(handle, 58) == Amounts()
    assert rig.program.missing(handle, 130) == Amounts(pages=1)
    before = rig.program.occupancy()
    assert not rig.program.reserve_units(handle, 130)
    assert rig.program.occupancy() == before
    rig.program.release(checkpoint)
    assert rig.program.reserve_units(handle, 130)


async def test_sources_that_cannot_be_are_refused(rig: Rig) -> None:
    spec = spec_of(100)
    checkpoint = await rig.captured(spec, 70)
    before = rig.program.occupancy()
    short = spec_of(70)
    for request, source, message in (
        (spec, Source(checkpoint, 69), "69 tokens of checkpoint"),
        (spec, Source(checkpoint, 71), "71 tokens of checkpoint"),
        (short, Source(checkpoint, 70), "at most 69"),
        (spec, Source(CheckpointId(99), 70), "checkpoint 99 is not there"),
    ):
        with pytest.raises(InvariantError, match=message):
            rig.program.open_sequence(request, source)
    assert await rig.transfer(DEMOTE, checkpoint)
    rig.program.drop_device(checkpoint)
    with pytest.raises(InvariantError, match="not on the device"):
        rig.program.open_sequence(spec, Source(checkpoint, 70))
    assert rig.program.occupancy().lanes_used == before.lanes_used == 0


async def test_a_part_of_a_prefix_serves_a_model_of_attention_alone(attention: Rig) -> None:
    rig = attention
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 150)
    assert rig.program.free().slots == 8
    for num_tokens in (1, 64, 100, 128, 150):
        fork = spec_behind(spec, num_tokens, 30, f"fork {num_tokens}")
        handle = rig.program.open_sequence(fork, Source(checkpoint, num_tokens))
        assert await rig.finish(handle, fork) == rig.expected(fork, 4)
        rig.program.close_sequence(handle)
    assert await rig.finish(
        rig.program.open_sequence(spec, Source(checkpoint, 150, consumes=True)), spec
    ) == rig.expected(spec, 4)


async def test_a_page_that_was_full_and_is_written_over_is_no_longer_on_the_host(
    attention: Rig,
) -> None:
    """Both know the same block; one takes the page over in its middle, the other restores it."""
    rig = attention
    spec = spec_of(200)
    handle = await rig.started(spec, 128)
    one, other = rig.program.capture(handle), rig.program.capture(handle)
    assert one is not None
    assert other is not None
    rig.program.close_sequence(handle)
    assert await rig.transfer(DEMOTE, one)
    assert await rig.transfer(DEMOTE, other)
    assert rig.program.occupancy().host_blocks_used == 2
    rig.program.drop_device(other)
    fork = spec_behind(spec, 100, 28, "fork")
    handle = rig.program.open_sequence(fork, Source(one, 100, consumes=True))
    assert await rig.finish(handle, fork, 3) == rig.expected(fork, 3)
    mine = rig.program.capture(handle)
    assert mine is not None
    assert await rig.transfer(DEMOTE, mine)
    rig.program.drop_device(mine)
    rig.program.close_sequence(handle)
    for checkpoint, origin, length in ((other, spec, 128), (mine, fork, 128)):
        assert await rig.transfer(RESTORE, checkpoint)
        again = spec_behind(origin, length, 5, f"again {checkpoint}")
        handle = rig.program.open_sequence(again, Source(checkpoint, length))
        assert await rig.finish(handle, again) == rig.expected(again, 4)
        rig.program.close_sequence(handle)


# Capture, pause, resume


async def test_there_is_nothing_to_capture_at_the_start(rig: Rig) -> None:
    handle = rig.program.open_sequence(spec_of(10))
    assert rig.program.capture(handle) is None
    assert rig.program.pause(handle, keeps_state=True).checkpoint is None


async def test_a_capture_leaves_a_slot_for_the_next_unit(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Capacity(1, 256, 8, 4, 100))
    handle = await rig.started(spec_of(100), 10)
    assert rig.program.capture(handle) is not None
    assert rig.program.reserve_units(handle, 10)
    await rig.feed(handle, 10)
    assert rig.program.free().slots == 1
    assert rig.program.capture(handle) is not None
    assert rig.program.missing(handle, 10) == Amounts()
    await rig.feed(handle, 10)
    assert rig.program.free().slots == 0
    before = rig.program.occupancy()
    assert rig.program.capture(handle) is None
    assert rig.program.missing(handle, 10) == Amounts(slots=1)
    assert not rig.program.reserve_units(handle, 10)
    assert rig.program.occupancy() == before
    assert rig.program.pause(handle, keeps_state=True).checkpoint is not None
    rig.program.close()


async def test_neither_capture_nor_pause_under_a_pending_unit(rig: Rig) -> None:
    handle = await rig.started(spec_of(100), 10)
    assert rig.program.reserve_units(handle, 10)
    batch = rig.program.launch_prefill(handle, 10)
    with pytest.raises(InvariantError, match="pending"):
        rig.program.capture(handle)
    with pytest.raises(InvariantError, match="pending"):
        rig.program.pause(handle, keeps_state=True)
    await rig.program.complete(batch)
    rig.program.commit(batch, [0])


async def test_an_ended_row_can_be_captured_but_not_paused(rig: Rig) -> None:
    spec = spec_of(30)
    handle = await rig.started(spec, 20)
    assert rig.program.reserve_units(handle, 10)
    batch = rig.program.launch_prefill(handle, 10)
    await rig.program.complete(batch)
    rig.program.commit(batch, [0])
    with pytest.raises(InvariantError, match="has ended"):
        rig.program.pause(handle, keeps_state=True)
    checkpoint = rig.program.capture(handle)
    assert checkpoint is not None
    assert rig.program.checkpoint(checkpoint).frontier == 20
    again = rig.program.open_sequence(spec, Source(checkpoint, 20))
    assert await rig.finish(again, spec) == rig.expected(spec, 4)


async def paused_at(rig: Rig, spec: SequenceSpec, where: str) -> tuple[PausedSequence, list[int]]:
    """A request that was paused with its Snapshot, and the tokens it had."""
    handle = rig.program.open_sequence(spec)
    tokens: list[int] = []
    if where == "prompt":
        await rig.feed(handle, 75)
    else:
        tokens = await rig.finish(handle, spec, 1 if where == "first token" else 9)
    return rig.program.pause(handle, keeps_state=True), tokens


@pytest.mark.parametrize("where", ["prompt", "first token", "answer"])
@pytest.mark.parametrize("how", ["snapshot", "earlier checkpoint", "replay"])
async def test_a_resumed_request_goes_on_as_if_nothing_had_been(
    rig: Rig, where: str, how: str
) -> None:
    spec = program_driver.spec_of(
        100,
        vocab_size=VOCAB_SIZE,
        sampling=SamplingParams(temperature=1, seed=2, frequency_penalty=0.5),
        min_tokens=20,
        suppressed_ids=(1, 2, 3),
        positions=True,
        rope_delta=-40,
    )
    earlier = await rig.captured(spec, 33)
    paused, tokens = await paused_at(rig, spec, where)
    assert (paused.spec, paused.accepted) == (spec, tuple(tokens))
    assert rig.program.occupancy().lanes_used == 0
    assert paused.checkpoint is not None
    source = None
    if how == "snapshot":
        source = Source(paused.checkpoint, paused.frontier, consumes=True)
    elif how == "earlier checkpoint":
        source = Source(earlier, 33)
    handle = rig.program.resume(paused, source)
    start = 0 if source is None else source.num_tokens
    assert rig.program.frontier(handle) == start
    left = max(0, 100 + len(tokens) - 1 - start) if tokens else 0
    assert rig.program.num_replay_left(handle) == left
    if tokens:
        await rig.feed(handle, max(0, 100 - start))
        while rig.program.num_replay_left(handle):
            assert rig.program.reserve_units(handle, 1)
            batch = rig.program.launch_decode([handle])
            await rig.program.complete(batch)
            assert tokens_of(batch) == [None]
            rig.program.commit(batch, [0])
            rig.program.check()
    else:
        tokens = [await prefill(rig.program, handle, spec, chunk=40)]
    for _ in range(30):
        tokens += await decode(rig.program, [handle])
    assert tokens == program_driver.expected_of(spec, len(tokens), vocab_size=VOCAB_SIZE)


async def test_replayed_and_new_rows_share_a_batch(rig: Rig) -> None:
    spec, other = spec_of(40), spec_of(50, "other")
    handle = rig.program.open_sequence(spec)
    tokens = await rig.finish(handle, spec, 6)
    paused = rig.program.pause(handle, keeps_state=False)
    assert rig.program.free().pages == 12
    mate = rig.program.open_sequence(other)
    others = await rig.finish(mate, other, 1)
    handle = rig.program.resume(paused)
    await rig.feed(handle, 40)
    while rig.program.num_replay_left(handle):
        assert all(rig.program.reserve_units(each, 1) for each in (handle, mate))
        batch = rig.program.launch_decode([handle, mate])
        await rig.program.complete(batch)
        first, second = tokens_of(batch)
        assert first is None
        assert second is not None
        rig.program.commit(batch, [0, 1])
        others.append(second)
    tokens += await decode(rig.program, [handle])
    assert tokens == rig.expected(spec, 7)
    assert others == rig.expected(other, 6)


async def test_a_source_beyond_the_old_frontier_is_refused(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 100)
    handle = await rig.started(spec, 50)
    paused = rig.program.pause(handle, keeps_state=False)
    with pytest.raises(InvariantError, match="at most 50"):
        rig.program.resume(paused, Source(checkpoint, 100))


# Counts


async def test_shared_pages_are_reclaimable_only_together(rig: Rig) -> None:
    spec = spec_of(200)
    handle = await rig.started(spec, 100)
    first = rig.program.capture(handle)
    await rig.feed(handle, 60)
    second = rig.program.capture(handle)
    assert first is not None
    assert second is not None
    assert rig.program.reclaimable([first, second]) == Amounts(pages=0, slots=1)
    rig.program.close_sequence(handle)
    assert rig.program.reclaimable([first]) == Amounts(slots=1)
    assert rig.program.reclaimable([second]) == Amounts(pages=1, slots=1)
    assert rig.program.reclaimable([first, second, second]) == Amounts(pages=3, slots=2)
    assert rig.program.reclaimable([]) == Amounts()


# Transfers


async def test_a_checkpoint_travels_through_all_tiers(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 130)
    tiers = [rig.tiers(checkpoint)]
    assert await rig.transfer(DEMOTE, checkpoint)
    assert await rig.transfer(STORE, checkpoint)
    tiers.append(rig.tiers(checkpoint))
    rig.program.drop_device(checkpoint)
    rig.program.drop_host(checkpoint)
    tiers.append(rig.tiers(checkpoint))
    occupancy = rig.program.occupancy()
    assert (occupancy.pages_used, occupancy.slots_used, occupancy.host_blocks_used) == (0, 0, 0)
    assert occupancy.disk_bytes_used > 0
    assert await rig.transfer(FETCH, checkpoint)
    tiers.append(rig.tiers(checkpoint))
    assert await rig.transfer(RESTORE, checkpoint)
    assert [*tiers, rig.tiers(checkpoint)] == ["d", "dhf", "f", "hf", "dhf"]
    fork = spec_behind(spec, 130, 9, "fork")
    handle = rig.program.open_sequence(fork, Source(checkpoint, 130))
    assert await rig.finish(handle, fork) == rig.expected(fork, 4)
    rig.program.release(checkpoint)
    assert rig.program.occupancy().disk_bytes_used == 0


async def test_pages_that_are_there_already_are_shared_and_not_copied(rig: Rig) -> None:
    spec = spec_of(250)
    handle = await rig.started(spec, 130)
    first = rig.program.capture(handle)
    await rig.feed(handle, 70)
    second = rig.program.capture(handle)
    rig.program.close_sequence(handle)
    assert first is not None
    assert second is not None
    assert await rig.transfer(DEMOTE, first)
    assert await rig.transfer(DEMOTE, second)
    assert [len(move.pages) for move in rig.executor.moves] == [3, 2]
    assert rig.program.occupancy().host_blocks_used == 5 + 2 * STATE_BLOCKS
    rig.program.drop_device(first)
    rig.program.drop_device(second)
    assert await rig.transfer(RESTORE, second)
    assert await rig.transfer(RESTORE, first)
    assert [len(move.pages) for move in rig.executor.moves[2:]] == [4, 1]
    assert rig.program.occupancy().pages_used == 5
    for checkpoint, num_tokens in ((first, 130), (second, 200)):
        fork = spec_behind(spec, num_tokens, 9, f"fork {num_tokens}")
        handle = rig.program.open_sequence(fork, Source(checkpoint, num_tokens))
        assert await rig.finish(handle, fork) == rig.expected(fork, 4)
        rig.program.close_sequence(handle)


async def test_a_page_that_is_still_filled_is_copied_for_each_frontier(rig: Rig) -> None:
    spec = spec_of(250)
    handle = await rig.started(spec, 70)
    checkpoints = []
    for _ in range(3):
        checkpoint = rig.program.capture(handle)
        assert checkpoint is not None
        assert await rig.transfer(DEMOTE, checkpoint)
        rig.program.drop_device(checkpoint)
        checkpoints.append(checkpoint)
        await rig.feed(handle, 15)
    rig.program.close_sequence(handle)
    for index, checkpoint in enumerate(checkpoints):
        assert await rig.transfer(RESTORE, checkpoint)
        fork = spec_behind(spec, 70 + 15 * index, 9, f"fork {index}")
        handle = rig.program.open_sequence(fork, Source(checkpoint, 70 + 15 * index, consumes=True))
        assert await rig.finish(handle, fork) == rig.expected(fork, 4)
        rig.program.close_sequence(handle)


async def test_units_run_beside_a_transfer(rig: Rig) -> None:
    spec, other = spec_of(200), spec_of(90, "other")
    handle = await rig.started(spec, 70)
    checkpoint = rig.program.capture(handle)
    assert checkpoint is not None
    rig.executor.move_gate = asyncio.Event()
    transfer = rig.program.begin_transfer(DEMOTE, checkpoint)
    assert transfer is not None
    with pytest.raises(InvariantError, match="another transfer is open"):
        rig.program.begin_transfer(DEMOTE, checkpoint)
    with pytest.raises(InvariantError, match="while it runs"):
        rig.program.settle_transfer(transfer)
    await rig.feed(handle, 40)
    mate = rig.program.open_sequence(other)
    assert await rig.finish(mate, other) == rig.expected(other, 4)
    fork = spec_behind(spec, 70, 9, "fork")
    forked = rig.program.open_sequence(fork, Source(checkpoint, 70))
    rig.executor.move_gate.set()
    assert await rig.finish(forked, fork) == rig.expected(fork, 4)
    assert transfer.is_done
    assert rig.program.settle_transfer(transfer)
    with pytest.raises(InvariantError, match="not the open one"):
        rig.program.settle_transfer(transfer)


async def test_a_leased_checkpoint_stays_where_it_is(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    assert await rig.transfer(DEMOTE, checkpoint)
    transfer = rig.program.begin_transfer(STORE, checkpoint)
    assert transfer is not None
    assert rig.program.checkpoint(checkpoint) == CheckpointFacts(70, True, True, False, True)
    for change in (rig.program.release, rig.program.drop_device, rig.program.drop_host):
        with pytest.raises(InvariantError, match="is leased"):
            change(checkpoint)
    with pytest.raises(InvariantError, match="is leased and cannot be consumed"):
        rig.program.open_sequence(spec, Source(checkpoint, 70, consumes=True))
    done = asyncio.Event()
    transfer.add_done_callback(done.set)
    await done.wait()
    assert rig.program.settle_transfer(transfer)
    rig.program.release(checkpoint)


@pytest.mark.parametrize("kind", [DEMOTE, RESTORE, STORE])
async def test_copies_that_fail_leave_everything_as_it_was(rig: Rig, kind: TransferKind) -> None:
    checkpoint = await rig.captured(spec_of(200), 130)
    if kind is RESTORE:
        assert await rig.transfer(DEMOTE, checkpoint)
        rig.program.drop_device(checkpoint)
    before = rig.program.occupancy()
    rig.executor.move_faults = {len(rig.executor.moves)}
    with pytest.raises(DeviceError, match="injected move error"):
        await rig.transfer(kind, checkpoint)
    rig.program.check()
    assert rig.program.occupancy() == before
    assert await rig.transfer(kind, checkpoint)


async def test_a_damaged_file_is_forgotten(rig: Rig) -> None:
    checkpoint = await rig.captured(spec_of(200), 130)
    assert await rig.transfer(STORE, checkpoint)
    rig.program.drop_device(checkpoint)
    (path,) = files_in(rig.folder)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert not await rig.transfer(FETCH, checkpoint)
    assert rig.program.checkpoint(checkpoint) == CheckpointFacts(130, False, False, False, False)
    assert rig.program.occupancy().host_blocks_used == 0
    for kind in TransferKind:
        with pytest.raises(InvariantError, match="is not where a"):
            rig.program.begin_transfer(kind, checkpoint)
    rig.program.release(checkpoint)
    assert rig.program.occupancy().num_checkpoints == 0


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def test_a_file_that_was_put_out_is_forgotten(rig: Rig) -> None:
    first = await rig.captured(spec_of(70), 60)
    assert await rig.transfer(STORE, first)
    for path in files_in(rig.folder):
        path.unlink()
    second = await rig.captured(spec_of(80), 60)
    assert await rig.transfer(STORE, second)
    assert (rig.tiers(first), rig.tiers(second)) == ("d", "df")


async def test_a_restarted_program_answers_from_disk(rig: Rig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 130)
    assert await rig.transfer(STORE, checkpoint)
    assert rig.program.disk_notes() == {}
    rig.program.close()
    again = Rig(rig.folder)
    ((found, note),) = again.program.disk_notes().items()
    assert note == {"kind": "test"}
    assert again.program.checkpoint(found) == CheckpointFacts(130, False, False, True, False)
    assert await again.transfer(FETCH, found)
    assert await again.transfer(RESTORE, found)
    fork = spec_behind(spec, 130, 9, "fork")
    handle = again.program.open_sequence(fork, Source(found, 130))
    assert await again.finish(handle, fork) == again.expected(fork, 4)
    again.program.release(found)
    assert again.program.disk_notes() == {}
    again.program.close()
    assert files_in(rig.folder) == []


async def test_a_transfer_without_room_is_not_begun(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Capacity(2, 256, 6, 5, 100, num_host_blocks=7))
    checkpoint = await rig.captured(spec_of(200), 130)
    other = await rig.captured(spec_of(200, "other"), 60)
    assert await rig.transfer(DEMOTE, checkpoint)
    before = rig.program.occupancy()
    for kind in (DEMOTE, STORE):
        assert rig.program.begin_transfer(kind, other) is None
    rig.program.drop_device(checkpoint)
    handles = [rig.program.open_sequence(spec_of(200, name)) for name in ("a", "b")]
    assert rig.program.reserve_units(handles[0], 200)
    assert rig.program.begin_transfer(RESTORE, checkpoint) is None
    rig.program.check()
    rig.program.close_sequence(handles[0])
    assert await rig.transfer(RESTORE, checkpoint)
    assert rig.program.occupancy().pages_used == before.pages_used
    rig.program.close()


async def test_without_host_memory_there_are_no_transfers(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Capacity(1, 256, 8, 9, 100))
    checkpoint = await rig.captured(spec_of(200), 130)
    for kind in (DEMOTE, STORE):
        assert rig.program.begin_transfer(kind, checkpoint) is None
    rig.program.close()


async def test_close_gives_up_an_open_transfer_and_leaves_the_files(rig: Rig) -> None:
    checkpoint = await rig.captured(spec_of(200), 130)
    assert await rig.transfer(STORE, checkpoint)
    rig.executor.move_gate = asyncio.Event()
    assert rig.program.begin_transfer(DEMOTE, checkpoint) is not None
    await asyncio.sleep(0)
    rig.program.close()
    rig.program.check()
    occupancy = rig.program.occupancy()
    assert (occupancy.pages_used, occupancy.slots_used, occupancy.host_blocks_used) == (0, 0, 0)
    assert len(files_in(rig.folder)) == 1
    with pytest.raises(InvariantError, match="closed"):
        rig.program.begin_transfer(DEMOTE, checkpoint)
    await asyncio.sleep(0)


async def test_the_last_copy_is_not_dropped(rig: Rig) -> None:
    checkpoint = await rig.captured(spec_of(200), 130)
    with pytest.raises(InvariantError, match="nowhere else"):
        rig.program.drop_device(checkpoint)
    with pytest.raises(InvariantError, match="is not on the host"):
        rig.program.drop_host(checkpoint)
    assert await rig.transfer(DEMOTE, checkpoint)
    rig.program.drop_device(checkpoint)
    with pytest.raises(InvariantError, match="nowhere else"):
        rig.program.drop_host(checkpoint)
    assert rig.tiers(checkpoint) == "h"
