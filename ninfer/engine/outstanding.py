"""Outstanding places: how many requests the engine has taken on and not yet let go of.

A place has two holders, the worker's response and the consumer. It is free again when both have
let go, in either order, and it is freed once.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from ninfer.contract.errors import InvariantError


class Holder(Enum):
    RESPONSE = auto()
    CONSUMER = auto()


class Place:
    """One outstanding request's place, made by `Outstanding.take`."""

    __slots__ = ("_holders", "_outstanding")

    def __init__(self, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._holders = {Holder.RESPONSE, Holder.CONSUMER}

    def let_go_response(self) -> None:
        """The terminal event is published. InvariantError when it was before."""
        if Holder.RESPONSE not in self._holders:
            raise InvariantError("a response was formed twice")
        self._let_go(Holder.RESPONSE)

    def let_go_consumer(self) -> None:
        """The consumer will not look at the request any more. Idempotent."""
        if Holder.CONSUMER in self._holders:
            self._let_go(Holder.CONSUMER)

    def _let_go(self, holder: Holder) -> None:
        self._holders.remove(holder)
        self._outstanding.note_let_go(holder, is_free=not self._holders)


class Outstanding:
    """Counts places up to a fixed limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_places = 0
        self._num_unanswered = 0
        self._all_free = asyncio.Event()
        self._all_free.set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    @property
    def num_places(self) -> int:
        """Places taken and not free again."""
        return self._num_places

    @property
    def num_unanswered(self) -> int:
        """Places whose response is not formed yet."""
        return self._num_unanswered

    def take(self) -> Place | None:
        """A place, or None when all are taken."""
        if self._num_places >= self._limit:
            return None
        self._num_places += 1
        self._num_unanswered += 1
        self._all_free.clear()
        self._all_answered.clear()
        return Place(self)

    def note_let_go(self, holder: Holder, *, is_free: bool) -> None:
        """Called by a Place, once for each holder."""
        if holder is Holder.RESPONSE:
            self._num_unanswered -= 1
            if self._num_unanswered == 0:
                self._all_answered.set()
        if is_free:
            self._num_places -= 1
            if self._num_places == 0:
                self._all_free.set()

    async def wait_all_free(self) -> None:
        await self._all_free.wait()

    async def wait_all_answered(self) -> None:
        await self._all_answered.wait()
