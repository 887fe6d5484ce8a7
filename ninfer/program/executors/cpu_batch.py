"""TokenBatch: the inputs of one run through the layers, with all that the layers share.

A prefill batch holds T inputs of one sequence; a decode batch one input of each of B sequences; a
window batch some inputs of each, computed with the bits of as many decode batches.
Rotary angles, KV slots and key blocks are worked out once here, not in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, UnitRow
from ninfer.ops import kv_write, linear, paged_attention, rotary
from ninfer.program.executors.cpu_window import Window


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens [first, last) of a batch: one sequence's, from cache ordinal `start` on. In a window
    each input has a segment of its own."""

    first: int
    last: int
    start: int
    blocks: tuple[paged_attention.KeyBlock, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """N tokens of B sequences.

    token_ids      [N] int32
    is_decode      one token a segment: they must not influence each other's rounding
    cos, sin       [N, half]
    slot_mapping   [N] places in the KV pool
    segments       one a sequence, in a window one a token
    read_slots, write_slots   [B] StateImages
    window         of a window batch
    """

    token_ids: IntArray
    is_decode: bool
    cos: FloatArray
    sin: FloatArray
    slot_mapping: NDArray[np.int64]
    segments: tuple[Segment, ...]
    read_slots: NDArray[np.int64]
    write_slots: NDArray[np.int64]
    window: Window | None = None

    @property
    def project(self) -> linear.Projection:
        """How this batch multiplies by a weight matrix."""
        return linear.tiled if self.is_decode else linear.reference

    @property
    def row_first(self) -> NDArray[np.int64]:
        """[B] where each sequence's tokens begin."""
        if self.window is not None:
            return self.window.first
        return np.array([segment.first for segment in self.segments])

    @property
    def row_sizes(self) -> NDArray[np.int64]:
        """[B] tokens of each sequence."""
        if self.window is not None:
            return self.window.num_columns
        return np.array([segment.last - segment.first for segment in self.segments])


def prefill_batch(
    row: UnitRow, first: int, last: int, frequencies: rotary.RotaryFrequencies
) -> TokenBatch:
    """Inputs [first, last) of one row. Behind the first part the StateImage continues in place."""
    start, stop = row.start + first, row.start + last
    cos, sin = rotary.angles(positions_of(row, first, last), frequencies)
    return TokenBatch(
        token_ids=row.token_ids[first:last],
        is_decode=False,
        cos=cos,
        sin=sin,
        slot_mapping=kv_write.slots_of(row.page_table, start, stop),
        segments=(
            Segment(0, last - first, start, paged_attention.key_blocks(row.page_table, stop)),
        ),
        read_slots=np.array([row.read_slot if first == 0 else row.write_slot]),
        write_slots=np.array([row.write_slot]),
    )


def decode_batch(rows: tuple[UnitRow, ...], frequencies: rotary.RotaryFrequencies) -> TokenBatch:
    """The one input of every row."""
    positions = np.concatenate([positions_of(row, 0, 1) for row in rows], axis=1)
    cos, sin = rotary.angles(positions, frequencies)
    return TokenBatch(
        token_ids=np.concatenate([row.token_ids for row in rows]),
        is_decode=True,
        cos=cos,
        sin=sin,
        slot_mapping=np.array([_slot(row) for row in rows]),
        segments=tuple(
            Segment(
                index,
                index + 1,
                row.start,
                paged_attention.key_blocks(row.page_table, row.start + 1),
            )
            for index, row in enumerate(rows)
        ),
        read_slots=np.array([row.read_slot for row in rows]),
        write_slots=np.array([row.write_slot for row in rows]),
    )


def window_batch(rows: tuple[UnitRow, ...], frequencies: rotary.RotaryFrequencies) -> TokenBatch:
    """All inputs of every row."""
    sizes = np.array([row.token_ids.size for row in rows])
    positions = [positions_of(row, 0, row.token_ids.size) for row in rows]
    cos, sin = rotary.angles(np.concatenate(positions, axis=1), frequencies)
    slots = [
        kv_write.slots_of(row.page_table, row.start, row.start + row.token_ids.size) for row in rows
    ]
    places = ((row, row.start + column) for row in rows for column in range(row.token_ids.size))
    read_slots = np.array([row.read_slot for row in rows])
    write_slots = np.array([row.write_slot for row in rows])
    return TokenBatch(
        token_ids=np.concatenate([row.token_ids for row in rows]),
        is_decode=True,
        cos=cos,
        sin=sin,
        slot_mapping=np.concatenate(slots),
        segments=tuple(
            Segment(
                index, index + 1, ordinal, paged_attention.key_blocks(row.page_table, ordinal + 1)
            )
            for index, (row, ordinal) in enumerate(places)
        ),
        read_slots=read_slots,
        write_slots=write_slots,
        window=Window(np.cumsum(sizes) - sizes, sizes, read_slots, write_slots),
    )


def check_rows(rows: tuple[UnitRow, ...], *, has_states: bool) -> None:
    """The promises of UnitRow that a wrong answer, not an exception, would follow from."""
    for row in rows:
        num_tokens = row.token_ids.size
        if num_tokens == 0 or row.start < 0:
            raise InvariantError(f"a row has {num_tokens} inputs from ordinal {row.start}")
        if row.start + num_tokens > row.page_table.size * PAGE_TOKENS:
            raise InvariantError(
                f"tokens up to {row.start + num_tokens} do not fit {row.page_table.size} pages"
            )
        if has_states and row.write_slot in (row.read_slot, ROOT_SLOT):
            raise InvariantError(
                f"StateImage slot {row.write_slot} may not be written (read {row.read_slot})"
            )
    if has_states and len({row.write_slot for row in rows}) != len(rows):
        raise InvariantError("two rows write one StateImage slot")


def positions_of(row: UnitRow, first: int, last: int) -> IntArray:
    """[3, last - first] rotary positions."""
    if row.positions is not None:
        return row.positions[:, first:last]
    ordinals = np.arange(row.start + first, row.start + last, dtype=np.int32)
    return np.broadcast_to(ordinals, (3, last - first))


def _slot(row: UnitRow) -> int:
    return int(row.page_table[row.start // PAGE_TOKENS]) * PAGE_TOKENS + row.start % PAGE_TOKENS
