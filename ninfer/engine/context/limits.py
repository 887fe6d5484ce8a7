"""What the context cache may take, and what the memory is that it works with."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.units import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Sizes as the executor has them.

    page_bytes   a page in all layers, and a host block
    slot_bytes   a StateImage; 0 for models of attention alone
    has_disk     the Program has a disk tier
    """

    page_bytes: int
    slot_bytes: int
    has_disk: bool = False

    @property
    def has_states(self) -> bool:
        return self.slot_bytes > 0

    @property
    def num_state_blocks(self) -> int:
        """Host blocks of a StateImage."""
        return -(-self.slot_bytes // self.page_bytes) if self.page_bytes > 0 else 0


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bounds.

    max_entries         checkpoints in all tiers
    max_id_bytes        of the token ids and what else identifies them, shared parts once
    min_tokens          fewest tokens that are worth a checkpoint
    min_stored_tokens   fewest tokens that are worth a file
    """

    max_entries: int = 1024
    max_id_bytes: int = 16 << 20
    min_tokens: int = PAGE_TOKENS
    min_stored_tokens: int = 512
