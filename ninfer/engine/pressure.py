"""Pressure: what goes when memory is short, and the permits that come of it.

    optional checkpoints -> Snapshots of paused requests -> the youngest younger resident

A Snapshot goes to the host when it has room; it is given up (its request will replay) only for an
older request or the protected one. Nobody is paused for a younger row. When nothing of this helps
anybody, all checkpoints leave the device: sharing its last page with one costs a row a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from ninfer.contract.program import Amounts, Program
from ninfer.engine.context_protocol import ContextPolicy
from ninfer.engine.request_record import RequestRecord
from ninfer.engine.residency import Residency
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.transfer_desk import TransferDesk


class Relief(Enum):
    FREED = auto()
    """Something is free now; try again."""
    COMING = auto()
    """A transfer that runs will free something."""
    NONE = auto()
    """Nobody may be asked to give."""


class Pressure:
    def __init__(
        self,
        program: Program,
        scheduler: Scheduler,
        policy: ContextPolicy,
        desk: TransferDesk,
        residency: Residency,
        records: Mapping[int, RequestRecord],
    ) -> None:
        self._program = program
        self._scheduler = scheduler
        self._policy = policy
        self._desk = desk
        self._residency = residency
        self._records = records
        self._refused: dict[int, int] = {}

    def permit(self, record: RequestRecord, num_tokens: int) -> bool:
        """Reserve a resident's next unit, under pressure if need be. A row that was refused asks
        again once something has happened (`Scheduler.revision`)."""
        ticket, handle = record.ticket, record.resident
        if self._program.reserve_units(handle, num_tokens):
            self._refused.pop(ticket, None)
            return True
        if self._refused.get(ticket) == self._scheduler.revision:
            return False
        while self.relieve(ticket, self._program.missing(handle, num_tokens)) is Relief.FREED:
            if self._program.reserve_units(handle, num_tokens):
                return True
        self._refused[ticket] = self._scheduler.revision
        return False

    def clear_cache(self) -> bool:
        """The last resort, when no row gets its next unit and no transfer runs."""
        return self._desk.is_free and self._policy.clear_device()

    def forget_refusals(self) -> None:
        """Every row may ask again."""
        self._refused.clear()

    def forget(self, ticket: int) -> None:
        self._refused.pop(ticket, None)

    def relieve(self, ticket: int, need: Amounts) -> Relief:
        """One step towards `need` for the sake of `ticket`."""
        if self._policy.relieve(need):
            self._scheduler.note_event()
            return Relief.FREED
        relief = self._take_snapshot(ticket)
        if relief is not Relief.NONE:
            return relief
        return Relief.FREED if self.pause_victim(ticket) else Relief.NONE

    def pause_victim(self, ticket: int) -> bool:
        """Pause the youngest resident that may be paused for `ticket`; False without one."""
        victim = self._scheduler.victim(ticket)
        if victim is None:
            return False
        self._residency.pause(self._records[victim])
        return True

    def _take_snapshot(self, ticket: int) -> Relief:
        if self._desk.ends_soon:
            return Relief.COMING
        for owner in self._residency.snapshots_on_device():
            if self._desk.is_free and self._demote(owner):
                return Relief.FREED if self._desk.is_free else Relief.COMING
            if owner.ticket > ticket or ticket == self._scheduler.protected:
                self._residency.lose_snapshot(owner)
                return Relief.FREED
        return Relief.NONE

    def _demote(self, owner: RequestRecord) -> bool:
        """To the host, if need be in place of optional checkpoints there."""
        while not self._residency.demote(owner):
            lacking = self._program.pages_needed(owner.ledger.frontier) - self._free_blocks()
            if not self._policy.relieve(Amounts(host_blocks=max(1, lacking))):
                return False
        return True

    def _free_blocks(self) -> int:
        return self._program.free().host_blocks
