"""UnitInputs: what a unit is told, in one page-locked block, its copy on the device and its views.

    token_ids, ordinals, column_rows [T], rope_positions [3, T]   columns: the inputs in row order
    row_starts [R + 1], read_slots, write_slots [R]               rows: one sequence each

The block of a unit of R rows and T columns is dense and always lies in the same place, so a graph
captured for (R, T) copies it and reads it by fixed addresses. Page tables have a buffer of their
own: they are long and seldom change, so only a row that differs from the last one is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.units import UnitRow
from ninfer.program.executors.cuda_driver import CudaDriver, HostArray
from ninfer.program.executors.cuda_tensor import DeviceTensor

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """The inputs of a unit on the device, int32; shapes as in the module. page_tables [R, P]."""

    token_ids: DeviceTensor
    ordinals: DeviceTensor
    column_rows: DeviceTensor
    rope_positions: DeviceTensor
    row_starts: DeviceTensor
    read_slots: DeviceTensor
    write_slots: DeviceTensor
    page_tables: DeviceTensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.read_slots.shape[0]


@dataclass(frozen=True, slots=True)
class _Layout:
    """(shape, byte offset) of each array of a block, in the order of UnitTensors."""

    places: tuple[tuple[tuple[int, ...], int], ...]
    num_bytes: int


@lru_cache(maxsize=512)
def _layout(num_rows: int, num_tokens: int) -> _Layout:
    shapes: tuple[tuple[int, ...], ...] = (
        (num_tokens,), (num_tokens,), (num_tokens,), (3, num_tokens),
        (num_rows + 1,), (num_rows,), (num_rows,),
    )  # fmt: skip
    places, offset = [], 0
    for shape in shapes:
        places.append((shape, offset))
        size = prod(shape) * 4
        offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return _Layout(tuple(places), offset)


def block_bytes(max_rows: int, max_tokens: int) -> int:
    """Bytes that hold the block of any unit up to these sizes."""
    return _layout(max_rows, max_tokens).num_bytes


class UnitInputs:
    """The block of one kind of unit: decode (a column a row) or prefill (one row).

    block         uint8 of `block_bytes`
    page_tables   int32 [max rows, P], its own
    """

    def __init__(self, driver: CudaDriver, block: DeviceTensor, page_tables: DeviceTensor) -> None:
        self._driver = driver
        self._page_tables = page_tables
        self._device = block
        self._host = driver.allocate_pinned(block.num_bytes)
        self._words: IntArray = self._host.view(np.int32)
        num_rows, max_pages = page_tables.shape
        tables = driver.allocate_pinned(page_tables.num_bytes)
        self._tables: IntArray = tables.view(np.int32).reshape(num_rows, max_pages)
        self._num_pages = [0] * num_rows

    def tensors(self, num_rows: int, num_tokens: int) -> UnitTensors:
        """Where a unit of these sizes finds its inputs."""
        parts = [
            DeviceTensor.dense(self._device.address + offset, shape, "int32")
            for shape, offset in _layout(num_rows, num_tokens).places
        ]
        parts.append(self._page_tables.rows(0, num_rows))
        return UnitTensors(*parts)

    def write(self, rows: tuple[UnitRow, ...]) -> None:
        """Fill the block from `rows` and queue the copies of page tables that changed.

        Nothing of the unit before may still be queued.
        """
        counts = [row.token_ids.size for row in rows]
        token_ids, ordinals, column_rows, positions, starts, reads, writes = self._views(
            len(rows), sum(counts)
        )
        first = 0
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            last = first + count
            token_ids[first:last] = row.token_ids
            ordinals[first:last] = np.arange(row.start, row.start + count)
            column_rows[first:last] = index
            positions[:, first:last] = (
                ordinals[first:last] if row.positions is None else row.positions
            )
            starts[index], starts[index + 1] = first, last
            reads[index], writes[index] = row.read_slot, row.write_slot
            self._write_table(index, row.page_table)
            first = last

    def queue_copy(self, num_rows: int, num_tokens: int) -> None:
        """Queue the block's copy to the device; may be captured."""
        size = _layout(num_rows, num_tokens).num_bytes
        self._driver.upload(self._device.address, self._host[:size])

    def _views(self, num_rows: int, num_tokens: int) -> list[IntArray]:
        return [
            self._words[offset // 4 : offset // 4 + prod(shape)].reshape(shape)
            for shape, offset in _layout(num_rows, num_tokens).places
        ]

    def _write_table(self, index: int, page_table: IntArray) -> None:
        size, known = page_table.size, self._tables[index]
        if size <= self._num_pages[index] and np.array_equal(known[:size], page_table):
            return
        known[:size] = page_table
        self._num_pages[index] = size
        table: HostArray = known[:size]
        self._driver.upload(self._page_tables.index(index).address, table)
