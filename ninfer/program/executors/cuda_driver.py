"""CudaDriver: what the CUDA executor asks of a device, apart from the kernels' own launches.

One stream carries all work of units in order, another one the moves beside them. Addresses and
streams are integers, so that everything above the driver can be built, planned and tested without a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias

from numpy.typing import NDArray

from ninfer.kernels.library import KernelLibrary
from ninfer.program.executors.cuda_tensor import DeviceTensor

NUM_MARKS: Final = 2
Graph: TypeAlias = Any
"""A captured graph, opaque to all but the driver that made it."""
HostArray: TypeAlias = NDArray[Any]


class CudaDriver(Protocol):
    """Every method raises DeviceError when the device or its driver fails."""

    @property
    def kernels(self) -> KernelLibrary: ...

    @property
    def stream(self) -> int: ...

    @property
    def copy_stream(self) -> int:
        """Runs beside `stream`, in no order with it."""

    def activate(self) -> None:
        """Make the device current in the calling thread; before any other call of a thread."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device now."""

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory, aligned to 256 bytes. MemoryError when there is not enough."""

    def release(self, address: int) -> None: ...

    def allocate_pinned(self, num_bytes: int, *, is_zeroed: bool = True) -> HostArray:
        """[num_bytes] uint8, page-locked; lives as long as the driver. The device reads and writes
        it at the host's address. MemoryError when the system locks no more."""

    def lock(self, memory: HostArray) -> HostArray:
        """`memory` [n] uint8, page-locked until the driver is closed; other memory of that size
        where a device cannot lock what is there already. The device reads and writes it at the
        host's address. MemoryError when the system locks no more."""

    def upload(self, target: int, source: HostArray) -> None:
        """Queue a copy of a contiguous host array; it must not change before it was copied."""

    def download(self, target: HostArray, source: int) -> None:
        """Queue a copy into a contiguous host array."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy inside the device's memory."""

    def fill(self, target: int, byte: int, num_bytes: int) -> None:
        """Queue setting every byte."""

    def multiply(
        self, x: DeviceTensor, weight: DeviceTensor, y: DeviceTensor, *, adds: bool = False
    ) -> None:
        """Queue y[T, N] = x[T, K] @ weight[N, K].T, or y += with `adds`; bf16 (y also
        f32), sums in f32."""

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What `enqueue` queues, as a graph; nothing runs yet. Not for `multiply`."""

    def replay(self, graph: Graph) -> None:
        """Queue a captured graph."""

    def mark(self, place: int = 0) -> None:
        """Queue the mark that `has_passed` asks for; there are NUM_MARKS places for one."""

    def has_passed(self, place: int = 0) -> bool:
        """Whether everything queued before the last mark of that place has run."""

    def synchronize(self) -> None:
        """Block until everything queued has run."""

    def order_copies(self) -> None:
        """Let what is queued on the copy stream from now on wait for all that is queued here."""

    def mark_copies(self) -> None:
        """Queue the mark of the copy stream that `copies_have_passed` asks for; there is one."""

    def copies_have_passed(self) -> bool:
        """Whether everything queued on the copy stream before its last mark has run."""

    def synchronize_copies(self) -> None:
        """Block until everything queued on the copy stream has run."""

    def measure(self, enqueue: Callable[[], None]) -> float:
        """Seconds the device takes for what `enqueue` queues; blocks."""

    def traced(self, on_launch: Callable[[str], None]) -> AbstractContextManager[None]:
        """While it is open, every kernel launch reports its family."""

    def time_families(self, enqueue: Callable[[], None]) -> dict[str, float]:
        """Seconds by kernel family of what `enqueue` queues, captured with an event behind every
        kernel; blocks. The time of copies counts for the kernel behind them."""

    def close(self) -> None:
        """Release what the driver owns; idempotent, never raises."""
