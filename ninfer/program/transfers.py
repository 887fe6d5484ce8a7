"""Transfers: copies of one checkpoint from tier to tier, beside the units.

    reserve the destination, lease the checkpoint -> copy -> publish or give back -> end the lease

A copy that is half done is known to nobody: the reservation is the transfer's until it is settled.
Pages that are there already (pairs of the host store) are shared, not copied. A checkpoint goes
from the device to disk through host blocks that are given back afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import TransferKind
from ninfer.contract.units import PAGE_TOKENS, Executor, Move
from ninfer.program.checkpoints import Checkpoint, CheckpointStore, DeviceCopy, HostCopy
from ninfer.program.stores.disk_store import DiskStore, StoredFile, Written
from ninfer.program.stores.host_store import HostStore
from ninfer.program.stores.page_store import PageStore
from ninfer.program.stores.state_store import StateStore


@dataclass(slots=True, eq=False)
class CopyTransfer:
    """Implements the contract's Transfer. `device` and `host` are what is reserved for it; the
    task's result is None when input and output failed."""

    kind: TransferKind
    record: Checkpoint
    task: asyncio.Task[Written | bool | None]
    device: DeviceCopy | None = None
    host: HostCopy | None = None

    @property
    def checkpoint(self) -> CheckpointId:
        return self.record.checkpoint_id

    @property
    def is_done(self) -> bool:
        return self.task.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.task.add_done_callback(lambda _: callback())


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What a transfer may write, and the copying itself."""

    work: Coroutine[Any, Any, Written | bool | None]
    device: DeviceCopy | None = None
    host: HostCopy | None = None


class Transfers:
    """The one open transfer of a Program. Misuse is an InvariantError."""

    def __init__(
        self,
        executor: Executor,
        checkpoints: CheckpointStore,
        pages: PageStore,
        states: StateStore,
        host: HostStore,
        disk: DiskStore | None,
    ) -> None:
        self._executor = executor
        self._checkpoints = checkpoints
        self._pages = pages
        self._states = states
        self._host = host
        self._disk = disk
        self._open: CopyTransfer | None = None
        page_bytes, slot_bytes = executor.page_bytes, executor.slot_bytes
        self._has_states = slot_bytes > 0
        self._num_state_blocks = -(-slot_bytes // page_bytes) if page_bytes > 0 else 0

    @property
    def is_running(self) -> bool:
        return self._open is not None and not self._open.is_done

    def begin(
        self, kind: TransferKind, checkpoint_id: CheckpointId, note: Mapping[str, object] | None
    ) -> CopyTransfer | None:
        """Needs a running event loop."""
        if self._open is not None:
            raise InvariantError("another transfer is open")
        record = self._checkpoints.get(checkpoint_id)
        _check_ends(kind, record)
        if self._host.num_blocks == 0:
            return None
        reserved = self._reserve(kind, record, note)
        if reserved is None:
            return None
        record.is_leased = True
        task = asyncio.get_running_loop().create_task(reserved.work)
        self._open = CopyTransfer(kind, record, task, reserved.device, reserved.host)
        return self._open

    def settle(self, transfer: CopyTransfer) -> bool:
        if transfer is not self._open:
            raise InvariantError("the transfer is not the open one")
        if not transfer.is_done:
            raise InvariantError("a transfer is settled while it runs")
        self._open, transfer.record.is_leased = None, False
        try:
            result = _result_of(transfer.task)
        except BaseException:
            self._give_back(transfer)
            raise
        return self._publish(transfer, result)

    def close(self) -> None:
        """Give up the open transfer, whether it still runs or not; what it copied is forgotten."""
        transfer, self._open = self._open, None
        if transfer is not None:
            if not transfer.task.cancel():
                _mark_retrieved(transfer.task)
            transfer.record.is_leased = False
            self._give_back(transfer)

    def slots(self) -> Iterator[int]:
        """Reserved by the open transfer."""
        if self._open is not None and self._open.device is not None:
            slot = self._open.device.slot
            if slot is not None:
                yield slot

    def blocks(self) -> Iterator[int]:
        """Reserved by the open transfer."""
        if self._open is not None and self._open.host is not None:
            yield from self._open.host.blocks

    def page_owners(self) -> Collection[Checkpoint]:
        """Who holds pages that are not published yet."""
        is_reserved = self._open is not None and self._open.device is not None
        return (self._open.record,) if is_reserved and self._open is not None else ()

    def check(self) -> None:
        """Verify that exactly the open transfer's checkpoint is leased."""
        for record in self._checkpoints:
            is_open = self._open is not None and self._open.record is record
            if record.is_leased != is_open:
                raise InvariantError(f"{record} is leased without a transfer, or the reverse")

    def _reserve(
        self, kind: TransferKind, record: Checkpoint, note: Mapping[str, object] | None
    ) -> _Reserved | None:
        if kind is TransferKind.DEMOTE:
            return self._reserve_demote(record)
        if kind is TransferKind.RESTORE:
            return self._reserve_restore(record)
        if kind is TransferKind.STORE:
            return self._reserve_store(record, {} if note is None else note)
        return self._reserve_fetch(record)

    def _reserve_demote(self, record: Checkpoint) -> _Reserved | None:
        taken = self._take_blocks(_device_of(record))
        if taken is None:
            return None
        host, move = taken
        return _Reserved(self._save(move), host=host)

    def _reserve_restore(self, record: Checkpoint) -> _Reserved | None:
        host = _host_of(record)
        if self._has_states and self._states.num_free == 0:
            return None
        known = [self._host.page_of(block) for block in host.pages]
        pages = self._pages.share(record, known)
        if pages is None:
            return None
        slot = self._states.acquire() if self._has_states else None
        new = zip(pages, host.pages, known, strict=True)
        moved = tuple((page, block) for page, block, shared in new if shared is None)
        move = Move(moved, slot, host.state)
        return _Reserved(self._load(move), device=DeviceCopy(pages, slot))

    def _reserve_store(self, record: Checkpoint, note: Mapping[str, object]) -> _Reserved | None:
        disk = self._disk
        num_blocks = -(-record.frontier // PAGE_TOKENS) + self._num_state_blocks
        if disk is None or not disk.has_room(num_blocks):
            return None
        if record.host is not None:
            return _Reserved(self._store(disk, record, record.host, None, note))
        taken = self._take_blocks(_device_of(record))
        if taken is None:
            return None
        host, move = taken
        return _Reserved(self._store(disk, record, host, move, note), host=host)

    def _reserve_fetch(self, record: Checkpoint) -> _Reserved | None:
        file = record.file
        if self._disk is None or file is None:
            raise InvariantError(f"{record} is not on disk")
        blocks = self._host.take([None] * (file.num_pages + self._num_state_blocks))
        if blocks is None:
            return None
        host = HostCopy(blocks[: file.num_pages], blocks[file.num_pages :])
        return _Reserved(self._fetch(self._disk, file, host), host=host)

    def _take_blocks(self, device: DeviceCopy) -> tuple[HostCopy, Move] | None:
        """Blocks for a copy of this, and what of it has to be copied."""
        known = [self._host.block_of(page) for page in device.pages]
        blocks = self._host.take([*known, *[None] * self._num_state_blocks])
        if blocks is None:
            return None
        host = HostCopy(blocks[: len(known)], blocks[len(known) :])
        new = zip(device.pages, host.pages, known, strict=True)
        moved = tuple((page, block) for page, block, shared in new if shared is None)
        return host, Move(moved, device.slot, host.state)

    async def _save(self, move: Move) -> bool:
        await self._executor.save(move)
        return True

    async def _load(self, move: Move) -> bool:
        await self._executor.load(move)
        return True

    async def _store(
        self,
        disk: DiskStore,
        record: Checkpoint,
        host: HostCopy,
        move: Move | None,
        note: Mapping[str, object],
    ) -> Written | None:
        if move is not None:
            await self._executor.save(move)
        blocks = [self._executor.host_blocks[block] for block in host.blocks]
        return await disk.write(record.frontier, len(host.pages), blocks, note)

    async def _fetch(self, disk: DiskStore, file: StoredFile, host: HostCopy) -> bool:
        return await disk.read(file, [self._executor.host_blocks[block] for block in host.blocks])

    def _publish(self, transfer: CopyTransfer, result: Written | bool | None) -> bool:
        record = transfer.record
        if transfer.kind is TransferKind.STORE:
            self._give_back(transfer)
            if not isinstance(result, Written):
                return False
            self._checkpoints.lose_files(result.removed)
            record.file = result.file
        elif not result:
            self._give_back(transfer)
            self._lose_file(record)
            return False
        elif transfer.device is not None:
            record.device = transfer.device
            self._pair(record)
        else:
            record.host = transfer.host
            self._pair(record)
        return True

    def _pair(self, record: Checkpoint) -> None:
        """Pages that the frontier fills are the same on both sides for ever; a last page that is
        not full is still written behind the frontier."""
        if record.device is None or record.host is None:
            return
        num_full = record.frontier // PAGE_TOKENS
        device, host = record.device.pages[:num_full], record.host.pages[:num_full]
        for page, block in zip(device, host, strict=True):
            if self._host.page_of(block) is None:
                self._host.pair(block, page)

    def _give_back(self, transfer: CopyTransfer) -> None:
        if transfer.device is not None:
            self._pages.close(transfer.record)
            if transfer.device.slot is not None:
                self._states.release(transfer.device.slot)
        if transfer.host is not None:
            self._host.release(transfer.host.blocks)

    def _lose_file(self, record: Checkpoint) -> None:
        if record.file is not None and self._disk is not None:
            self._disk.discard(record.file)
            record.file = None


def _check_ends(kind: TransferKind, record: Checkpoint) -> None:
    starts, ends = {
        TransferKind.DEMOTE: (record.device, record.host),
        TransferKind.RESTORE: (record.host, record.device),
        TransferKind.STORE: (record.host or record.device, record.file),
        TransferKind.FETCH: (record.file, record.host),
    }[kind]
    if starts is None:
        raise InvariantError(f"{record} is not where a {kind.value} starts")
    if ends is not None:
        raise InvariantError(f"{record} is already where a {kind.value} ends")


def _device_of(record: Checkpoint) -> DeviceCopy:
    if record.device is None:
        raise InvariantError(f"{record} is not on the device")
    return record.device


def _host_of(record: Checkpoint) -> HostCopy:
    if record.host is None:
        raise InvariantError(f"{record} is not on the host")
    return record.host


def _mark_retrieved(task: asyncio.Task[Written | bool | None]) -> None:
    """The failure of a transfer that is given up is nobody's news; asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _result_of(task: asyncio.Task[Written | bool | None]) -> Written | bool | None:
    if task.cancelled():
        raise DeviceError("a transfer was cancelled from outside")
    return task.result()
