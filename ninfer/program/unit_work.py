"""UnitWork: an executor's coroutine that starts at once and ends whatever becomes of its waiter.

    UnitWork(coroutine)   runs to its first pause: the unit is queued when this returns
    result()              the rest

A coroutine that polls (pauses with asyncio.sleep(0)) goes on in the task that waits for it: what
follows the end of a unit then follows in the same turn of the loop. From the first future it waits
for, it goes on as a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from ninfer.contract.errors import DeviceError

T = TypeVar("T")


class UnitWork(Generic[T]):
    """Needs a running event loop. Everything the coroutine raises comes out of `result`."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._step()

    def is_done(self) -> bool:
        """Whether it has ended. Looks once more for a coroutine that polls."""
        if self._task is None and not self._outcome.done():
            self._step()
        self._take_over()
        return self._outcome.done()

    async def result(self) -> T:
        """What it returned or raised. It survives the waiter's cancellation, which is raised when
        it has ended."""
        cancellation: asyncio.CancelledError | None = None
        while not self._outcome.done():
            try:
                if self._task is None:
                    await asyncio.sleep(0)
                else:
                    await asyncio.wait((self._task,))
            except asyncio.CancelledError as error:
                cancellation = error
            if self._task is None:
                self._step()
            self._take_over()
        if cancellation is not None:
            self.forget()
            raise cancellation
        return self._outcome.result()

    def forget(self) -> None:
        """It has ended and nobody will ask how: the failure of a unit that is given up is nobody's
        news; asyncio would log it."""
        self._outcome.exception()

    def _step(self) -> None:
        """Run to the next pause."""
        try:
            pause = self._work.send(None)
        except StopIteration as stop:
            self._outcome.set_result(stop.value)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001, told by `result`
            self._fail(error)
        else:
            if pause is not None:
                loop = asyncio.get_running_loop()
                self._task = loop.create_task(_go_on(self._work, pause))

    def _take_over(self) -> None:
        """The outcome of the task, once it has one."""
        task = self._task
        if task is None or not task.done() or self._outcome.done():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._outcome.set_result(task.result())
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = DeviceError("the executor's work was cancelled from outside")
        self._outcome.set_exception(error)


async def _go_on(work: Coroutine[Any, Any, T], pause: Any) -> T:
    """The rest of a coroutine that paused at `pause`."""
    return await _Rest(work, pause)


class _Rest(Generic[T]):
    """What `_go_on` awaits. From Python 3.12 on a task takes no coroutine that is a generator."""

    def __init__(self, work: Coroutine[Any, Any, T], pause: Any) -> None:
        self._work = work
        self._pause = pause

    def __await__(self) -> Generator[Any, Any, T]:
        pause = self._pause
        while True:
            try:
                try:
                    sent = yield pause
                except BaseException as error:  # noqa: BLE001, whatever is thrown in is the work's
                    pause = self._work.throw(error)
                else:
                    pause = self._work.send(sent)
            except StopIteration as stop:
                result: T = stop.value
                return result
