"""CudaMover: pages and StateImages copied inside the device and between it and host blocks.

    host block   a page's parts one behind another: of each attention layer its pages, then scales
    StateImage   conv, recurrent, then hidden of one slot, cut into blocks; the last may be filled
                 in part

Every copy is a list of ranges for one launch of `copies`, which reads the list from page-locked
memory. Copies of a unit go ahead of it on its stream. Moves have the copy stream and few thread
blocks: the bus is the limit, and the units beside them keep the rest of the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import ByteArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Move, UnitRow
from ninfer.ops import copies
from ninfer.program.executors.cuda_driver import CudaDriver, HostArray
from ninfer.program.executors.cuda_memory import CudaMemory
from ninfer.program.executors.cuda_tensor import DeviceTensor

MOVE_RANGES: Final = 2048
"""Most ranges of one launch of a move; the list is written anew for the next."""
MOVE_BLOCKS: Final = 16
"""Thread blocks of a move: 16 KiB in flight each are more than a bus needs."""
_POLL_S: Final = 0.001

Addresses: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Stretches that make up one page or one StateImage, in order.

    bases     [P] address of stretch p of page (slot) 0
    strides   [P] bytes from one page (slot) to the next
    sizes     [P] bytes
    offsets   [P] bytes ahead of it in the whole
    """

    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def addresses(self, numbers: Sequence[int]) -> Addresses:
        """[N, P] addresses of the stretches of these pages (slots)."""
        return self.bases + np.array(numbers, np.uint64)[:, None] * self.strides


class CudaMover:
    """Raises DeviceError. One move at a time."""

    def __init__(
        self, driver: CudaDriver, memory: CudaMemory, host_blocks: HostArray, *, max_rows: int
    ) -> None:
        """`host_blocks`: whole blocks, page-locked. Queues a launch that copies nothing, so that
        the kernel is loaded before the first request."""
        self._driver = driver
        self._page = _page_parts(memory)
        self._state = _state_parts(memory)
        page_bytes = self.page_bytes
        num_blocks = host_blocks.size // page_bytes if page_bytes > 0 else 0
        self.host_blocks: ByteArray = host_blocks.reshape(num_blocks, page_bytes)
        self._pieces = _pieces_of(self._state, page_bytes) if page_bytes > 0 else None
        size = copies.RANGE.itemsize
        most = max(1, max_rows * self._page.sizes.size)
        self._unit_list = driver.allocate_pinned(most * size).view(copies.RANGE)
        self._move_list = driver.allocate_pinned(MOVE_RANGES * size).view(copies.RANGE)
        self._launch(self._unit_list[:1], driver.stream)

    @property
    def page_bytes(self) -> int:
        return self._page.num_bytes

    @property
    def slot_bytes(self) -> int:
        return self._state.num_bytes

    def queue_copies(self, rows: Sequence[UnitRow]) -> None:
        """Queue the page copies that the rows of a unit ask for. Nothing of the unit before may
        still be queued."""
        pairs = [pair for row in rows for pair in row.copies]
        if not pairs:
            return
        sources = self._page.addresses([source for source, _ in pairs])
        targets = self._page.addresses([target for _, target in pairs])
        ranges = self._unit_list[: sources.size]
        _fill(ranges, sources, targets, np.broadcast_to(self._page.sizes, sources.shape))
        self._launch(ranges, self._driver.stream)

    async def save(self, move: Move) -> None:
        """Device to host."""
        device, host, sizes = self._ranges(move)
        await self._move(device, host, sizes)

    async def load(self, move: Move) -> None:
        """Host to device, behind all that is queued for units: a step that was started ahead may
        still write where a row has given its place back."""
        self._driver.order_copies()
        device, host, sizes = self._ranges(move)
        await self._move(host, device, sizes)

    async def _move(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        try:
            for first in range(0, sources.size, MOVE_RANGES):
                part = slice(first, first + MOVE_RANGES)
                ranges = self._move_list[: sources[part].size]
                _fill(ranges, sources[part], targets[part], sizes[part])
                self._launch(ranges, self._driver.copy_stream, max_blocks=MOVE_BLOCKS)
                self._driver.mark_copies()
                while not self._driver.copies_have_passed():  # noqa: ASYNC110, nothing else tells
                    await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._driver.synchronize_copies()
            raise

    def _ranges(self, move: Move) -> tuple[Addresses, Addresses, Addresses]:
        """(addresses on the device, addresses on the host, bytes), flat."""
        first = np.uint64(self.host_blocks.ctypes.data)
        stride = np.uint64(self.page_bytes)
        blocks = np.array([block for _, block in move.pages], np.uint64)[:, None]
        device = self._page.addresses([page for page, _ in move.pages])
        host = first + blocks * stride + self._page.offsets
        sizes = np.broadcast_to(self._page.sizes, device.shape)
        if move.slot is None:
            return device.reshape(-1), host.reshape(-1), sizes.reshape(-1)
        if self._pieces is None or len(move.state_blocks) != self._pieces.num_blocks:
            raise InvariantError(f"a StateImage in {len(move.state_blocks)} host blocks")
        pieces = self._pieces
        slot = self._state.addresses([move.slot])[0, pieces.part] + pieces.offset
        state_blocks = np.array(move.state_blocks, np.uint64)[pieces.block]
        return (
            np.concatenate([device.reshape(-1), slot]),
            np.concatenate([host.reshape(-1), first + state_blocks * stride + pieces.place]),
            np.concatenate([sizes.reshape(-1), pieces.size]),
        )

    def _launch(self, ranges: NDArray[Any], stream: int, max_blocks: int | None = None) -> None:
        address, num_bytes = ranges.ctypes.data, ranges.nbytes
        copies.launch(
            self._driver.kernels,
            DeviceTensor.dense(address, (num_bytes,), "uint8"),
            ranges.size,
            max(copies.ALIGNMENT_BYTES, int(ranges["bytes"].max())),
            stream=stream,
            max_blocks=max_blocks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """A StateImage cut where a part or a block ends: `size` bytes from `offset` of part `part` lie
    at `place` of its block number `block`."""

    part: NDArray[np.intp]
    offset: Addresses
    block: NDArray[np.intp]
    place: Addresses
    size: Addresses
    num_blocks: int


def _pieces_of(state: _Parts, block_bytes: int) -> _Pieces:
    rows: list[tuple[int, int, int, int, int]] = []
    at = 0
    for part, size in enumerate(state.sizes.tolist()):
        offset = 0
        while offset < size:
            block, place = divmod(at, block_bytes)
            length = min(size - offset, block_bytes - place)
            rows.append((part, offset, block, place, length))
            offset, at = offset + length, at + length
    table = np.array(rows, np.uint64).reshape(-1, 5)
    return _Pieces(
        part=table[:, 0].astype(np.intp),
        offset=table[:, 1],
        block=table[:, 2].astype(np.intp),
        place=table[:, 3],
        size=table[:, 4],
        num_blocks=-(-at // block_bytes),
    )


def _page_parts(memory: CudaMemory) -> _Parts:
    tensors = []
    for layer in memory.kv:
        tensors.append(layer.pages)
        if layer.scales is not None:
            tensors.append(layer.scales)
    return _parts_of(tensors)


def _state_parts(memory: CudaMemory) -> _Parts:
    planes = (memory.conv, memory.recurrent, memory.hidden)
    return _parts_of([plane for plane in planes if plane is not None])


def _parts_of(tensors: Sequence[DeviceTensor]) -> _Parts:
    """One stretch of each tensor, whose first axis counts pages (slots)."""
    sizes = [tensor.num_bytes // tensor.shape[0] for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        if size % copies.ALIGNMENT_BYTES or tensor.address % copies.ALIGNMENT_BYTES:
            raise InvariantError(f"{tensor.shape} of {tensor.dtype} cannot be copied by vectors")
    bytes_of = np.array(sizes, np.uint64)
    return _Parts(
        bases=np.array([tensor.address for tensor in tensors], np.uint64),
        strides=bytes_of,
        sizes=bytes_of,
        offsets=np.cumsum(bytes_of, dtype=np.uint64) - bytes_of,
    )


def _fill(ranges: NDArray[Any], sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
    ranges["source"] = sources.reshape(-1)
    ranges["target"] = targets.reshape(-1)
    ranges["bytes"] = sizes.reshape(-1)
