"""StepAhead: a decode step that was started before it was asked for.

The step behind another mostly has the same rows, each a token later. It can be queued while that
one still runs, since the device knows the tokens first, and then there is no gap between the two.
Its results serve whoever then asks for just these rows, or for some of them: a row's bits do not
depend on its mates. Where something else is asked for they are forgotten. What it wrote lies behind
the frontier and in StateImage slots that its rows had given back, so nobody reads it.

A step whose choice depends on what the host makes of the tokens before runs up to its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, SampleRow, UnitRow
from ninfer.program.executors.cuda_choice import samples_of
from ninfer.program.executors.cuda_sampler import is_plain


def can_go_on(rows: Sequence[UnitRow], *, has_states: bool) -> bool:
    """Whether the inputs of the step behind `rows` follow from these and their tokens alone, and
    need no page that they do not have."""
    return all(
        row.sample is not None
        and row.start + 1 < row.page_table.size * PAGE_TOKENS
        and (row.read_slot != ROOT_SLOT or not has_states)
        for row in rows
    )


def are_plain(rows: Sequence[UnitRow]) -> bool:
    """Whether a step of `rows` can choose by itself: what the choice needs is known with the
    rows."""
    return all(row.sample is None or is_plain(row.sample) for row in rows)


def following(rows: Sequence[UnitRow], token_ids: Sequence[int]) -> tuple[UnitRow, ...]:
    """The rows of the step behind `rows`, which can go on, when these produced `token_ids`."""
    return tuple(
        UnitRow(
            token_ids=np.array([token_id], np.int32),
            start=row.start + 1,
            page_table=row.page_table,
            read_slot=row.write_slot,
            write_slot=row.read_slot,
            positions=None if row.positions is None else row.positions + 1,
            sample=None if row.sample is None else _moved(row.sample),
            residence=row.residence,
        )
        for row, token_id in zip(rows, token_ids, strict=True)
    )


class StepAhead:
    """A queued step.

    place       of its mark; once it has chosen, the side of the sampler that takes its results
    is_chosen   it runs to its tokens, not only to its logits
    samples     how its rows choose, in their order
    results     what the sampler made of it, once it has run
    """

    def __init__(self, rows: tuple[UnitRow, ...], place: int, *, is_chosen: bool) -> None:
        self.rows = rows
        self.place = place
        self.is_chosen = is_chosen
        self.samples = samples_of(rows)
        self.results: IntArray | None = None
        self._spoilt: set[int] = set()

    def of(self, rows: tuple[UnitRow, ...]) -> StepAhead:
        """The same step, whose rows are known now."""
        return StepAhead(rows, self.place, is_chosen=self.is_chosen)

    def note_choice(self, place: int, samples: Sequence[SampleRow]) -> None:
        """Its choice is queued."""
        self.place, self.samples, self.is_chosen = place, tuple(samples), True

    def places_of(self, rows: Sequence[UnitRow]) -> tuple[int, ...] | None:
        """Which of its own rows `rows` are; None unless it ran all of them, or will when they have
        been chosen for."""
        if len(rows) == len(self.rows) and all(map(self._serves, self.rows, rows)):
            return tuple(range(len(rows)))
        known = {row.residence: place for place, row in enumerate(self.rows)}
        places = [known.get(row.residence) for row in rows]
        found = tuple(place for place in places if place is not None)
        if len(found) < len(rows) or len(set(found)) < len(rows):
            return None
        is_served = all(self._serves(self.rows[i], row) for i, row in zip(found, rows, strict=True))
        return found if is_served else None

    def spoil(self, slot: int) -> None:
        """Something else writes this StateImage: what lay there is no result any more."""
        if slot != ROOT_SLOT:
            self._spoilt.add(slot)

    def _serves(self, expected: UnitRow, row: UnitRow) -> bool:
        return (
            (not self.is_chosen or _is_same_choice(expected.sample, row.sample))
            and expected.residence == row.residence
            and not row.copies
            and expected.start == row.start
            and expected.token_ids.item(0) == row.token_ids.item(0)
            and expected.read_slot == row.read_slot
            and expected.write_slot == row.write_slot
            and expected.write_slot not in self._spoilt
            and _has_same_pages(expected, row)
            and _has_same_entries(expected.positions, row.positions)
        )


def _is_same_choice(first: SampleRow | None, second: SampleRow | None) -> bool:
    if first is None or second is None or not is_plain(second):
        return False
    return first.position == second.position and first.params == second.params


def _moved(sample: SampleRow) -> SampleRow:
    """The same choice a token later."""
    return SampleRow(
        sample.params,
        sample.position + 1,
        sample.generated_ids,
        sample.generated_counts,
        sample.prompt_ids,
    )


def _has_same_pages(expected: UnitRow, row: UnitRow) -> bool:
    """Up to that of the input; one of them may show more."""
    if expected.page_table is row.page_table:
        return True
    count = row.start // PAGE_TOKENS + 1
    return np.array_equal(expected.page_table[:count], row.page_table[:count])


def _has_same_entries(first: IntArray | None, second: IntArray | None) -> bool:
    if first is second:
        return True
    return first is not None and second is not None and np.array_equal(first, second)
