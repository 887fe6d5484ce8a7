"""Keeper: the checkpoints the context cache owns, from being made to being given up.

It is the only one that releases them or drops copies, and never one that a request has chosen or a
transfer names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ninfer.contract.cache import CheckpointId, CheckpointKind, Tier
from ninfer.contract.program import Amounts, Program
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.catalogue import Catalogue
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.evicted import Evicted
from ninfer.engine.context.identity import Identity
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context.page_tree import PageTree
from ninfer.engine.context.records import Entry, Session
from ninfer.engine.context.retention import Retention
from ninfer.engine.context.sessions import Sessions
from ninfer.engine.context_metrics import ContextMetrics

_SPARE_SHARE: Final = 32
"""One part in so many is given up at once when a bound is reached."""


class Keeper:
    """`now` counts requests."""

    def __init__(
        self,
        program: Program,
        memory: CacheMemory,
        limits: CacheLimits,
        costs: CostModel,
        metrics: ContextMetrics,
    ) -> None:
        self.tree = PageTree()
        self.catalogue = Catalogue(self.tree)
        self.sessions = Sessions(self.tree)
        self.evicted = Evicted()
        self.retention = Retention(program, costs, has_states=memory.has_states)
        self.now = 0
        self._program = program
        self._memory = memory
        self._limits = limits
        self._metrics = metrics
        self._orders: dict[Tier, tuple[int, list[Entry]]] = {}
        self._reclaimable: tuple[tuple[object, ...], Amounts] | None = None

    def add(
        self,
        checkpoint: CheckpointId,
        identity: Identity,
        frontier: int,
        kind: CheckpointKind,
        session: Session | None,
        order: int,
    ) -> Entry:
        """Own a checkpoint. May give up others, or this one, to stay within the bounds."""
        entry = self.catalogue.add(checkpoint, identity, frontier, kind, session, order)
        entry.last_used = self.now
        self.evicted.discard(entry.digest)
        self.refresh(entry)
        self.keep_bounds()
        return entry

    def refresh(self, entry: Entry) -> None:
        """Take over where its copies are; one that is nowhere is forgotten."""
        facts = self._program.checkpoint(entry.checkpoint)
        entry.is_on_device = facts.is_on_device
        entry.is_on_host = facts.is_on_host
        entry.is_on_disk = facts.is_on_disk
        self.catalogue.touch()
        if entry.is_lost and not facts.is_leased:
            self._release(entry)

    def is_idle(self, entry: Entry) -> bool:
        """Nobody has chosen it and no transfer names it."""
        return entry.num_pins == 0 and not self._program.checkpoint(entry.checkpoint).is_leased

    def release(self, entry: Entry) -> None:
        """Give it up for good."""
        self._metrics.evictions[entry.tier] += 1
        self._release(entry)

    def consumed(self, entry: Entry) -> None:
        """A sequence has taken the checkpoint over."""
        self.catalogue.remove(entry)

    def ordered(self, tier: Tier) -> list[Entry]:
        """Entries with a copy in a tier, whom to give up first first; some may not be idle."""
        known = self._orders.get(tier)
        if known is None or known[0] != self.catalogue.revision:
            entries = (entry for entry in self.catalogue if _is_in(entry, tier))
            known = self.catalogue.revision, self.retention.order(entries, self.now, tier=tier)
            self._orders[tier] = known
        return known[1]

    def ordered_for_files(self) -> list[Entry]:
        """All entries by what giving them up for good would lose, ascending."""
        return self.retention.order(self.catalogue, self.now, tier=None)

    def relieve_device(self, need: Amounts) -> bool:
        """One step towards free pages and slots."""

        def useful(amounts: Amounts) -> int:
            return min(need.pages, amounts.pages) + min(need.slots, amounts.slots)

        victims = self.victims(Tier.DEVICE, useful)
        self.drop_all(victims, Tier.DEVICE)
        return bool(victims)

    def clear_device(self) -> bool:
        """Give up all idle copies on the device; False when there are none."""
        idle = [entry for entry in self.ordered(Tier.DEVICE) if self.is_idle(entry)]
        self.drop_all(idle, Tier.DEVICE)
        return bool(idle)

    def relieve_host(self, num_blocks: int) -> bool:
        """One step towards free host blocks."""
        victims = self.victims(Tier.HOST, _useful_blocks(num_blocks))
        self.drop_all(victims, Tier.HOST)
        return bool(victims)

    def make_host_room(self, num_blocks: int, keep: Entry) -> bool:
        """Have so many host blocks free, at the cost of any but `keep`."""
        if num_blocks > self._program.capacity.num_host_blocks:
            return False
        while (lacking := num_blocks - self._program.free().host_blocks) > 0:
            victims = self.victims(Tier.HOST, _useful_blocks(lacking), keep)
            if not victims:
                return False
            self.drop_all(victims, Tier.HOST)
        return True

    def make_host_room_for(self, entry: Entry) -> bool:
        """Have the blocks free that its copy takes, at the cost of what is worth less, or change
        nothing. What went for it cannot come back in its place."""
        lacking = self.host_blocks_for(entry) - self._program.free().host_blocks
        if lacking <= 0:
            return True
        limit = self.retention.rank(entry, self.now, tier=None)
        lesser = [
            other
            for other in self.ordered_for_files()
            if other.is_on_host
            and other is not entry
            and self.retention.rank(other, self.now, tier=None) < limit
            and self.is_idle(other)
        ]

        def num_freed(count: int) -> int:
            ids = [other.checkpoint for other in lesser[:count]]
            return self._program.reclaimable(ids).host_blocks

        count = bisect_left(range(len(lesser) + 1), lacking, key=num_freed)
        if count > len(lesser):
            return False
        self.drop_all(lesser[:count], Tier.HOST)
        return True

    def victims(
        self, tier: Tier, useful: Callable[[Amounts], int], keep: Entry | None = None
    ) -> list[Entry]:
        """Idle entries whose copy in a tier should go first so that something useful is free."""
        idle = (entry for entry in self.ordered(tier) if entry is not keep and self.is_idle(entry))
        return self.retention.victims(idle, self.now, tier=tier, useful=useful)

    def drop_all(self, entries: Iterable[Entry], tier: Tier) -> None:
        for entry in entries:
            self._drop(entry, tier)

    def reclaimable(self) -> Amounts:
        """What would be free without all idle entries."""
        occupancy = self._program.occupancy()
        state = (
            self.catalogue.revision,
            occupancy.pages_used,
            occupancy.slots_used,
            occupancy.host_blocks_used,
            frozenset(entry.checkpoint for entry in self.catalogue if entry.num_pins > 0),
        )
        if self._reclaimable is None or self._reclaimable[0] != state:
            idle = [entry.checkpoint for entry in self.catalogue if self.is_idle(entry)]
            self._reclaimable = state, self._program.reclaimable(idle)
        return self._reclaimable[1]

    def host_blocks_for(self, entry: Entry) -> int:
        """Blocks a copy on the host takes, less those that the next shorter entry has there."""
        num_pages, shorter = entry.num_pages, entry.parent
        if shorter is not None and shorter.is_on_host:
            num_pages -= shorter.frontier // PAGE_TOKENS
        return num_pages + self._memory.num_state_blocks

    def keep_bounds(self) -> None:
        """Give up what exceeds the bounds, and some more."""
        limits, tree = self._limits, self.tree
        if len(self.catalogue) <= limits.max_entries and tree.num_bytes <= limits.max_id_bytes:
            return
        max_entries = limits.max_entries - limits.max_entries // _SPARE_SHARE
        max_bytes = limits.max_id_bytes - limits.max_id_bytes // _SPARE_SHARE
        victims = self._idle_in_order()
        while len(self.catalogue) > max_entries or tree.num_bytes > max_bytes:
            if tree.num_bytes > max_bytes and self.sessions.forget_oldest(is_bare=True):
                continue
            victim = next(victims, None)
            if victim is not None:
                self.release(victim)
            elif not (tree.num_bytes > max_bytes and self.sessions.forget_oldest(is_bare=False)):
                return

    def flush(self) -> None:
        """Give up everything that is idle, and all memory of what was."""
        for entry in list(self.catalogue):
            if self.is_idle(entry):
                self._release(entry)
        while self.sessions.forget_oldest(is_bare=False):
            pass
        self.evicted.clear()

    def _idle_in_order(self) -> Iterator[Entry]:
        for entry in self.ordered_for_files():
            if self.is_idle(entry):
                yield entry

    def _drop(self, entry: Entry, tier: Tier) -> None:
        """Give up the copy in a tier, and with the last one the entry."""
        order = self._orders.get(tier)
        is_current = order is not None and order[0] == self.catalogue.revision
        if tier is Tier.DEVICE and (entry.is_on_host or entry.is_on_disk):
            self._program.drop_device(entry.checkpoint)
            self._metrics.drops[tier] += 1
            self.refresh(entry)
        elif tier is Tier.HOST and (entry.is_on_device or entry.is_on_disk):
            self._program.drop_host(entry.checkpoint)
            self._metrics.drops[tier] += 1
            self.refresh(entry)
        else:
            self.release(entry)
        if order is not None and is_current:
            # What is left stays in the order it had; a victim does not make it worth a new sort.
            order[1].remove(entry)
            self._orders[tier] = self.catalogue.revision, order[1]

    def _release(self, entry: Entry) -> None:
        self._program.release(entry.checkpoint)
        self.evicted.add(entry)
        self.catalogue.remove(entry)


def _is_in(entry: Entry, tier: Tier) -> bool:
    match tier:
        case Tier.DEVICE:
            return entry.is_on_device
        case Tier.HOST:
            return entry.is_on_host
        case Tier.DISK:
            return entry.is_on_disk


def _useful_blocks(num_blocks: int) -> Callable[[Amounts], int]:
    return lambda amounts: min(num_blocks, amounts.host_blocks)
