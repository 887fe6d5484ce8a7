"""Evicted: digests of checkpoints that were given up, to tell why a prompt finds nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.identity import Identity
from ninfer.engine.context.records import Entry

MAX_EVICTED: Final = 4096


class Evicted:
    """The newest `max_evicted` are remembered."""

    def __init__(self, max_evicted: int = MAX_EVICTED) -> None:
        self._max_evicted = max_evicted
        self._digests: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._tails: dict[bytes, dict[int, set[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, entry: Entry) -> None:
        """The entry's checkpoint is given up."""
        self.discard(entry.digest)
        length = entry.frontier % PAGE_TOKENS
        self._digests[entry.digest] = entry.page_digest, length
        self._tails.setdefault(entry.page_digest, {}).setdefault(length, set()).add(entry.digest)
        while len(self._digests) > self._max_evicted:
            self.discard(next(iter(self._digests)))

    def discard(self, digest: bytes) -> None:
        """These tokens have a checkpoint again, or it was so long ago."""
        if digest not in self._digests:
            return
        page_digest, length = self._digests.pop(digest)
        lengths = self._tails[page_digest]
        lengths[length].discard(digest)
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._tails[page_digest]

    def clear(self) -> None:
        self._digests.clear()
        self._tails.clear()

    def has_between(self, identity: Identity, least: int, limit: int) -> bool:
        """Whether a prefix of more than `least` and at most `limit` tokens was given up."""
        for depth in range(least // PAGE_TOKENS, limit // PAGE_TOKENS + 1):
            for length, digests in self._tails.get(identity.digests[depth], {}).items():
                frontier = depth * PAGE_TOKENS + length
                if least < frontier <= limit and identity.digest(frontier) in digests:
                    return True
        return False
