"""Retention: which entry is worth least, and what giving it up would free.

    worth = time to have it again, halved for every HALF_LIFE requests since it was last wanted
    first whom the session has gone past, then the rest, last what sessions share

The catalogue gives the order; how much memory a victim frees is asked of the Program, for the
first few in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from ninfer.contract.cache import CheckpointKind, Tier
from ninfer.contract.program import Amounts, Program
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.records import Entry

HALF_LIFE: Final = 64
"""Requests."""
SHARED_DEMAND_WINDOW: Final = 256
"""Requests for which a shared prefix is kept after its last use."""
_NUM_COMPARED: Final = 4
"""Entries whose release is worked out exactly before one of them is the victim."""


class Retention:
    def __init__(self, program: Program, costs: CostModel, *, has_states: bool) -> None:
        self._program = program
        self._costs = costs
        self._has_states = has_states

    def recovery_tokens(self, entry: Entry) -> int:
        """To compute from the next best entry to have it again, at least 1. Without StateImages
        that may be a longer one."""
        num_tokens = entry.marginal_tokens
        if entry.children and not self._has_states:
            num_tokens = min(num_tokens, entry.frontier % PAGE_TOKENS)
        return max(1, num_tokens)

    def rank(self, entry: Entry, now: int, *, tier: Tier | None) -> tuple[int, float]:
        """Ascending in what is lost with the copy in `tier` (None: with all copies); seconds in the
        second place."""
        return segment(entry, now), self.worth_s(entry, now, tier=tier)

    def worth_s(self, entry: Entry, now: int, *, tier: Tier | None) -> float:
        """Seconds that the copy in `tier` saves when it is wanted, less with age."""
        seconds = self._costs.prefill_s(self.recovery_tokens(entry))
        if tier is Tier.DEVICE:
            if entry.is_on_host:
                seconds = min(seconds, self._costs.transfer_s(entry.frontier, Tier.HOST))
            elif entry.is_on_disk:
                seconds = min(seconds, self._costs.transfer_s(entry.frontier, Tier.DISK))
        elif tier is Tier.HOST and (entry.is_on_device or entry.is_on_disk):
            lower = Tier.HOST if entry.is_on_device else Tier.DISK
            seconds = min(seconds, self._costs.transfer_s(entry.frontier, lower))
        age = (now - entry.last_used) / HALF_LIFE
        return seconds * math.exp2(-age)

    def order(self, entries: Iterable[Entry], now: int, *, tier: Tier | None) -> list[Entry]:
        """Whom to give up first, by worth for what it is likely to free; an entry as such (`tier`
        is None) by worth alone."""

        def key(entry: Entry) -> tuple[int, float, int]:
            level, worth_s = self.rank(entry, now, tier=tier)
            if tier is None:
                return level, worth_s, entry.order
            parent = entry.parent
            num_own = entry.num_pages - (0 if parent is None else parent.num_pages)
            return level, worth_s / max(1, num_own), entry.order

        return sorted(entries, key=key)

    def victims(
        self,
        ordered: Iterable[Entry],
        now: int,
        *,
        tier: Tier,
        useful: Callable[[Amounts], int],
    ) -> list[Entry]:
        """Whom to give up together so that something `useful` becomes free: mostly one. Empty when
        nothing would. `ordered` is in the order of `order`; whoever cannot go is not in it."""
        entries = iter(ordered)
        seen: list[Entry] = []
        while batch := list(islice(entries, _NUM_COMPARED)):
            best: tuple[tuple[int, float], Entry] | None = None
            for entry in batch:
                amount = useful(self._program.reclaimable([entry.checkpoint]))
                if amount > 0:
                    level, worth_s = self.rank(entry, now, tier=tier)
                    rank = level, worth_s / amount
                    if best is None or rank < best[0]:
                        best = rank, entry
            if best is not None:
                return [best[1]]
            seen += batch
        return self._group(seen, useful)

    def _group(self, ordered: Sequence[Entry], useful: Callable[[Amounts], int]) -> list[Entry]:
        """Nobody alone frees anything: the shortest beginning of the order that does, less those
        that have no part in it."""

        def frees(entries: Sequence[Entry]) -> bool:
            return useful(self._program.reclaimable([e.checkpoint for e in entries])) > 0

        if not frees(ordered):
            return []
        low, high = 1, len(ordered)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if frees(ordered[:middle]) else (middle + 1, high)
        last = ordered[low - 1]
        group = [entry for entry in ordered[: low - 1] if are_related(entry, last)] + [last]
        return group if frees(group) else list(ordered[:low])


def segment(entry: Entry, now: int) -> int:
    """0: superseded, 1: the rest, 2: shared and in demand."""
    if (
        entry.kind is CheckpointKind.STABLE_PREFIX
        and entry.is_shared
        and now - entry.last_used <= SHARED_DEMAND_WINDOW
    ):
        return 2
    return 0 if entry.is_superseded else 1


def are_related(first: Entry, second: Entry) -> bool:
    """One is a prefix of the other."""
    short, long = sorted((first, second), key=lambda entry: entry.frontier)
    above: Entry | None = long
    while above is not None and above is not short:
        above = above.parent
    return above is short
