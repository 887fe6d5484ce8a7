"""ModelProgram with checkpoints over FakeExecutor: forks, moves, pauses and counts, case by case;
`test_checkpoint_machine.py` has their combinations."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import (
    Amounts,
    PausedSequence,
    SequenceSpec,
    Source,
    TransferKind,
)
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from tests.helpers import program_driver
from tests.helpers.checkpoint_rig import VOCAB_SIZE, CheckpointRig, spec_behind, spec_of
from tests.helpers.fake_executor import Fault
from tests.helpers.program_driver import prefill, tokens_of

decode = partial(program_driver.decode, goes_on=True)
"""What a step ahead may overwrite is overwritten."""


# Forks and moves


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
async def test_forks_and_the_origin_go_their_own_ways(rig: CheckpointRig, num_tokens: int) -> None:
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


async def test_full_pages_and_the_slot_are_shared_and_the_partial_page_is_copied(
    rig: CheckpointRig,
) -> None:
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


async def test_an_aligned_frontier_needs_no_copy(rig: CheckpointRig) -> None:
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
async def test_the_only_holder_of_a_page_writes_it_in_place(
    rig: CheckpointRig, is_early: bool
) -> None:
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


async def test_a_copy_is_made_again_after_an_abort_and_a_failure(rig: CheckpointRig) -> None:
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


async def test_a_fork_that_is_paused_before_its_first_unit_keeps_what_it_shares(
    rig: CheckpointRig,
) -> None:
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


async def test_missing_counts_the_copy(rig: CheckpointRig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 70)
    other = rig.program.open_sequence(spec_of(250, "other"))
    assert rig.program.reserve_units(other, 250)
    third = rig.program.open_sequence(spec_of(250, "third"))
    assert rig.program.reserve_units(third, 250)
    handle = rig.program.open_sequence(spec_behind(spec, 70, 130, "fork"), Source(checkpoint, 70))
    assert rig.program.free().pages == 2
    assert rig.program.needs_copy(handle)
    assert rig.program.missing(handle, 58) == Amounts()
    assert rig.program.missing(handle, 130) == Amounts(pages=1)
    before = rig.program.occupancy()
    assert not rig.program.reserve_units(handle, 130)
    assert rig.program.occupancy() == before
    rig.program.release(checkpoint)
    assert not rig.program.needs_copy(handle)
    assert rig.program.reserve_units(handle, 130)


async def test_sources_that_cannot_be_are_refused(rig: CheckpointRig) -> None:
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
    assert await rig.transfer(TransferKind.DEMOTE, checkpoint)
    rig.program.drop_device(checkpoint)
    with pytest.raises(InvariantError, match="not on the device"):
        rig.program.open_sequence(spec, Source(checkpoint, 70))
    assert rig.program.occupancy().lanes_used == before.lanes_used == 0


async def test_a_part_of_a_prefix_serves_a_model_of_attention_alone(
    attention: CheckpointRig,
) -> None:
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


# Capture, pause, resume


async def test_there_is_nothing_to_capture_at_the_start(rig: CheckpointRig) -> None:
    handle = rig.program.open_sequence(spec_of(10))
    assert rig.program.capture(handle) is None
    assert rig.program.pause(handle, keeps_state=True).checkpoint is None


async def test_a_capture_leaves_a_slot_for_the_next_unit(tmp_path: Path) -> None:
    rig = CheckpointRig(tmp_path, Capacity(1, 256, 8, 4, 100))
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


async def test_neither_capture_nor_pause_under_a_pending_unit(rig: CheckpointRig) -> None:
    handle = await rig.started(spec_of(100), 10)
    assert rig.program.reserve_units(handle, 10)
    batch = rig.program.launch_prefill(handle, 10)
    with pytest.raises(InvariantError, match="pending"):
        rig.program.capture(handle)
    with pytest.raises(InvariantError, match="pending"):
        rig.program.pause(handle, keeps_state=True)
    await rig.program.complete(batch)
    rig.program.commit(batch, [0])


async def test_an_ended_row_can_be_captured_but_not_paused(rig: CheckpointRig) -> None:
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


async def paused_at(
    rig: CheckpointRig, spec: SequenceSpec, where: str
) -> tuple[PausedSequence, list[int]]:
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
    rig: CheckpointRig, where: str, how: str
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


async def test_replayed_and_new_rows_share_a_batch(rig: CheckpointRig) -> None:
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


async def test_a_source_beyond_the_old_frontier_is_refused(rig: CheckpointRig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 100)
    handle = await rig.started(spec, 50)
    paused = rig.program.pause(handle, keeps_state=False)
    with pytest.raises(InvariantError, match="at most 50"):
        rig.program.resume(paused, Source(checkpoint, 100))


# Counts


async def test_shared_pages_are_reclaimable_only_together(rig: CheckpointRig) -> None:
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
