"""Compilers in processes of their own, which live no longer than whoever started them.

    parent: task ---- one pipe a worker ---> reader thread -> queue -> compile --> result

A worker ends when its pipe does: when the pool is left for whatever reason, and when the parent is
killed. Ctrl-C reaches the parent alone. Nothing here touches a file.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TypeAlias, cast

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels.compiler import CompiledKernel, compile_source
from ninfer.kernels.sources import KernelSource

Task: TypeAlias = tuple[KernelSource, str]
"""A source and an architecture."""
Compiler: TypeAlias = Callable[[KernelSource, str], CompiledKernel]


def compile_all(
    tasks: Sequence[Task], jobs: int, compiler: Compiler = compile_source
) -> Generator[tuple[int, CompiledKernel]]:
    """The index of a task with its kernel, as they get ready; at most `jobs` run at once.

    Raises the first error of a compiler, and DeviceError when one was killed. Closing the iterator
    ends all of them at once.
    """
    todo = iter(range(len(tasks)))
    with _workers(min(jobs, len(tasks)), compiler) as workers:
        for worker in workers.values():
            worker.take(next(todo), tasks)
        while busy := [channel for channel, worker in workers.items() if worker.index is not None]:
            for channel in cast(list[Connection], wait(busy)):
                worker = workers[channel]
                index, kernel = worker.result(tasks)
                worker.take(next(todo, None), tasks)
                yield index, kernel


@dataclass(slots=True)
class _Worker:
    """One process; `index` is the task it is at."""

    process: BaseProcess
    channel: Connection
    index: int | None = None

    def take(self, index: int | None, tasks: Sequence[Task]) -> None:
        self.index = index
        if index is not None:
            # One that has died meanwhile shows when its result is asked for.
            with suppress(OSError):
                self.channel.send(tasks[index])

    def result(self, tasks: Sequence[Task]) -> tuple[int, CompiledKernel]:
        index = self.index
        if index is None:
            raise InvariantError("a compiler without a task was asked for its result")
        try:
            outcome: CompiledKernel | Exception = self.channel.recv()
        except (EOFError, OSError):
            source, architecture = tasks[index]
            self.process.join(1.0)
            raise DeviceError(
                f"the compiler of {source.name} for {architecture} ended by itself"
                f" (exit code {self.process.exitcode})"
            ) from None
        if isinstance(outcome, Exception):
            raise outcome
        return index, outcome


@contextmanager
def _workers(count: int, compiler: Compiler) -> Iterator[dict[Connection, _Worker]]:
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, _Worker] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, compiler), daemon=True)
            workers[here] = _Worker(process, here)
            with _interrupts_held_back():
                process.start()
            there.close()
        yield workers
    finally:
        for worker in workers.values():
            if worker.process.pid is not None:
                worker.process.kill()
        for worker in workers.values():
            worker.channel.close()
            if worker.process.pid is not None:
                worker.process.join()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process that starts meanwhile keeps the mask, so that Ctrl-C at a terminal passes it by."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _work(channel: Connection, compiler: Compiler) -> None:
    """What a worker runs: one task after the other until the pipe ends."""
    tasks: SimpleQueue[Task] = SimpleQueue()
    threading.Thread(target=_receive, args=(channel, tasks), daemon=True).start()
    while True:
        source, architecture = tasks.get()
        try:
            outcome: CompiledKernel | Exception = compiler(source, architecture)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            outcome = error
        try:
            channel.send(outcome)
        except OSError:
            os._exit(1)


def _receive(channel: Connection, tasks: SimpleQueue[Task]) -> None:
    """The end of the pipe ends the process, whatever its other thread compiles."""
    while True:
        try:
            tasks.put(channel.recv())
        except (EOFError, OSError):
            os._exit(1)
