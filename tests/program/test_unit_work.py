"""A unit's coroutine starts at once, follows its device closely and always ends."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from typing import Any

import pytest

from ninfer.contract.errors import DeviceError
from ninfer.program.unit_work import UnitWork


class Device:
    """Work that is done once `polls` looks were in vain, and what has been seen of it."""

    def __init__(self, polls: int, error: Exception | None = None) -> None:
        self.polls = polls
        self.error = error
        self.events: list[str] = []
        self.on_end: Callable[[], object] = lambda: None

    async def run(self) -> str:
        self.events.append("queued")
        for _ in range(self.polls):
            await asyncio.sleep(0)
            self.events.append("looked")
        if self.error is not None:
            raise self.error
        self.events.append("ended")
        self.on_end()
        return "tokens"


async def test_it_is_queued_when_the_launch_returns() -> None:
    device = Device(2)
    work = UnitWork(device.run())
    assert device.events == ["queued"]
    assert await work.result() == "tokens"
    assert await work.result() == "tokens", "idempotent"


async def test_the_waiter_goes_on_in_the_turn_that_saw_the_end() -> None:
    device = Device(2)
    device.on_end = lambda: asyncio.get_running_loop().call_soon(device.events.append, "next turn")
    await UnitWork(device.run()).result()
    device.events.append("waiter")
    await asyncio.sleep(0)
    assert device.events == ["queued", "looked", "looked", "ended", "waiter", "next turn"]


async def test_what_waits_for_a_future_goes_on_without_a_waiter() -> None:
    gate, events = asyncio.Event(), []

    async def run() -> str:
        await asyncio.sleep(0)
        await gate.wait()
        await asyncio.sleep(0)
        events.append("ended")
        return "tokens"

    work = UnitWork(run())
    waiter = asyncio.create_task(work.result())
    await asyncio.sleep(0.001)
    assert not work.is_done()
    waiter.cancel()
    gate.set()
    await asyncio.sleep(0.001)
    assert events == ["ended"]
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert work.is_done()
    assert await work.result() == "tokens"


async def test_a_cancelled_waiter_leaves_only_when_the_device_is_done() -> None:
    device = Device(5)
    work = UnitWork(device.run())
    waiter = asyncio.create_task(work.result())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert device.events[-1] == "ended"
    assert work.is_done()


@pytest.mark.parametrize("polls", [0, 3])
async def test_what_it_raises_comes_out_of_the_result(polls: int) -> None:
    work = UnitWork(Device(polls, DeviceError("lost")).run())
    for _ in range(2):
        with pytest.raises(DeviceError, match="lost"):
            await work.result()


async def test_a_failure_behind_a_future_comes_out_too() -> None:
    async def run() -> None:
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        raise DeviceError("lost")

    with pytest.raises(DeviceError, match="lost"):
        await UnitWork(run()).result()


@pytest.mark.parametrize("pause", [False, True])
async def test_cancelled_work_is_a_device_error(pause: bool) -> None:
    async def run() -> None:
        if pause:
            await asyncio.sleep(0.001)
        raise asyncio.CancelledError

    with pytest.raises(DeviceError, match="cancelled from outside"):
        await UnitWork(run()).result()


async def test_asking_whether_it_is_done_looks_once_more() -> None:
    device = Device(2)
    work = UnitWork(device.run())
    assert not work.is_done()
    assert work.is_done()
    assert work.is_done()


async def test_a_failure_that_is_given_up_is_not_logged() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    work: UnitWork[str] = UnitWork(Device(0, DeviceError("lost")).run())
    assert work.is_done()
    work.forget()
    del work
    assert complaints == []


async def test_what_goes_on_as_a_task_is_a_coroutine_that_every_python_takes() -> None:
    """Tasks of Python 3.12 and later refuse coroutines that are generators."""
    gate = asyncio.get_running_loop().create_future()

    async def run() -> str:
        await gate
        return "tokens"

    work = UnitWork(run())
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    assert isinstance(task.get_coro(), types.CoroutineType)
    gate.set_result(None)
    assert await work.result() == "tokens"
