"""The one launched unit of a Program: its rows, its task and the checks of what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import PendingBatch
from ninfer.contract.units import RowOutput, UnitRow
from ninfer.program.sequence_record import SequenceRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Unit(Generic[T]):
    """The launched unit. `batch` is None for a scoring unit, which settles itself."""

    sequences: tuple[SequenceRecord, ...]
    rows: tuple[UnitRow, ...]
    task: asyncio.Task[T]
    batch: PendingBatch | None = None


def check_outputs(rows: Sequence[UnitRow], outputs: tuple[RowOutput, ...], vocab_size: int) -> None:
    """Raise InvariantError unless every row has just the answer it asked for."""
    if len(outputs) != len(rows):
        raise InvariantError(f"the executor answered {len(outputs)} of {len(rows)} rows")
    for row, output in zip(rows, outputs, strict=True):
        is_expected = row.sample is not None and output.is_finite
        if (output.token is not None) != is_expected:
            raise InvariantError("the executor answered a row with more or less than asked")
        if output.token is not None and not 0 <= output.token.token_id < vocab_size:
            raise InvariantError(f"the executor chose token {output.token.token_id}")


async def result_of(task: asyncio.Task[T]) -> T:
    """The task's result. The task survives the waiter's cancellation, which is raised when the
    task is done."""
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        mark_retrieved(task)
        raise cancellation
    if task.cancelled():
        raise DeviceError("the executor's work was cancelled from outside")
    return task.result()


def mark_retrieved(task: asyncio.Task[Any]) -> None:
    """The failure of a unit that is given up is nobody's news; asyncio would log it."""
    if not task.cancelled():
        task.exception()


def check_accepted(outputs: tuple[RowOutput, ...], accepted: Sequence[int]) -> None:
    if len(accepted) != len(outputs):
        raise InvariantError(f"{len(accepted)} accepted counts for {len(outputs)} rows")
    for index, (output, count) in enumerate(zip(outputs, accepted, strict=True)):
        num_produced = 0 if output.token is None else 1
        if not 0 <= count <= num_produced:
            raise InvariantError(f"row {index} accepts {count} of {num_produced} tokens")
