"""CheckpointStore: every checkpoint of a Program, where its copies lie and who may drop them.

A checkpoint is an owner of pages like a lane is, and holds its StateImage slot and host blocks by
one reference each. A copy is only ever published whole (`transfers.py`), so the three fields of a
record say exactly where the checkpoint can be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Amounts, CheckpointFacts
from ninfer.program.stores.disk_store import DiskStore, StoredFile
from ninfer.program.stores.host_store import HostStore
from ninfer.program.stores.page_store import PageStore
from ninfer.program.stores.state_store import StateStore


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """`slot` is None for models without StateImages."""

    pages: tuple[int, ...]
    slot: int | None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Host blocks of the pages and of the StateImage, each in order."""

    pages: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.pages + self.state


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One frontier and its copies. The page store knows the record as the owner of `device.pages`,
    and of the pages that a restore has reserved."""

    checkpoint_id: CheckpointId
    frontier: int
    device: DeviceCopy | None = None
    host: HostCopy | None = None
    file: StoredFile | None = None
    is_leased: bool = False

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint_id}"

    @property
    def num_copies(self) -> int:
        return sum(copy is not None for copy in (self.device, self.host, self.file))


class CheckpointStore:
    """Misuse is an InvariantError."""

    def __init__(
        self, pages: PageStore, states: StateStore, host: HostStore, disk: DiskStore | None
    ) -> None:
        """Checkpoints that `disk` found are there from the start."""
        self._pages = pages
        self._states = states
        self._host = host
        self._disk = disk
        self._records: dict[CheckpointId, Checkpoint] = {}
        self._last_id = 0
        self._notes: dict[CheckpointId, Mapping[str, object]] = {}
        for file in () if disk is None else disk.found:
            record = self._new(file.frontier)
            record.file = file
            self._notes[record.checkpoint_id] = file.note

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._records.values())

    @property
    def disk_notes(self) -> Mapping[CheckpointId, Mapping[str, object]]:
        """Of the checkpoints found at start that still have their file."""
        return {
            checkpoint_id: note
            for checkpoint_id, note in self._notes.items()
            if self._records[checkpoint_id].file is not None
        }

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint:
        record = self._records.get(checkpoint_id)
        if record is None:
            raise InvariantError(f"checkpoint {checkpoint_id} is not there")
        return record

    def facts(self, checkpoint_id: CheckpointId) -> CheckpointFacts:
        record = self.get(checkpoint_id)
        return CheckpointFacts(
            frontier=record.frontier,
            is_on_device=record.device is not None,
            is_on_host=record.host is not None,
            is_on_disk=record.file is not None,
            is_leased=record.is_leased,
        )

    def add(self, frontier: int, pages: tuple[int, ...], slot: int | None) -> Checkpoint:
        """A checkpoint on the device that shares these pages and this slot with their holders."""
        record = self._new(frontier)
        self._pages.share(record, pages)
        record.device = DeviceCopy(pages, None if slot is None else self._states.share(slot))
        return record

    def release(self, checkpoint_id: CheckpointId) -> None:
        """Forget every copy."""
        record = self._unleased(checkpoint_id)
        if record.file is not None and self._disk is not None:
            self._disk.discard(record.file)
        self._forget(record)

    def drop_device(self, checkpoint_id: CheckpointId) -> None:
        record = self._unleased(checkpoint_id)
        if record.device is None or record.num_copies == 1:
            raise InvariantError(f"{record} is not on the device, or nowhere else")
        self._drop_device(record)

    def drop_host(self, checkpoint_id: CheckpointId) -> None:
        record = self._unleased(checkpoint_id)
        if record.host is None or record.num_copies == 1:
            raise InvariantError(f"{record} is not on the host, or nowhere else")
        self._drop_host(record)

    def lose_files(self, names: Collection[str]) -> None:
        """These files are gone."""
        for record in self._records.values():
            if record.file is not None and record.file.name in names:
                record.file = None

    def reclaimable(self, checkpoints: Collection[CheckpointId]) -> Amounts:
        records = [self.get(checkpoint_id) for checkpoint_id in set(checkpoints)]
        device = [record for record in records if record.device is not None]
        slots = [
            r.device.slot for r in device if r.device is not None and r.device.slot is not None
        ]
        blocks = [block for r in records if r.host is not None for block in r.host.blocks]
        return Amounts(
            pages=self._pages.reclaimable(device),
            slots=self._states.reclaimable(slots),
            host_blocks=self._host.reclaimable(blocks),
            disk_bytes=sum(r.file.num_bytes for r in records if r.file is not None),
        )

    def clear(self) -> None:
        """Forget all copies in memory; files stay."""
        for record in tuple(self._records.values()):
            self._forget(record)

    def slots(self) -> Iterator[int]:
        """Of all copies on the device, a shared slot as often as it is held."""
        for record in self._records.values():
            if record.device is not None and record.device.slot is not None:
                yield record.device.slot

    def blocks(self) -> Iterator[int]:
        """Of all copies on the host, a shared block as often as it is held."""
        for record in self._records.values():
            if record.host is not None:
                yield from record.host.blocks

    def check(self) -> None:
        """Verify that records and the page store agree."""
        for checkpoint_id, record in self._records.items():
            if record.checkpoint_id != checkpoint_id or record.frontier < 1:
                raise InvariantError(f"{record} at frontier {record.frontier}")
            if record.device is not None and self._pages.page_ids(record) != record.device.pages:
                raise InvariantError(f"{record}: its pages and the page store differ")

    def _new(self, frontier: int) -> Checkpoint:
        self._last_id += 1
        record = Checkpoint(CheckpointId(self._last_id), frontier)
        self._records[record.checkpoint_id] = record
        return record

    def _unleased(self, checkpoint_id: CheckpointId) -> Checkpoint:
        record = self.get(checkpoint_id)
        if record.is_leased:
            raise InvariantError(f"{record} is leased")
        return record

    def _forget(self, record: Checkpoint) -> None:
        if record.device is not None:
            self._drop_device(record)
        if record.host is not None:
            self._drop_host(record)
        del self._records[record.checkpoint_id]
        self._notes.pop(record.checkpoint_id, None)

    def _drop_device(self, record: Checkpoint) -> None:
        copy, record.device = record.device, None
        self._pages.close(record)
        if copy is not None and copy.slot is not None:
            self._states.release(copy.slot)

    def _drop_host(self, record: Checkpoint) -> None:
        copy, record.host = record.host, None
        if copy is not None:
            self._host.release(copy.blocks)
