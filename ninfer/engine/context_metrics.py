"""ContextMetrics: counters of the context cache since the start, and what it holds now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ninfer.contract.cache import CacheUse, CheckpointKind, MissReason, Tier
from ninfer.contract.program import TransferKind


@dataclass(slots=True)
class ContextMetrics:
    """Keys that are not there count 0.

    hits, hit_tokens    requests that started from a checkpoint, and the tokens they saved
    misses              requests that could not reuse all they had in common, by reason
    captures            checkpoints made
    captures_refused    places where one was wanted and no memory was free for it
    evictions           checkpoints given up for good, by the best tier they were in
    drops               copies given up while another tier has one
    transfers           that ended well
    transfers_failed    whose bytes were damaged, or input and output failed
    transfers_refused   that found no room
    """

    hits: Counter[tuple[CheckpointKind, Tier]] = field(default_factory=Counter)
    hit_tokens: Counter[tuple[CheckpointKind, Tier]] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    captures: Counter[CheckpointKind] = field(default_factory=Counter)
    captures_refused: Counter[CheckpointKind] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    drops: Counter[Tier] = field(default_factory=Counter)
    transfers: Counter[TransferKind] = field(default_factory=Counter)
    transfers_failed: Counter[TransferKind] = field(default_factory=Counter)
    transfers_refused: Counter[TransferKind] = field(default_factory=Counter)

    def note_use(self, use: CacheUse) -> None:
        if use.kind is not None and use.tier is not None:
            self.hits[use.kind, use.tier] += 1
            self.hit_tokens[use.kind, use.tier] += use.num_tokens
        if use.miss is not None:
            self.misses[use.miss] += 1


@dataclass(frozen=True, slots=True)
class ContextHoldings:
    """What the context cache holds now.

    num_entries     checkpoints
    entries, tokens by tier; one with copies in several counts in each
    num_bytes       by tier, shared pages once; pages that running sequences hold too do not count
    id_bytes        of what identifies the entries and the known histories
    num_sessions    conversations that are remembered
    num_evicted     checkpoints that are remembered as given up
    """

    num_entries: int
    entries: Counter[Tier]
    tokens: Counter[Tier]
    num_bytes: Counter[Tier]
    id_bytes: int
    num_sessions: int
    num_evicted: int
