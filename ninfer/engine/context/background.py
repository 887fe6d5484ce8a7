"""Background: transfers that make later ones cheap.

promotion   what a waiting request will start from comes up while it waits
demotion    what would be given up next goes to the host before memory is short
storing     shared prefixes and where sessions stand, when nothing else is to do
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from ninfer.contract.cache import CheckpointKind, Tier
from ninfer.contract.program import Program, TransferKind
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.keeper import Keeper
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context.notes import note_of
from ninfer.engine.context.records import Entry
from ninfer.engine.context.retention import segment
from ninfer.engine.context_protocol import TransferPlan

LOW_WATER: Final = 0.5
"""Free part of the device below which entries are copied to the host."""
HIGH_WATER: Final = 0.25
"""Free part of the device that promotions leave."""
_NUM_TRIED: Final = 4
"""Entries for which room on the host is sought at a time."""


class Background:
    def __init__(
        self,
        program: Program,
        memory: CacheMemory,
        limits: CacheLimits,
        costs: CostModel,
        keeper: Keeper,
    ) -> None:
        self._program = program
        self._memory = memory
        self._limits = limits
        self._costs = costs
        self._keeper = keeper
        self._has_none_at = -1

    def promotion(self, entry: Entry) -> TransferPlan | None:
        """Bring what a waiting request wants one tier up, as far as there is room to spare."""
        if entry.is_on_device or not self._keeper.is_idle(entry):
            return None
        if entry.is_on_host:
            kind, has_room = TransferKind.RESTORE, self._has_spare_room(entry)
        else:
            num_blocks = entry.num_pages + self._memory.num_state_blocks
            kind = TransferKind.FETCH
            has_room = self._keeper.make_host_room(num_blocks, keep=entry)
        if not has_room or kind in entry.refused:
            return None
        return TransferPlan(kind, entry.checkpoint)

    def next_plan(self, *, is_idle: bool) -> TransferPlan | None:
        """Files first when nothing else is to do: the end may be near."""
        return (self._storing() if is_idle else None) or self._demotion()

    def _has_spare_room(self, entry: Entry) -> bool:
        free, capacity = self._program.free(), self._program.capacity
        has_pages = free.pages - entry.num_pages >= HIGH_WATER * capacity.num_pages
        has_slots = free.slots - 1 >= HIGH_WATER * capacity.num_slots
        return has_pages and (has_slots or not self._memory.has_states)

    def _demotion(self) -> TransferPlan | None:
        free, capacity = self._program.free(), self._program.capacity
        is_low = free.pages < LOW_WATER * capacity.num_pages
        if self._memory.has_states:
            is_low = is_low or free.slots < LOW_WATER * (capacity.num_slots - 1)
        if not is_low or capacity.num_host_blocks == 0:
            return None
        revision = self._keeper.catalogue.revision
        if self._has_none_at == revision:
            return None
        wanted = (entry for entry in self._keeper.ordered(Tier.DEVICE) if self._is_to_demote(entry))
        first = list(islice(wanted, _NUM_TRIED))
        for entry in first:
            if self._keeper.make_host_room_for(entry):
                return TransferPlan(TransferKind.DEMOTE, entry.checkpoint)
        if not first:
            self._has_none_at = revision
        return None

    def _is_to_demote(self, entry: Entry) -> bool:
        if entry.is_on_host or TransferKind.DEMOTE in entry.refused:
            return False
        if segment(entry, self._keeper.now) == 0:
            return False
        num_tokens = self._keeper.retention.recovery_tokens(entry)
        transfer_s = self._costs.transfer_s(entry.frontier, Tier.HOST)
        is_worth_it = self._costs.prefill_s(num_tokens) > transfer_s
        return is_worth_it and not self._program.checkpoint(entry.checkpoint).is_leased

    def _storing(self) -> TransferPlan | None:
        if not self._memory.has_disk:
            return None
        for entry in reversed(self._keeper.ordered_for_files()):
            if self._is_to_store(entry):
                return TransferPlan(TransferKind.STORE, entry.checkpoint, note_of(entry))
        return None

    def _is_to_store(self, entry: Entry) -> bool:
        if entry.is_on_disk or TransferKind.STORE in entry.refused or entry.is_superseded:
            return False
        if entry.frontier < self._limits.min_stored_tokens:
            return False
        return is_lasting(entry) and not self._program.checkpoint(entry.checkpoint).is_leased


def is_lasting(entry: Entry) -> bool:
    """Worth a file: a shared prefix, where a session stands, or what was used as it is. A session
    whose client rewrites its answers stands before the last one."""
    if entry.kind in (CheckpointKind.STABLE_PREFIX, CheckpointKind.PROMPT_TAIL):
        return entry.is_explicit or entry.is_shared or entry.num_uses > 0 or entry.session is None
    is_rewritten = entry.session is not None and entry.session.is_rewritten
    if entry.kind is CheckpointKind.SESSION_END:
        return not is_rewritten
    if entry.kind is CheckpointKind.LONG_ANCHOR:
        return False
    return is_rewritten or entry.num_uses > 0
