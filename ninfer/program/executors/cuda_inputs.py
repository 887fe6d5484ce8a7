"""UnitInputs: what a unit is told, in a page-locked block, its copy on the device and its views.

    token_ids, ordinals, column_rows [T], rope_positions [3, T]   columns: the inputs in row order
    row_starts [R + 1], read_slots, write_slots [R]               rows: one sequence each

The block of a unit of R rows and T columns is dense and always lies in the same place, so a graph
captured for (R, T) reads it by fixed addresses. Page tables have a buffer of their own: they are
long and seldom change, so only a row that differs from the last one is copied.

A decode step may be queued behind one that still runs. So the host's side of it is there twice, and
its token ids are where the sampler leaves them: nobody has to know the tokens of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.units import UnitRow
from ninfer.program.executors.cuda_driver import NUM_MARKS, CudaDriver, HostArray
from ninfer.program.executors.cuda_tensor import DeviceTensor

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """The inputs of a unit on the device, int32; shapes as in the module. page_tables [R, P];
    row_ends [R], where rows have columns of padding behind their inputs. keeps_state: StateImages
    are written."""

    token_ids: DeviceTensor
    ordinals: DeviceTensor
    column_rows: DeviceTensor
    rope_positions: DeviceTensor
    row_starts: DeviceTensor
    read_slots: DeviceTensor
    write_slots: DeviceTensor
    page_tables: DeviceTensor
    row_ends: DeviceTensor | None = None
    keeps_state: bool = True

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


class _Move:
    """Takes the words of a decode block of `count` rows from step to step, in two operations."""

    def __init__(self, words: IntArray, count: int) -> None:
        layout = _layout(count, count)
        self._change: IntArray = np.zeros(layout.num_bytes // 4, np.int32)
        parts = [slice(offset // 4, offset // 4 + prod(shape)) for shape, offset in layout.places]
        _, ordinals, _, positions, _, reads, writes = parts
        self._change[ordinals] = self._change[positions] = 1
        self._change[reads] = words[writes] - words[reads]
        self._change[writes] = words[reads] - words[writes]
        self._slots = self._change[reads.start : writes.stop]

    def step(self, words: IntArray, target: IntArray) -> None:
        count = self._change.size
        np.add(words[:count], self._change, out=target[:count])
        np.negative(self._slots, out=self._slots)


class _Side:
    """One of the host's copies: the block and the page tables, page-locked."""

    def __init__(self, driver: CudaDriver, block_bytes: int, page_tables: DeviceTensor) -> None:
        self.block = driver.allocate_pinned(block_bytes)
        self.words: IntArray = self.block.view(np.int32)
        tables = driver.allocate_pinned(page_tables.num_bytes)
        self.tables: IntArray = tables.view(np.int32).reshape(page_tables.shape)


class UnitInputs:
    """The block of one kind of unit: decode (a column a row) or prefill (one row).

    block         uint8 of `block_bytes`
    page_tables   int32 [max rows, P], its own
    token_ids     int32 [max rows] where the ids of a unit lie that are not in the block
    """

    def __init__(
        self,
        driver: CudaDriver,
        block: DeviceTensor,
        page_tables: DeviceTensor,
        token_ids: DeviceTensor | None = None,
    ) -> None:
        self._driver = driver
        self._page_tables = page_tables
        self._token_ids = token_ids
        self._device = block
        self._sides = [_Side(driver, block.num_bytes, page_tables) for _ in range(NUM_MARKS)]
        self._side = self._sides[0]
        self._known = [b""] * page_tables.shape[0]
        self._move: _Move | None = None

    def tensors(self, num_rows: int, num_tokens: int) -> UnitTensors:
        """Where a unit of these sizes finds its inputs."""
        parts = [
            DeviceTensor.dense(self._device.address + offset, shape, "int32")
            for shape, offset in _layout(num_rows, num_tokens).places
        ]
        if self._token_ids is not None:
            parts[0] = self._token_ids.rows(0, num_tokens)
        token_ids, ordinals, column_rows, positions, starts, reads, writes = parts
        return UnitTensors(
            token_ids,
            ordinals,
            column_rows,
            positions,
            starts,
            reads,
            writes,
            self._page_tables.rows(0, num_rows),
        )

    def write_prompt(self, row: UnitRow) -> None:
        """Fill the block from one row of any number of inputs. Only the unit before may still be
        queued, here and in `write_decode` and `advance`."""
        self._turn()
        count = row.token_ids.size
        token_ids, ordinals, column_rows, positions, starts, reads, writes = self._views(1, count)
        token_ids[:] = row.token_ids
        ordinals[:] = np.arange(row.start, row.start + count)
        column_rows[:] = 0
        positions[:] = ordinals if row.positions is None else row.positions
        starts[:] = (0, count)
        reads[:], writes[:] = row.read_slot, row.write_slot
        self._write_table(0, row.page_table)

    def write_decode(self, rows: tuple[UnitRow, ...]) -> None:
        """Fill the block from rows of one input each, in as few NumPy calls as can be: the device
        may be waiting."""
        self._turn()
        count = len(rows)
        starts = [row.start for row in rows]
        axes: list[list[int]] = [starts, starts, starts]
        if any(row.positions is not None for row in rows):
            axes = [
                [
                    row.start if row.positions is None else int(row.positions[axis, 0])
                    for row in rows
                ]
                for axis in range(3)
            ]
        parts = (
            [row.token_ids.item(0) for row in rows],
            starts,
            list(range(count)),
            axes[0] + axes[1] + axes[2],
            list(range(count + 1)),
            [row.read_slot for row in rows],
            [row.write_slot for row in rows],
        )
        flat: list[int] = []
        for part, (_, offset) in zip(parts, _layout(count, count).places, strict=True):
            flat += [0] * (offset // 4 - len(flat))
            flat += part
        self._side.words[: len(flat)] = flat
        self._move = None
        self.write_tables(rows)

    def write_tables(self, rows: tuple[UnitRow, ...]) -> None:
        """Copy the page tables that have changed, behind whatever is queued."""
        for index, row in enumerate(rows):
            self._write_table(index, row.page_table)

    def advance(self, num_rows: int) -> None:
        """From the decode step whose rows were written last to the step behind it, all but the ids:
        a place later, and every row's slots change places. Page tables stay."""
        words = self._side.words
        if self._move is None:
            self._move = _Move(words, num_rows)
        self._turn()
        self._move.step(words, self._side.words)

    def queue_copy(self, num_rows: int, num_tokens: int) -> None:
        """Queue the block's copy to the device."""
        size = _layout(num_rows, num_tokens).num_bytes
        self._driver.upload(self._device.address, self._side.block[:size])

    def _turn(self) -> None:
        """To the side that no queued unit reads."""
        self._side = self._sides[self._side is self._sides[0]]

    def _views(self, num_rows: int, num_tokens: int) -> list[IntArray]:
        return [
            self._side.words[offset // 4 : offset // 4 + prod(shape)].reshape(shape)
            for shape, offset in _layout(num_rows, num_tokens).places
        ]

    def _write_table(self, index: int, page_table: IntArray) -> None:
        entries = page_table.tobytes()
        if self._known[index].startswith(entries):
            return
        self._known[index] = entries
        table: HostArray = self._side.tables[index, : page_table.size]
        table[:] = page_table
        self._driver.upload(self._page_tables.index(index).address, table)
