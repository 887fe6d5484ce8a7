"""A CudaDriver without a device: memory is bytes of the host, kernels only leave a record (but
`copies`, which copies).

Every launch runs its own contract checks on the way; copies and fills really happen, so inputs and
results can be looked at by address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import DeviceError
from ninfer.kernels.library import DeviceLimits, KernelFunction, KernelLibrary
from ninfer.ops import copies
from ninfer.program.executors.cuda_driver import NUM_MARKS, HostArray
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_trace import TracedLibrary

H200 = DeviceLimits("fake H200", "sm_90a", 132, 232_448, 233_472)
_BASE = 1 << 32
_PAGE = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """One queued kernel; `arguments` a copy of its struct."""

    family: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: NDArray[np.void]
    shared_bytes: int
    is_programmatic: bool
    stream: int


@dataclass(frozen=True, slots=True)
class Product:
    x: DeviceTensor
    weight: DeviceTensor
    y: DeviceTensor
    adds: bool


class RecordingFunction(KernelFunction):
    """Has every occupancy that real kernels are written for."""

    def __init__(self, owner: FakeCuda, family: str, entry: str) -> None:
        self._owner = owner
        self._family = family
        self.entry = entry

    def reserve_shared(self, shared_bytes: int) -> None:
        assert shared_bytes <= H200.shared_bytes_per_block

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        return max(1, H200.shared_bytes_per_multiprocessor // (shared_bytes + 1024))

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: NDArray[np.void],
        *,
        stream: int,
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        assert stream in (self._owner.stream, self._owner.copy_stream)
        assert all(size >= 1 for size in (*grid, *block))
        assert int(np.prod(block)) <= 1024
        record = Launch(
            self._family, self.entry, grid, block, arguments.copy(), shared_bytes, programmatic,
            stream,
        )  # fmt: skip
        self._owner.queue(record)
        if self._family == "copies" and self._owner.has_memory:
            self._owner.copy_ranges(arguments)


class RecordingLibrary(KernelLibrary):
    def __init__(self, owner: FakeCuda) -> None:
        self.limits = H200
        self._owner = owner

    def function(self, name: str, entry: str, **_: Any) -> KernelFunction:
        return RecordingFunction(self._owner, name, entry)


@dataclass(eq=False)
class FakeCuda:
    """`queued` is all that was queued outside of captures; `on_replay` may play the device.

    fails_at   the number of a queued item that fails like a lost device
    polls      how often `has_passed` says no before it says yes
    has_memory   False: allocations have addresses only, copies and fills do nothing
    """

    free_bytes: int = 1 << 36
    fails_at: int | None = None
    polls: int = 1
    has_memory: bool = True
    on_replay: Callable[[list[Any]], None] | None = None
    queued: list[Any] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    allocations: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    pinned: list[HostArray] = field(default_factory=list)
    stream: int = 77
    copy_stream: int = 78
    max_pinned_bytes: int = 1 << 40
    is_closed: bool = False
    _next: int = _BASE
    _capture: list[Any] | None = None
    num_queued: int = 0
    num_synchronised: int = 0
    num_synchronised_copies: int = 0
    num_ordered_copies: int = 0
    _copy_polls_left: int = 0
    _polls_left: list[int] = field(default_factory=lambda: [0] * NUM_MARKS)

    def __post_init__(self) -> None:
        self.kernels: KernelLibrary = RecordingLibrary(self)

    def activate(self) -> None:
        self._check()

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, 1 << 37

    def allocate(self, num_bytes: int) -> int:
        if sum(self.sizes.values()) + num_bytes > self.free_bytes:
            raise MemoryError(f"{num_bytes} bytes")
        address = self._next
        self._next += -(-num_bytes // _PAGE) * _PAGE + _PAGE
        self.sizes[address] = num_bytes
        if self.has_memory:
            self.allocations[address] = np.full(num_bytes, 0xA5, np.uint8)
        return address

    def release(self, address: int) -> None:
        del self.sizes[address]
        self.allocations.pop(address, None)

    def allocate_pinned(self, num_bytes: int, *, is_zeroed: bool = True) -> HostArray:
        if sum(array.nbytes for array in self.pinned) + num_bytes > self.max_pinned_bytes:
            raise MemoryError(f"{num_bytes} bytes of page-locked memory")
        # What a driver hands out begins at a multiple of 16, NumPy's own small arrays may not.
        whole = np.zeros(num_bytes + 16, np.uint8)
        first = -whole.ctypes.data % 16
        array = whole[first : first + num_bytes]
        self.pinned.append(array)
        return array

    def lock(self, memory: HostArray) -> HostArray:
        if sum(array.nbytes for array in self.pinned) + memory.nbytes > self.max_pinned_bytes:
            raise MemoryError(f"{memory.nbytes} bytes of page-locked memory")
        self.pinned.append(memory)
        return memory

    def upload(self, target: int, source: HostArray) -> None:
        assert source.flags.c_contiguous
        data = source.reshape(-1).view(np.uint8)

        def copy() -> None:
            self.memory(target, data.nbytes)[:] = data

        self.queue(copy)

    def download(self, target: HostArray, source: int) -> None:
        assert target.flags.c_contiguous
        data = target.reshape(-1).view(np.uint8)

        def copy() -> None:
            data[:] = self.memory(source, data.nbytes)

        self.queue(copy)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        def copy() -> None:
            self.memory(target, num_bytes)[:] = self.memory(source, num_bytes)

        self.queue(copy)

    def fill(self, target: int, byte: int, num_bytes: int) -> None:
        def fill() -> None:
            self.memory(target, num_bytes)[:] = byte

        self.queue(fill)

    def multiply(
        self, x: DeviceTensor, weight: DeviceTensor, y: DeviceTensor, *, adds: bool = False
    ) -> None:
        assert self._capture is None, "cuBLAS cannot be captured"
        assert (x.shape[1], x.shape[0]) == (weight.shape[1], y.shape[0])
        assert y.shape[1] == weight.shape[0]
        self.queue(Product(x, weight, y, adds))

    def capture(self, enqueue: Callable[[], None]) -> list[Any]:
        assert self._capture is None
        self._capture = []
        enqueue()
        graph, self._capture = self._capture, None
        return graph

    def replay(self, graph: list[Any]) -> None:
        for item in graph:
            self.queue(item)
        if self.on_replay is not None:
            self.on_replay(graph)

    def mark(self, place: int = 0) -> None:
        self._check()
        self._polls_left[place] = self.polls

    def has_passed(self, place: int = 0) -> bool:
        self._check()
        self._polls_left[place] -= 1
        return self._polls_left[place] < 0

    def synchronize(self) -> None:
        self._check()
        self.num_synchronised += 1

    def order_copies(self) -> None:
        self._check()
        self.num_ordered_copies += 1

    def mark_copies(self) -> None:
        self._check()
        self._copy_polls_left = self.polls

    def copies_have_passed(self) -> bool:
        self._check()
        self._copy_polls_left -= 1
        return self._copy_polls_left < 0

    def synchronize_copies(self) -> None:
        self._check()
        self.num_synchronised_copies += 1

    def copy_ranges(self, arguments: NDArray[np.void]) -> None:
        """What the kernel does: all sources are read before a target is written."""
        size = int(arguments["num_ranges"]) * copies.RANGE.itemsize
        ranges = self.memory(int(arguments["ranges"]), size).view(copies.RANGE).copy()
        filled = ranges[ranges["bytes"] > 0].tolist()
        read = [self.memory(source, size).copy() for source, _, size in filled]
        for (_, target, size), data in zip(filled, read, strict=True):
            self.memory(target, size)[:] = data

    def measure(self, enqueue: Callable[[], None]) -> float:
        """A microsecond for each item."""
        before = self.num_queued
        enqueue()
        return (self.num_queued - before) * 1e-6

    @contextmanager
    def traced(self, on_launch: Callable[[str], None]) -> Iterator[None]:
        library = self.kernels
        self.kernels = TracedLibrary(library, on_launch)
        try:
            yield
        finally:
            self.kernels = library

    def time_families(self, enqueue: Callable[[], None]) -> dict[str, float]:
        counts: Counter[str] = Counter()
        with self.traced(lambda family: counts.update((family,))):
            self.capture(enqueue)
        return {family: count * 1e-6 for family, count in counts.items()}

    def close(self) -> None:
        self.is_closed = True
        self.sizes.clear()
        self.allocations.clear()

    def queue(self, item: Any) -> None:
        """Record one item; copies and fills take place at once, outside of captures."""
        if self._capture is not None:
            self._capture.append(item)
            return
        self.num_queued += 1
        self._check()
        self.queued.append(item)
        if callable(item) and self.has_memory:
            item()

    def memory(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """The bytes of a stretch inside one allocation, on the device or page-locked."""
        pinned = {array.ctypes.data: array for array in self.pinned}
        for start, array in {**pinned, **self.allocations}.items():
            if start <= address and address + num_bytes <= start + array.nbytes:
                return array[address - start : address - start + num_bytes]
        raise AssertionError(f"{num_bytes} bytes at {address:#x} are not allocated")

    def read(self, tensor: DeviceTensor) -> NDArray[Any]:
        """A dense tensor's present contents."""
        data = self.memory(tensor.address, tensor.num_bytes)
        return data.view(np.dtype(tensor.dtype)).reshape(tensor.shape)

    def write_results(self, results: NDArray[Any]) -> None:
        """Play the sampler of the newest launch: `results` are its outputs, one behind another."""
        sampling = [launch for launch in self.launches() if launch.family == "sampling"][-1]
        address = int(sampling.arguments["token_ids"])
        self.memory(address, results.nbytes)[:] = results.view(np.uint8)

    def launches(self, items: list[Any] | None = None) -> list[Launch]:
        """The kernels among queued items."""
        return [
            item for item in (self.queued if items is None else items) if isinstance(item, Launch)
        ]

    def _check(self) -> None:
        if self.fails_at is not None and self.num_queued >= self.fails_at:
            raise DeviceError("cuda: an illegal memory access was encountered")
