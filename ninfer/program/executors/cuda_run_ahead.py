"""StepAhead: a decode step that was started before it was asked for.

The step behind another mostly has the same rows, each a token later. It can be queued the moment
the tokens are known, and the device works while the host settles the step before. Its results
serve whoever then asks for just these rows, or for some of them: a row's bits do not depend on its
mates. Where something else is asked for they are forgotten. What it wrote lies behind the frontier
and in StateImage slots that its rows had given back, so nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, RowOutput, SampleRow, UnitRow
from ninfer.program.executors.cuda_sampler import is_plain


def following(rows: Sequence[UnitRow], outputs: Sequence[RowOutput]) -> tuple[UnitRow, ...] | None:
    """The rows of the step behind `rows` when each goes on with the token it produced; None when
    that does not follow from them alone, or needs a page that they do not have."""
    expected = []
    for row, output in zip(rows, outputs, strict=True):
        sample, token, start = row.sample, output.token, row.start + 1
        if sample is None or token is None or not is_plain(sample):
            return None
        if start >= row.page_table.size * PAGE_TOKENS or row.read_slot == ROOT_SLOT:
            return None
        expected.append(
            UnitRow(
                token_ids=np.array([token.token_id], np.int32),
                start=start,
                page_table=row.page_table,
                read_slot=row.write_slot,
                write_slot=row.read_slot,
                positions=None if row.positions is None else row.positions + 1,
                sample=SampleRow(
                    sample.params,
                    sample.position + 1,
                    sample.generated_ids,
                    sample.generated_counts,
                    sample.prompt_ids,
                ),
            )
        )
    return tuple(expected)


class StepAhead:
    """`rows` as they were queued; `outputs` once the step has run."""

    def __init__(self, rows: tuple[UnitRow, ...]) -> None:
        self.rows = rows
        self.outputs: tuple[RowOutput, ...] | None = None
        self._spoilt: set[int] = set()

    def outputs_for(self, rows: Sequence[UnitRow]) -> tuple[RowOutput, ...] | None:
        """Results of exactly these rows, in their order; None when one of them was not run."""
        found = {
            row.write_slot: (row, output)
            for row, output in zip(self.rows, self.outputs or (), strict=False)
            if row.write_slot not in self._spoilt
        }
        outputs = []
        for row in rows:
            expected, output = found.get(row.write_slot, (None, None))
            if expected is None or output is None or not _is_same(expected, row):
                return None
            outputs.append(output)
        return tuple(outputs)

    def spoil(self, row: UnitRow) -> None:
        """Another unit writes where `row` says: what lay there is no result any more."""
        self._spoilt.add(row.write_slot)


def _is_same(expected: UnitRow, row: UnitRow) -> bool:
    first, second = expected.sample, row.sample
    if first is None or second is None or not is_plain(second):
        return False
    return (
        expected.start == row.start
        and expected.token_ids.item(0) == row.token_ids.item(0)
        and expected.read_slot == row.read_slot
        and first.position == second.position
        and first.params == second.params
        and _has_same_entries(expected.page_table, row.page_table)
        and _has_same_entries(expected.positions, row.positions)
    )


def _has_same_entries(
    first: np.typing.NDArray[np.int32] | None, second: np.typing.NDArray[np.int32] | None
) -> bool:
    if first is second:
        return True
    return first is not None and second is not None and np.array_equal(first, second)
