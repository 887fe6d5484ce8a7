"""Window: the columns of a round in the GDN layers, and the fold back to those that were right.

    one unit:  every layer   convolve, delta_rule   steps through the columns and records its inputs
               fold          rows whose last columns were wrong are stepped anew, from the slot that
                             the unit read, with what was recorded

A row of one column is a decode step. All columns of a row, one after another, are that many decode
steps: the same Ops on the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops import gdn_conv, gdn_recurrent

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """What one layer consumed, [N, ..] in the order of the batch, and its StateImages."""

    mixed: FloatArray
    k: FloatArray
    v: FloatArray
    g: FloatArray
    beta: FloatArray
    windows: FloatArray
    states: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows of a batch with several columns each; the tokens of a row lie one behind another.

    first       [B] where a row's tokens begin in the batch
    num_columns [B]
    read_slots, write_slots   [B] StateImages
    """

    first: Slots
    num_columns: Slots
    read_slots: Slots
    write_slots: Slots
    _records: list[_Record] = field(default_factory=list)

    def convolve(self, mixed: FloatArray, weight: FloatArray, windows: FloatArray) -> FloatArray:
        """gdn_conv of each row's columns [N, Cd]."""
        convolved = np.empty_like(mixed)
        for row in range(self.first.size):
            part = slice(self.first[row], self.first[row] + self.num_columns[row])
            slots = slice(row, row + 1)
            convolved[part] = gdn_conv.reference(
                mixed[None, part], weight, windows, self.read_slots[slots], self.write_slots[slots]
            )[0]
        return convolved

    def delta_rule(
        self,
        mixed: FloatArray,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        g: FloatArray,
        beta: FloatArray,
        windows: FloatArray,
        states: FloatArray,
    ) -> FloatArray:
        """gdn_recurrent, column after column; `mixed` went into the convolution."""
        record = _Record(mixed, k, v, g, beta, windows, states)
        self._records.append(record)
        y = np.empty_like(v)
        for column in range(int(self.num_columns.max())):
            rows = np.flatnonzero(self.num_columns > column)
            tokens = self.first[rows] + column
            y[tokens] = self._step(record, q[tokens], rows, column)
        return y

    def fold(self, num_right: Sequence[int]) -> None:
        """Leave in each row's write slot what its first `num_right` columns (at least one) make of
        its read slot. Nothing to be done for a row whose columns were all right."""
        counts = np.array(num_right)
        wrong = np.flatnonzero(counts < self.num_columns)
        for record in self._records if wrong.size else ():
            for column in range(int(counts[wrong].max())):
                rows = wrong[counts[wrong] > column]
                self._step(record, record.k[self.first[rows] + column], rows, column)
            for row in wrong:
                self._fold_window(record, row, int(counts[row]))

    def _step(
        self, record: _Record, q: FloatArray, rows: NDArray[np.intp], column: int
    ) -> FloatArray:
        """One column of `rows`; what it yields for other queries than its own is of no use."""
        tokens = self.first[rows] + column
        return gdn_recurrent.reference(
            q,
            record.k[tokens],
            record.v[tokens],
            record.g[tokens],
            record.beta[tokens],
            record.states,
            (self.read_slots if column == 0 else self.write_slots)[rows],
            self.write_slots[rows],
        )

    def _fold_window(self, record: _Record, row: np.intp, count: int) -> None:
        first = self.first[row]
        before = record.windows[self.read_slots[row]]
        series = np.concatenate((before, record.mixed[first : first + count].T), axis=1)
        record.windows[self.write_slots[row]] = series[:, count:]
