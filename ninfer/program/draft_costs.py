"""What rounds cost on this machine: measured at start, over the Executor protocol.

    (rows, inputs a row) in order of importance -> one step each -> MeasuredCosts

Steps of the shapes that matter most come first, and the measurement ends when its time is over;
what was not measured is read off a neighbour. Rows of a step begin at ordinal 0, in pages and slots
that every sequence writes before it reads: this is over before the first sequence is opened. Inputs
are random tokens: how many experts a step reads depends on how different they are.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import ROOT_SLOT, Capacity, Executor, SampleRow, UnitRow

_Times: TypeAlias = Mapping[int, Mapping[int, float]]

LONGEST_S: Final = 0.3
"""No step is begun that would probably end later than so long after the first."""
_TILE: Final = 8
"""Inputs that probably take about as long as one, where nobody knows: products go by tiles."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Steps of `num_rows` rows.

    steps       (inputs in all rows together, time), both ascending, at least one
    proposals   (proposed tokens of every row, what they add), both ascending, from (0, 0) on
    """

    num_rows: int
    steps: tuple[tuple[int, float], ...]
    proposals: tuple[tuple[int, float], ...] = ((0, 0.0),)

    def step(self, num_columns: int) -> float:
        """The time of the next larger step that is known; behind the last, in proportion as far as
        there is another tile."""
        place = bisect_left(self.steps, (num_columns, 0.0))
        if place < len(self.steps):
            return self.steps[place][1]
        most, longest = self.steps[-1]
        return longest * max(1.0, num_columns / max(most, _TILE))

    def proposal(self, num_tokens: int) -> float:
        """The time between those of the next smaller and the next larger known."""
        place = bisect_left(self.proposals, (num_tokens, 0.0))
        if place == 0 or place == len(self.proposals):
            return self.proposals[min(place, len(self.proposals) - 1)][1]
        (fewer, before), (more, behind) = self.proposals[place - 1 : place + 1]
        return before + (behind - before) * (num_tokens - fewer) / (more - fewer)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Implements DraftCosts; `rows` ascend by num_rows, at least one. With `is_padded` all rows of
    a step count as long as the longest."""

    rows: tuple[RowCosts, ...]
    is_padded: bool = False

    def step(self, num_rows: int, num_columns: int, width: int) -> float:
        """Behind the last step of so many rows, what fewer rows with as many inputs say counts, if
        it is less."""
        if self.is_padded:
            num_columns = num_rows * width
        own = self._of(num_rows)
        most, longest = own.steps[-1]
        if num_columns <= most:
            return own.step(num_columns)
        fewer = (item for item in self.rows if item.num_rows <= own.num_rows)
        return max(longest, min(item.step(num_columns) for item in fewer))

    def proposals(self, num_rows: int, num_tokens: int) -> float:
        return self._of(num_rows).proposal(num_tokens)

    def _of(self, num_rows: int) -> RowCosts:
        place = bisect_left(self.rows, num_rows, key=lambda item: item.num_rows)
        return self.rows[min(place, len(self.rows) - 1)]


async def measure(
    executor: Executor,
    capacity: Capacity,
    vocab_size: int,
    *,
    longest_s: float = LONGEST_S,
    clock: Callable[[], float] = time.perf_counter,
    step_clock: Callable[[], float] | None = None,
) -> MeasuredCosts:
    """Run steps that belong to nobody. Needs room for drafts (Capacity.max_draft_tokens). Raises
    DeviceError.

    step_clock   times the steps; None: the processor's own time where they run on it, so that other
                 programs do not count, else `clock`
    """
    if step_clock is None:
        step_clock = time.process_time if executor.name == "cpu" else clock
    meter = _Meter(executor, vocab_size, step_clock)
    # The first step of all warms up.
    await meter.time(1, 1)
    started = clock()
    steps = {1: {1: await meter.time(1, 1)}}
    proposals: dict[int, dict[int, float]] = {}
    for num_rows, width, num_proposed in _shapes(executor, capacity):
        expected_s = costs_of(steps, proposals).step(num_rows, num_rows * width, width)
        if clock() - started + expected_s > longest_s:
            continue
        taken_s = await meter.time(num_rows, width, num_proposed)
        if num_proposed == 0:
            steps.setdefault(num_rows, {})[num_rows * width] = taken_s
        elif num_rows in steps:
            added_s = taken_s - steps[num_rows][num_rows]
            proposals.setdefault(num_rows, {})[num_proposed] = max(0.0, added_s)
    return costs_of(steps, proposals, is_padded=executor.pads_rows)


def costs_of(steps: _Times, proposals: _Times, *, is_padded: bool = False) -> MeasuredCosts:
    """From the times of steps by rows and inputs, and of what proposals add by rows and tokens.
    What is smaller is no slower, whatever the clock said: others on the machine only add to it."""
    rows: list[RowCosts] = []
    added: tuple[tuple[int, float], ...] = ((0, 0.0),)
    for num_rows in sorted(steps):
        if num_rows in proposals:
            added = _rising({0: 0.0, **proposals[num_rows]})
        rows.append(RowCosts(num_rows, _rising(steps[num_rows]), added))
    return MeasuredCosts(tuple(rows), is_padded)


def _rising(times: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    sizes = sorted(times, reverse=True)
    least = accumulate((times[size] for size in sizes), min)
    return tuple(reversed(tuple(zip(sizes, least, strict=True))))


def _shapes(executor: Executor, capacity: Capacity) -> list[tuple[int, int, int]]:
    """(rows, inputs a row, proposed tokens), the most important first; a plain step of so many rows
    comes before all others of them."""
    most_rows = min(capacity.max_concurrency, capacity.num_pages)
    if executor.slot_bytes > 0:
        most_rows = min(most_rows, capacity.num_slots - 1)
    longest = capacity.max_draft_tokens
    row_counts = list(dict.fromkeys((1, most_rows, *_powers(2, most_rows))))
    widths = list(dict.fromkeys((*_powers(1, longest), longest + 1)))
    proposals = [(num_rows, 1, count) for count in (longest, 1) for num_rows in row_counts[:2]]
    order = [
        (1, longest + 1, 0),
        (most_rows, 1, 0),
        *(proposals[:2] if executor.has_draft_model else ()),
        *((most_rows, width, 0) for width in widths),
        *(proposals[2:] if executor.has_draft_model else ()),
        *((num_rows, width, 0) for num_rows in row_counts for width in widths),
        *((num_rows, width, 0) for num_rows in row_counts for width in range(1, longest + 1)),
    ]
    return [shape for shape in dict.fromkeys(order) if shape != (1, 1, 0)]


def _powers(first: int, most: int) -> list[int]:
    """first, twice that, .. as far as `most`."""
    return [first << step for step in range(most.bit_length()) if first << step <= most]


class _Meter:
    def __init__(self, executor: Executor, vocab_size: int, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._clock = clock

    async def time(self, num_rows: int, width: int, num_proposed: int = 0) -> float:
        """Seconds of one step of rows that all have `width` inputs."""
        has_states = self._executor.slot_bytes > 0
        inputs = self._rng.integers(0, self._vocab_size, (num_rows, width), np.int32)
        rows = tuple(
            _row(index, token_ids, num_proposed, has_states=has_states)
            for index, token_ids in enumerate(inputs)
        )
        started = self._clock()
        if width == 1 and not self._executor.has_draft_model:
            await self._executor.decode(rows)
        else:
            await self._executor.verify(rows)
        return self._clock() - started


def _row(index: int, token_ids: IntArray, num_proposed: int, *, has_states: bool) -> UnitRow:
    *checks, last = _samples(token_ids.size)
    return UnitRow(
        token_ids=token_ids,
        start=0,
        page_table=np.array([index], np.int32),
        read_slot=ROOT_SLOT,
        write_slot=index + 1 if has_states else ROOT_SLOT,
        sample=last,
        residence=(index, 0),
        checks=tuple(checks),
        num_proposed=num_proposed,
    )


def _samples(width: int) -> Sequence[SampleRow]:
    nothing: IntArray = np.zeros(0, np.int32)
    return [
        SampleRow(SamplingParams(), place + 1, nothing, nothing, nothing) for place in range(width)
    ]
