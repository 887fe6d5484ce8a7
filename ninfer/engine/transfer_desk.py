"""TransferDesk: the one open transfer of the Program, and whom its end concerns.

begin -> (the copies run beside units) -> settle, at a boundary -> the beginner is told
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Program, Transfer, TransferKind
from ninfer.engine.context_protocol import TransferPlan

_AT_MEMORY_SPEED: Final = frozenset({TransferKind.DEMOTE, TransferKind.RESTORE})


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A transfer that was settled. `num_tokens` is its checkpoint's frontier."""

    transfer: Transfer
    is_ok: bool
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    plan: TransferPlan
    transfer: Transfer
    num_tokens: int
    begun_s: float
    on_end: Callable[[Ended], None]


class TransferDesk:
    """Used by the worker task alone."""

    def __init__(
        self, program: Program, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """`wake` is called on the loop when the copies have ended."""
        self._program = program
        self._clock = clock
        self._wake = wake
        self._open: _Open | None = None

    @property
    def is_free(self) -> bool:
        return self._open is None

    @property
    def ends_soon(self) -> bool:
        """A copy between device and host runs: waiting for it costs less than losing anything."""
        return self._open is not None and self._open.plan.kind in _AT_MEMORY_SPEED

    def begin(self, plan: TransferPlan, on_end: Callable[[Ended], None]) -> bool:
        """False, and nothing has changed, when the destination has no room. InvariantError while
        another transfer is open."""
        if self._open is not None:
            raise InvariantError("another transfer is open")
        transfer = self._program.begin_transfer(plan.kind, plan.checkpoint, plan.note)
        if transfer is None:
            return False
        num_tokens = self._program.checkpoint(plan.checkpoint).frontier
        self._open = _Open(plan, transfer, num_tokens, self._clock(), on_end)
        transfer.add_done_callback(self._wake)
        return True

    def settle(self) -> bool:
        """Settle the open transfer if its copies have ended; True when there was one."""
        ended = self._open
        if ended is None or not ended.transfer.is_done:
            return False
        self._open = None
        is_ok = self._program.settle_transfer(ended.transfer)
        seconds = self._clock() - ended.begun_s
        ended.on_end(Ended(ended.transfer, is_ok, ended.num_tokens, seconds))
        return True

    async def wait_done(self) -> None:
        """Until the copies of the open transfer have ended; it is not settled then."""
        if self._open is not None:
            done = asyncio.Event()
            self._open.transfer.add_done_callback(done.set)
            await done.wait()
