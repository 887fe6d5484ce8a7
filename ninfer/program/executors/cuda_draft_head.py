"""The draft head: the first rows of the output head once more, in e4m3, for guesses alone.

    piece of the head's image -> bf16 rows -> e4m3 codes, a scale a row -> piece of its own image

A guess needs no exact logits, and reading the head is most of what a guess costs. Ids of byte-pair
vocabularies stand about in the order of how common their tokens are, so that the first rows hold
nearly all that is worth guessing; a token behind them is merely never guessed.

A piece is some whole row blocks of both images, so that staging memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ninfer.contract.errors import InvariantError
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.ops import dequantise, linear_pack, linear_small_t, quantise
from ninfer.ops.linear_packing import STRIP_ROWS, ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import PackedLinear
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import LinearPart, MatrixSpec

DRAFT_HEAD: Final = "draft_head"
_PIECE_BYTES: Final = 64 << 20
"""About so many bytes of bf16 rows are on their way at a time."""


def draft_head_spec(vocab_size: int, hidden_size: int, num_rows: int) -> MatrixSpec:
    """What the draft head of the first `num_rows` tokens takes: `num_bytes`, or of an Arena."""
    rows = min(num_rows, vocab_size)
    return MatrixSpec(DRAFT_HEAD, ImageLayout.of(WeightFormat.FP8_ROW, rows, hidden_size), False)


def make_draft_head(
    driver: CudaDriver, head: LinearPart, spec: MatrixSpec, arena: Arena
) -> LinearPart:
    """Take the draft head's place from `arena` and fill it from the head; blocks until it is there.

    Raises InvariantError for a head that is not whole or too small, MemoryError when there is no
    staging memory.
    """
    source, target = head.matrix.layout, spec.layout
    if not head.is_whole or source.columns != target.columns or source.rows < target.rows:
        raise InvariantError(f"no draft head {target.rows} x {target.columns} of {source}")
    image, scale = spec.take(arena)
    if scale is None:
        raise InvariantError(f"a draft head in {target.format.value}")
    linear = PackedLinear(linear_small_t.plan_linear(target, driver.kernels.limits), image, scale)
    pieces = list(_pieces(source, target))
    size = max(piece.staging_bytes for piece in pieces)
    staging = driver.allocate(size)
    for piece in pieces:
        _queue_piece(driver, piece, head.linear, (image, scale), Arena(staging, size))
    driver.synchronize()
    driver.release(staging)
    return LinearPart(0, True, spec, linear)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows from first_row on: whole row blocks of both layouts, or what is left at their ends."""

    first_row: int
    source: ImageLayout
    target: ImageLayout

    @property
    def staging_bytes(self) -> int:
        arena = Arena()
        self.take(arena)
        return arena.used_bytes

    def take(self, arena: Arena) -> tuple[DeviceTensor, DeviceTensor]:
        """bf16 rows of the source, codes of the target."""
        columns = self.source.columns
        rows = arena.take((self.source.rows, columns), "uint16")
        return rows, arena.take((self.target.rows, columns), "uint8")


def _pieces(source: ImageLayout, target: ImageLayout) -> Iterator[_Piece]:
    """Row blocks are powers of two strips: the larger block holds whole smaller ones."""
    block = STRIP_ROWS * max(source.strips_per_block, target.strips_per_block)
    source_block = STRIP_ROWS * source.strips_per_block
    step = max(1, _PIECE_BYTES // (2 * block * source.columns)) * block
    for first in range(0, target.rows, step):
        rows = min(step, target.rows - first)
        whole = min(-(-rows // source_block) * source_block, source.rows - first)
        yield _Piece(first, replace(source, rows=whole), replace(target, rows=rows))


def _queue_piece(
    driver: CudaDriver,
    piece: _Piece,
    head: PackedLinear,
    places: tuple[DeviceTensor, DeviceTensor],
    staging: Arena,
) -> None:
    kernels, stream = driver.kernels, driver.stream
    image, scale = places
    first, last = piece.first_row, piece.first_row + piece.source.rows
    rows, codes = piece.take(staging)
    row_scale = None if head.row_scale is None else _dense(head.row_scale, "float32")
    dequantise.launch(
        kernels, piece.source, _image_of(_dense(head.image, "uint8"), piece.source, first), rows,
        row_scale=None if row_scale is None else row_scale.rows(first, last), stream=stream,
    )  # fmt: skip
    kept = rows.rows(0, piece.target.rows)
    scales = scale.rows(first, first + piece.target.rows)
    quantise.launch_fp8_row(kernels, kept, codes, scales, stream=stream)
    linear_pack.launch(
        kernels, piece.target, codes, _image_of(image, piece.target, first), stream=stream
    )


def _dense(array: DeviceArray, dtype: str) -> DeviceTensor:
    view = view_of(DRAFT_HEAD, "head", array, dtype, 1)
    return DeviceTensor.dense(view.address, view.shape, dtype)


def _image_of(image: DeviceTensor, piece: ImageLayout, first_row: int) -> DeviceTensor:
    """The part of an image whose rows those of `piece` are; first_row begins a row block."""
    blocks = first_row // (STRIP_ROWS * piece.strips_per_block)
    offset = blocks * piece.units_per_block * piece.format.unit_bytes()
    return image.rows(offset, offset + piece.image_bytes)
