"""Inbox: all that others tell the worker. Everything in it takes effect at a worker boundary."""

from __future__ import annotations

import asyncio
from collections import deque

from ninfer.contract.errors import NInferError
from ninfer.engine.request_record import RequestRecord


class Inbox:
    """Filled from the loop, emptied by the worker; nothing here waits for the worker."""

    def __init__(self) -> None:
        self._submitted: deque[RequestRecord] = deque()
        self._cancelled: deque[RequestRecord] = deque()
        self._eviction: NInferError | None = None
        self._is_stopping = False
        self._wants_flush = False
        self._wake = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def num_submitted(self) -> int:
        """Requests the worker has not taken in yet."""
        return len(self._submitted)

    def submit(self, record: RequestRecord) -> None:
        self._submitted.append(record)
        self._wake.set()

    def cancel(self, record: RequestRecord) -> None:
        """Idempotent, and without effect on a request that has ended."""
        if not record.is_cancelled:
            record.is_cancelled = True
            self._cancelled.append(record)
            self._wake.set()

    def evict(self, error: NInferError) -> None:
        """End every request there is now with `error`."""
        self._eviction = error
        self._wake.set()

    def stop(self, error: NInferError) -> None:
        """End every request with `error`, then the worker."""
        self._is_stopping = True
        self.evict(error)

    def take_submitted(self) -> list[RequestRecord]:
        taken = list(self._submitted)
        self._submitted.clear()
        return taken

    def take_cancelled(self) -> list[RequestRecord]:
        taken = list(self._cancelled)
        self._cancelled.clear()
        return taken

    def take_eviction(self) -> NInferError | None:
        taken, self._eviction = self._eviction, None
        return taken

    def ask_flush(self) -> None:
        """Have the context cache released."""
        self._wants_flush = True
        self._wake.set()

    def take_flush(self) -> bool:
        taken, self._wants_flush = self._wants_flush, False
        return taken

    def wake(self) -> None:
        """Something the worker waits for has happened."""
        self._wake.set()

    async def wait(self) -> None:
        """Until something was put in since the last wait."""
        await self._wake.wait()
        self._wake.clear()
