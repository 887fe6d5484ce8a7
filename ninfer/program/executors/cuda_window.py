"""WindowInputs: what a unit of several columns a row is told, and its views on the device.

Every row has the same number of columns, of which the first `counts[r]` are its inputs; the others
are padding: ordinal -1, the token of its first column. So a graph captured for R rows of T columns
serves rows with drafts of any length below T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.units import PAGE_TOKENS, UnitRow
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_tensor import ALIGNMENT_BYTES, Arena, DeviceTensor

Size: TypeAlias = tuple[int, int]
"""Rows of a unit, and columns of each."""


_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 11)
"""Columns a row that there are graphs for, and the most that a row can have."""


def widths(max_draft_tokens: int) -> tuple[int, ...]:
    """Columns a row of the graphs for drafts of up to so many tokens."""
    most = 1 + max_draft_tokens
    return (*(width for width in _WIDTHS if width < most), most)


@dataclass(frozen=True, slots=True)
class WindowTensors:
    """int32. `unit.row_ends` says where each row's inputs end.

    counts     [R] inputs of each row
    limits     [R] ordinals that its page table has room for
    proposed   [R] guesses that it asks for
    """

    unit: UnitTensors
    counts: DeviceTensor
    limits: DeviceTensor
    proposed: DeviceTensor

    @property
    def size(self) -> Size:
        return self.num_rows, self.num_columns

    @property
    def num_rows(self) -> int:
        return self.unit.num_rows

    @property
    def num_columns(self) -> int:
        """Of each row."""
        return self.unit.num_tokens // self.unit.num_rows


@dataclass(frozen=True, slots=True)
class WindowBlock:
    """Memory of the inputs: a block as large as the largest unit's, page tables [R, P] int32."""

    block: DeviceTensor
    page_tables: DeviceTensor


def _shapes(num_rows: int, num_columns: int) -> tuple[tuple[int, ...], ...]:
    """Of row_starts, read_slots, write_slots, row_ends, counts, limits, proposed, then of
    token_ids, ordinals, column_rows, rope_positions. What is said of rows comes first: it lies in
    the same place whatever the columns, so a graph that needs nothing else serves all widths."""
    num_tokens = num_rows * num_columns
    columns, rows = (num_tokens,), (num_rows,)
    return ((num_rows + 1,), *([rows] * 6), columns, columns, columns, (3, num_tokens))


def _carve(arena: Arena, num_rows: int, num_columns: int) -> list[DeviceTensor]:
    return [arena.take(shape, "int32") for shape in _shapes(num_rows, num_columns)]


def carve_window(arena: Arena, *, max_rows: int, max_columns: int, max_pages: int) -> WindowBlock:
    """For units up to these sizes."""
    size = Arena()
    _carve(size, max_rows, max_columns)
    return WindowBlock(
        block=arena.take((size.used_bytes,), "uint8"),
        page_tables=arena.take((max_rows, max_pages), "int32"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _HostBlock:
    """The host's arrays of a unit's block, in the order of _shapes, `num_bytes` in all.

    column_rows, starts   what they always are in units of this size
    """

    parts: Sequence[IntArray]
    column_rows: IntArray
    starts: IntArray
    num_bytes: int


class WindowInputs:
    """Writes one unit at a time; none may be queued then.

    keeps_state   its units leave StateImages behind their inputs; else, when rows have several
                  columns, only what gdn_fold takes
    """

    def __init__(self, driver: CudaDriver, memory: WindowBlock, *, keeps_state: bool) -> None:
        self._driver = driver
        self._keeps_state = keeps_state
        self._memory = memory
        self._block = driver.allocate_pinned(memory.block.num_bytes)
        tables = driver.allocate_pinned(memory.page_tables.num_bytes)
        self._tables: IntArray = tables.view(np.int32).reshape(memory.page_tables.shape)
        self._known = [b""] * memory.page_tables.shape[0]
        self._tensors: dict[Size, WindowTensors] = {}
        self._host_blocks: dict[Size, _HostBlock] = {}

    def tensors(self, num_rows: int, num_columns: int) -> WindowTensors:
        """Where a unit of these sizes finds its inputs."""
        size = num_rows, num_columns
        if size not in self._tensors:
            self._tensors[size] = self._make_tensors(num_rows, num_columns)
        return self._tensors[size]

    def queue(self, rows: Sequence[UnitRow], num_columns: int, counts: Sequence[int]) -> None:
        """Queue the inputs of a unit; `counts[r]` of row r's inputs, the others are left out."""
        host = self._host_block(len(rows), num_columns)
        starts, reads, writes, ends, host_counts, limits, proposed = host.parts[:7]
        token_ids, ordinals, _, positions = host.parts[7:]
        flat_ids, flat_ordinals = list[int](), list[int]()
        for row, count in zip(rows, counts, strict=True):
            num_padding = num_columns - count
            ids = row.token_ids[:count].tolist()
            flat_ids += ids + ids[:1] * num_padding
            flat_ordinals += [*range(row.start, row.start + count), *[-1] * num_padding]
        token_ids[:], ordinals[:] = flat_ids, flat_ordinals
        self._write_positions(positions, rows, counts, num_columns)
        host_counts[:] = counts
        np.add(starts[:-1], host_counts, out=ends)
        reads[:] = [row.read_slot for row in rows]
        writes[:] = [row.write_slot for row in rows]
        limits[:] = [row.page_table.size * PAGE_TOKENS for row in rows]
        proposed[:] = [row.num_proposed for row in rows]
        for index, row in enumerate(rows):
            self._write_table(index, row.page_table)
        self._driver.upload(self._memory.block.address, self._block[: host.num_bytes])

    def _make_tensors(self, num_rows: int, num_columns: int) -> WindowTensors:
        block = self._memory.block
        parts = _carve(Arena(block.address, block.num_bytes), num_rows, num_columns)
        starts, reads, writes, row_ends, counts, limits, proposed = parts[:7]
        token_ids, ordinals, column_rows, positions = parts[7:]
        tables = self._memory.page_tables.rows(0, num_rows)
        # A row of one column has no padding: it is a decode step.
        ends = row_ends if num_columns > 1 else None
        unit = UnitTensors(
            token_ids,
            ordinals,
            column_rows,
            positions,
            starts,
            reads,
            writes,
            tables,
            ends,
            keeps_state=self._keeps_state or num_columns == 1,
        )
        return WindowTensors(unit, counts, limits, proposed)

    def _host_block(self, num_rows: int, num_columns: int) -> _HostBlock:
        """The block's arrays, what follows from the sizes alone written anew."""
        size = num_rows, num_columns
        if size not in self._host_blocks:
            self._host_blocks[size] = self._make_host_block(num_rows, num_columns)
        host = self._host_blocks[size]
        host.parts[0][:], host.parts[9][:] = host.starts, host.column_rows
        return host

    def _make_host_block(self, num_rows: int, num_columns: int) -> _HostBlock:
        """As far from each other as on the device."""
        places = _carve(Arena(), num_rows, num_columns)
        words: IntArray = self._block.view(np.int32)
        parts = [
            words[place.address // 4 : (place.address + place.num_bytes) // 4].reshape(place.shape)
            for place in places
        ]
        rows = np.arange(num_rows + 1, dtype=np.int32)
        return _HostBlock(
            parts,
            column_rows=np.repeat(rows[:-1], num_columns),
            starts=rows * num_columns,
            num_bytes=sum(-(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for part in parts),
        )

    def _write_positions(
        self,
        positions: IntArray,
        rows: Sequence[UnitRow],
        counts: Sequence[int],
        num_columns: int,
    ) -> None:
        steps = np.arange(num_columns, dtype=np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        positions.reshape(3, len(rows), num_columns)[:] = starts[:, None] + steps
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row.positions is not None:
                part = slice(index * num_columns, (index + 1) * num_columns)
                positions[:, part] = _rotary_positions(row.positions, count, steps)

    def _write_table(self, index: int, page_table: IntArray) -> None:
        entries = page_table.tobytes()
        if self._known[index].startswith(entries):
            return
        self._known[index] = entries
        table = self._tables[index, : page_table.size]
        table[:] = page_table
        self._driver.upload(self._memory.page_tables.index(index).address, table)


def _rotary_positions(positions: IntArray, count: int, steps: IntArray) -> IntArray:
    """[3, n] of a row's columns; those of padding go on by ones."""
    last = positions[:, count - 1 : count]
    return np.concatenate((positions[:, :count], last + 1 + steps[: steps.size - count]), axis=1)
