"""The draft head: the first and the last rows of the output head once more, in e4m3, for guesses
alone.

    piece of the head's image -> bf16 rows -> e4m3 codes, a scale a row -> piece of its own image

A guess needs no exact logits, and reading the head is most of what a guess costs. Ids of byte-pair
vocabularies stand about in the order of how common their tokens are, and special tokens stand at
the end: nearly all that is worth guessing. A token in between is merely never guessed: its logit
is written once, at start, and is lower than any.

A piece is some whole row blocks of both images, so that staging memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.ops import dequantise, linear_pack, linear_small_t, quantise
from ninfer.ops.linear_packing import STRIP_ROWS, ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import Epilogue, PackedLinear
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import (
    DRAFT_HEAD,
    HEAD,
    HeadRows,
    LinearPart,
    MatrixSpec,
    WeightPlan,
)

NUM_FIRST: Final = 131_072
NUM_LAST: Final = 2048
LEAST_VOCAB: Final = 16_384
"""Smaller heads are read as they are."""
_PIECE_BYTES: Final = 64 << 20
"""About so many bytes of bf16 rows are on their way at a time."""
_MOST_BLOCK_ROWS: Final = 8 * STRIP_ROWS
"""A multiple of it begins a row block of any image."""
_UNLISTED_BYTE: Final = 0xF1
"""Four of them are the f32 -2.4e30."""


def with_draft_head(config: ModelConfig, plan: WeightPlan) -> WeightPlan:
    """The plan with a draft head beside a large bf16 head; heads in fewer bits are read as they
    are."""
    formats = {matrix.layout.format for matrix in plan.matrices if matrix.name == HEAD}
    if formats != {WeightFormat.BF16} or config.vocab_size < LEAST_VOCAB:
        return plan
    listed = listed_rows(config.vocab_size)
    rows = tuple(head_rows(first, last, config.hidden_size) for first, last in listed)
    return replace(plan, draft_head=rows)


def listed_rows(vocab_size: int) -> tuple[tuple[int, int], ...]:
    """Ids [first, last) that are guessed: the first NUM_FIRST, the last NUM_LAST and a few more."""
    last = (vocab_size - NUM_LAST) // _MOST_BLOCK_ROWS * _MOST_BLOCK_ROWS
    if last <= NUM_FIRST:
        return ((0, vocab_size),)
    return (0, NUM_FIRST), (last, vocab_size)


def head_rows(first: int, last: int, hidden_size: int) -> HeadRows:
    """Rows [first, last) of the head as e4m3. OpContractError for sizes that have no image."""
    layout = ImageLayout.of(WeightFormat.FP8_ROW, last - first, hidden_size)
    return HeadRows(first, MatrixSpec(f"{DRAFT_HEAD}:{first}", layout, False))


class GuessHead:
    """Logits of guesses, from the draft head or from the head itself. Queues; the caller waits."""

    def __init__(
        self,
        driver: CudaDriver,
        products: Products,
        head_logits: DeviceTensor,
        draft_logits: DeviceTensor | None,
    ) -> None:
        """`draft_logits` f32 [R, V] for the draft head alone, None without one."""
        self._products = products
        self._name = HEAD if draft_logits is None else DRAFT_HEAD
        self._logits = head_logits if draft_logits is None else draft_logits
        if draft_logits is not None:
            fill_unlisted(driver, draft_logits)

    def queue(self, normed: DeviceTensor) -> DeviceTensor:
        """f32 [R, V] of the draft model's outputs [R, C]."""
        logits = self._logits.rows(0, normed.shape[0])
        self._products.small(self._name, normed, logits, epilogue=Epilogue.STORE_FLOAT)
        return logits


def fill_unlisted(driver: CudaDriver, logits: DeviceTensor) -> None:
    """Queue logits f32 [R, V] lower than any, for tokens that no head has a row for."""
    driver.fill(
        logits.address, _UNLISTED_BYTE, logits.shape[0] * logits.row_stride * logits.itemsize
    )


def make_draft_head(
    driver: CudaDriver, head: Sequence[LinearPart], planned: Sequence[HeadRows], arena: Arena
) -> tuple[LinearPart, ...]:
    """Take the draft head's place from `arena` and fill it from the head; blocks until it is there.

    Raises InvariantError for a head that is not whole or lacks rows, MemoryError when there is no
    staging memory.
    """
    return tuple(_make_part(driver, head[0], rows, arena) for rows in planned)


def _make_part(driver: CudaDriver, head: LinearPart, rows: HeadRows, arena: Arena) -> LinearPart:
    source, target = head.matrix.layout, rows.matrix.layout
    has_rows = head.is_whole and rows.first_row + target.rows <= source.rows
    if not has_rows or source.columns != target.columns or rows.first_row % _MOST_BLOCK_ROWS:
        raise InvariantError(f"no draft head {rows} of {source}")
    image, scale = rows.matrix.take(arena)
    if scale is None:
        raise InvariantError(f"a draft head in {target.format.value}")
    linear = PackedLinear(linear_small_t.plan_linear(target, driver.kernels.limits), image, scale)
    pieces = list(_pieces(source, rows))
    size = max(piece.staging_bytes for piece in pieces)
    staging = driver.allocate(size)
    for piece in pieces:
        _queue_piece(driver, piece, head.linear, (image, scale), Arena(staging, size))
    driver.synchronize()
    driver.release(staging)
    return LinearPart(rows.first_row, target.rows == source.rows, rows.matrix, linear)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of the head from source_row on, of the draft head from target_row on: whole row blocks
    of both layouts, or what is left at their ends."""

    source_row: int
    target_row: int
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


def _pieces(source: ImageLayout, listed: HeadRows) -> Iterator[_Piece]:
    """Row blocks are powers of two strips: the larger block holds whole smaller ones."""
    target = listed.matrix.layout
    block = STRIP_ROWS * max(source.strips_per_block, target.strips_per_block)
    source_block = STRIP_ROWS * source.strips_per_block
    step = max(1, _PIECE_BYTES // (2 * block * source.columns)) * block
    for first in range(0, target.rows, step):
        rows = min(step, target.rows - first)
        source_row = listed.first_row + first
        whole = min(-(-rows // source_block) * source_block, source.rows - source_row)
        yield _Piece(source_row, first, replace(source, rows=whole), replace(target, rows=rows))


def _queue_piece(
    driver: CudaDriver,
    piece: _Piece,
    head: PackedLinear,
    places: tuple[DeviceTensor, DeviceTensor],
    staging: Arena,
) -> None:
    kernels, stream = driver.kernels, driver.stream
    image, scale = places
    first, last = piece.source_row, piece.source_row + piece.source.rows
    rows, codes = piece.take(staging)
    row_scale = None if head.row_scale is None else _dense(head.row_scale, "float32")
    dequantise.launch(
        kernels, piece.source, _image_of(_dense(head.image, "uint8"), piece.source, first), rows,
        row_scale=None if row_scale is None else row_scale.rows(first, last), stream=stream,
    )  # fmt: skip
    kept = rows.rows(0, piece.target.rows)
    scales = scale.rows(piece.target_row, piece.target_row + piece.target.rows)
    quantise.launch_fp8_row(kernels, kept, codes, scales, stream=stream)
    linear_pack.launch(
        kernels,
        piece.target,
        codes,
        _image_of(image, piece.target, piece.target_row),
        stream=stream,
    )


def _dense(array: DeviceArray, dtype: str) -> DeviceTensor:
    view = view_of(DRAFT_HEAD, "head", array, dtype, 1)
    return DeviceTensor.dense(view.address, view.shape, dtype)


def _image_of(image: DeviceTensor, piece: ImageLayout, first_row: int) -> DeviceTensor:
    """The part of an image whose rows those of `piece` are; first_row begins a row block."""
    blocks = first_row // (STRIP_ROWS * piece.strips_per_block)
    offset = blocks * piece.units_per_block * piece.format.unit_bytes()
    return image.rows(offset, offset + piece.image_bytes)
