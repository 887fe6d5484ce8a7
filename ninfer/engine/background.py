"""Background: transfers the context cache wants for itself, whenever the transfer slot is free."""

from __future__ import annotations

import asyncio
from typing import Final

from ninfer.engine.context_protocol import ContextPolicy, TransferPlan
from ninfer.engine.residency import Residency
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.transfer_desk import Ended, TransferDesk

ASK_EVERY: Final = 16
"""Boundaries between two questions while nothing else has changed."""
SHUTDOWN_S: Final = 5.0
"""Longest time for what is still to be stored when the engine stops."""


class Background:
    def __init__(
        self,
        scheduler: Scheduler,
        policy: ContextPolicy,
        desk: TransferDesk,
        residency: Residency,
    ) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._desk = desk
        self._residency = residency
        self._asked_at = -1
        self._num_skipped = 0

    def begin_next(self, *, is_idle: bool) -> None:
        """Begin a transfer if the slot is free and the context cache wants one."""
        if not self._desk.is_free:
            return
        revision = self._scheduler.revision
        self._num_skipped += 1
        if not is_idle and revision == self._asked_at and self._num_skipped < ASK_EVERY:
            return
        self._asked_at, self._num_skipped = revision, 0
        self._ask(is_idle=is_idle)

    async def finish(self) -> None:
        """Everything that is worth it, for at most SHUTDOWN_S; the engine is idle."""
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                while not self._desk.is_free or self._ask(is_idle=True):
                    await asyncio.sleep(0)  # so that the time counts while all is refused
                    await self._desk.wait_done()
                    self._desk.settle()
        except TimeoutError:
            return

    def _ask(self, *, is_idle: bool) -> bool:
        """Begin what the context cache wants, or tell it that there is no room for that; False
        when it wants nothing."""
        plan = self._policy.next_transfer(is_idle=is_idle)
        if plan is None:
            return False
        if not self._desk.begin(plan, lambda ended: self._note_end(plan, ended)):
            self._policy.transferred(plan, None, is_ok=False)
        return True

    def _note_end(self, plan: TransferPlan, ended: Ended) -> None:
        if ended.is_ok:
            self._residency.note_moved(ended)
        self._policy.transferred(plan, ended.transfer, is_ok=ended.is_ok)
