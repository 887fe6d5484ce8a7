"""Demand: how many conversations have asked for the same beginning."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_DEMANDS: Final = 1024


class Demand:
    """Counts sessions a digest, up to two; the digests asked for last are remembered."""

    def __init__(self, max_demands: int = MAX_DEMANDS) -> None:
        self._max_demands = max_demands
        self._sessions: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def note(self, digest: bytes, session: int) -> None:
        known = self._sessions.pop(digest, frozenset())
        self._sessions[digest] = known if len(known) > 1 else known | {session}
        if len(self._sessions) > self._max_demands:
            self._sessions.popitem(last=False)

    def is_observed(self, digest: bytes) -> bool:
        """Two independent sessions have asked for it."""
        return len(self._sessions.get(digest, ())) > 1

    def clear(self) -> None:
        self._sessions.clear()
