"""Large work is done two at a time; nothing else waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from ninfer.contract.abandonment import WorkAbandoned, stop_if_abandoned
from ninfer.frontend import template_bounds
from ninfer.frontend.host_work import (
    MAX_INLINE_CHARACTERS,
    MAX_LARGE_AT_ONCE,
    MAX_SHARED_CHARACTERS,
    HostWork,
)
from tests.helpers.demo_frontend import chat, demo_frontend, turn

LARGE = MAX_SHARED_CHARACTERS + 1


class Gate:
    """Work that holds its thread until it is opened; counts how much of it runs and has run."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._lock = threading.Lock()
        self.running = self.most_running = self.started = 0

    def open(self) -> None:
        self._is_open.set()

    def work(self) -> str:
        with self._lock:
            self.started += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        assert self._is_open.wait(10)
        with self._lock:
            self.running -= 1
        return "done"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  other threads bring it about
            await asyncio.sleep(0.002)


async def test_large_work_runs_two_at_a_time_and_the_rest_does_not_wait() -> None:
    host, gate = HostWork(), Gate()
    large = [asyncio.create_task(host.run(gate.work, LARGE)) for _ in range(6)]
    await until(lambda: gate.running == MAX_LARGE_AT_ONCE)
    async with asyncio.timeout(60):
        for size in (MAX_INLINE_CHARACTERS, MAX_INLINE_CHARACTERS + 1, MAX_SHARED_CHARACTERS):
            assert await host.run(lambda: "quick", size) == "quick"
    gate.open()
    assert await asyncio.gather(*large) == ["done"] * 6
    assert gate.most_running == MAX_LARGE_AT_ONCE


async def test_cancelled_work_keeps_its_place_while_it_runs_and_loses_it_while_it_waits() -> None:
    host, gate = HostWork(), Gate()
    running = [asyncio.create_task(host.run(gate.work, LARGE)) for _ in range(MAX_LARGE_AT_ONCE)]
    await until(lambda: gate.running == MAX_LARGE_AT_ONCE)
    waiting = asyncio.create_task(host.run(gate.work, LARGE))
    await asyncio.sleep(0)
    for task in (*running, waiting):
        task.cancel()
    await asyncio.wait((*running, waiting))
    late = asyncio.create_task(host.run(gate.work, LARGE))
    await asyncio.sleep(0.05)
    assert gate.started == MAX_LARGE_AT_ONCE, "a cancelled request freed a place still in use"
    gate.open()
    assert await late == "done"
    assert gate.started == MAX_LARGE_AT_ONCE + 1, "cancelled work was started"


@pytest.mark.parametrize("size", [1, MAX_SHARED_CHARACTERS, LARGE])
async def test_errors_come_back(size: int) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await HostWork().run(fail, size)


async def test_cancelled_work_that_looks_up_ends_and_frees_its_place() -> None:
    host = HostWork()
    num_stopped = 0
    has_begun = threading.Event()

    def work() -> None:
        nonlocal num_stopped
        has_begun.set()
        try:
            while True:
                stop_if_abandoned()
                time.sleep(0.001)
        except WorkAbandoned:
            num_stopped += 1
            raise

    def has_stopped(count: int) -> bool:
        return num_stopped == count

    for count, size in enumerate((MAX_SHARED_CHARACTERS, LARGE), 1):
        has_begun.clear()
        task = asyncio.create_task(host.run(work, size))
        await until(has_begun.is_set)
        task.cancel()
        await until(partial(has_stopped, count))


async def test_rendering_ends_when_nobody_waits_for_it() -> None:
    frontend = demo_frontend()
    looks = 0
    has_begun = threading.Event()

    def look_up() -> None:
        nonlocal looks
        looks += 1
        has_begun.set()
        stop_if_abandoned()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_bounds, "stop_if_abandoned", look_up)
        messages = tuple(turn("user", "a") for _ in range(100_000))
        task = asyncio.create_task(frontend.prepare_chat(chat(*messages)))
        await until(has_begun.is_set)
        task.cancel()
        await asyncio.wait((task,))
        await asyncio.sleep(0.05)
        seen = looks
        await asyncio.sleep(0.2)
        assert looks == seen, "rendering went on"
    assert (await frontend.prepare_chat(chat(turn("user", "a")))).num_tokens > 1
