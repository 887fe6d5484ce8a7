"""Transfers of a ModelProgram over FakeExecutor: what is where, what is shared, and what fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import (
    CheckpointFacts,
    Source,
    TransferKind,
)
from ninfer.contract.units import Capacity
from tests.helpers.checkpoint_rig import CheckpointRig, spec_behind, spec_of
from tests.helpers.fake_executor import STATE_BLOCKS

DEMOTE, RESTORE = TransferKind.DEMOTE, TransferKind.RESTORE
STORE, FETCH = TransferKind.STORE, TransferKind.FETCH


async def test_a_page_that_was_full_and_is_written_over_is_no_longer_on_the_host(
    attention: CheckpointRig,
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


async def test_a_checkpoint_travels_through_all_tiers(rig: CheckpointRig) -> None:
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


async def test_pages_that_are_there_already_are_shared_and_not_copied(rig: CheckpointRig) -> None:
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


async def test_a_page_that_is_still_filled_is_copied_for_each_frontier(rig: CheckpointRig) -> None:
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


async def test_units_run_beside_a_transfer(rig: CheckpointRig) -> None:
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


async def test_a_leased_checkpoint_stays_where_it_is(rig: CheckpointRig) -> None:
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
async def test_copies_that_fail_leave_everything_as_it_was(
    rig: CheckpointRig, kind: TransferKind
) -> None:
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


async def test_a_damaged_file_is_forgotten(rig: CheckpointRig) -> None:
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


async def test_a_file_that_was_put_out_is_forgotten(rig: CheckpointRig) -> None:
    first = await rig.captured(spec_of(70), 60)
    assert await rig.transfer(STORE, first)
    for path in files_in(rig.folder):
        path.unlink()
    second = await rig.captured(spec_of(80), 60)
    assert await rig.transfer(STORE, second)
    assert (rig.tiers(first), rig.tiers(second)) == ("d", "df")


async def test_a_restarted_program_answers_from_disk(rig: CheckpointRig) -> None:
    spec = spec_of(200)
    checkpoint = await rig.captured(spec, 130)
    assert await rig.transfer(STORE, checkpoint)
    assert rig.program.disk_notes() == {}
    rig.program.close()
    again = CheckpointRig(rig.folder)
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
    rig = CheckpointRig(tmp_path, Capacity(2, 256, 6, 5, 100, num_host_blocks=7))
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
    rig = CheckpointRig(tmp_path, Capacity(1, 256, 8, 9, 100))
    checkpoint = await rig.captured(spec_of(200), 130)
    for kind in (DEMOTE, STORE):
        assert rig.program.begin_transfer(kind, checkpoint) is None
    rig.program.close()


async def test_close_gives_up_an_open_transfer_and_leaves_the_files(rig: CheckpointRig) -> None:
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


async def test_the_last_copy_is_not_dropped(rig: CheckpointRig) -> None:
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
