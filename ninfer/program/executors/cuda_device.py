"""CudaDevice: CudaDriver over CuPy; the one module of the package that imports it.

CuPy is imported when a device is opened. Memory is taken from the runtime, not from CuPy's pool:
the executor allocates at start only, and gives everything back at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels.library import KernelLibrary
from ninfer.kernels.packages import EXTRAS_HINT
from ninfer.program.executors.cuda_driver import NUM_MARKS, Graph, HostArray
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_trace import TracedLibrary

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
_DEVICE_TO_DEVICE: Final = 3
_SUCCESS: Final = 0
_NOT_READY: Final = 600
_OUT_OF_MEMORY: Final = 2
_REGISTER_FLAGS: Final = 3
"""cudaHostRegisterPortable and cudaHostRegisterMapped."""
_R_32F: Final = 0
_R_16BF: Final = 14
_COMPUTE_32F: Final = 68
_DEFAULT_ALGORITHM: Final = -1
_TRANSPOSE: Final = 1
_NO_TRANSPOSE: Final = 0
_LEAST_BYTES: Final = 1 << 10
"""What an empty allocation takes, so that each has an address of its own."""


def unusable_reason(index: int = 0) -> str | None:
    """Why device `index` cannot be used, or None. Does not import CuPy without a driver library."""
    if not _driver_loads():
        return "there is no NVIDIA driver library"
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {EXTRAS_HINT}"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device answers ({error})"
    if index >= count:
        return f"there are {count} CUDA devices, no device {index}"
    return None


class CudaDevice:
    """Implements CudaDriver for device `index`. Raises DeviceError."""

    def __init__(self, index: int = 0, *, cubin_dir: Path | None = None) -> None:
        reason = unusable_reason(index)
        if reason is not None:
            raise DeviceError(f"cuda device {index}: {reason}")
        import cupy

        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime
        self._index = index
        self._blas: Any = None
        self._blas_handle = 0
        self._pinned: list[Any] = []
        self._locked: list[HostArray] = []
        self._allocations: set[int] = set()
        self._constants = np.array([0.0, 1.0], np.float32)
        with self._checked("open"):
            self._runtime.setDevice(index)
            self._runtime.free(0)
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._marks = [cupy.cuda.Event(disable_timing=True) for _ in range(NUM_MARKS)]
            self._copy_stream = cupy.cuda.Stream(non_blocking=True)
            self._copy_event = cupy.cuda.Event(disable_timing=True)
            self._order_event = cupy.cuda.Event(disable_timing=True)
        self._kernels = KernelLibrary.open(cubin_dir=cubin_dir)

    @property
    def kernels(self) -> KernelLibrary:
        return self._kernels

    @property
    def stream(self) -> int:
        return int(self._stream.ptr)

    @property
    def copy_stream(self) -> int:
        return int(self._copy_stream.ptr)

    def activate(self) -> None:
        with self._checked("activate"):
            self._runtime.setDevice(self._index)

    def memory_info(self) -> tuple[int, int]:
        with self._checked("memory info"):
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        try:
            address = int(self._runtime.malloc(max(num_bytes, _LEAST_BYTES)))
        except self._runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(f"{num_bytes:,} bytes on cuda device {self._index}") from error
            raise DeviceError(f"cuda: allocate: {error}") from error
        self._allocations.add(address)
        return address

    def release(self, address: int) -> None:
        if address not in self._allocations:
            raise InvariantError(f"device memory at {address:#x} is not allocated")
        self._allocations.remove(address)
        with self._checked("release"):
            self._runtime.free(address)

    def allocate_pinned(self, num_bytes: int, *, is_zeroed: bool = True) -> HostArray:
        try:
            memory = self._cupy.cuda.alloc_pinned_memory(max(num_bytes, 1))
        except self._runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(f"{num_bytes:,} bytes of page-locked memory") from error
            raise DeviceError(f"cuda: pinned memory: {error}") from error
        self._pinned.append(memory)
        array = np.frombuffer(memory, np.uint8, count=num_bytes)
        if is_zeroed:
            array[:] = 0
        return array

    def lock(self, memory: HostArray) -> HostArray:
        if memory.nbytes == 0:
            return memory
        if not self._locks_in_place:
            return self.allocate_pinned(memory.nbytes, is_zeroed=False)
        try:
            self._runtime.hostRegister(memory.ctypes.data, memory.nbytes, _REGISTER_FLAGS)
        except self._runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(f"{memory.nbytes:,} bytes of page-locked memory") from error
            raise DeviceError(f"cuda: host memory: {error}") from error
        self._locked.append(memory)
        return memory

    @property
    def _locks_in_place(self) -> bool:
        """Whether the device takes locked memory, and that by the host's address."""
        runtime = self._runtime
        wanted = (
            runtime.cudaDevAttrHostRegisterSupported,
            runtime.cudaDevAttrCanUseHostPointerForRegisteredMem,
        )
        with self._checked("attributes"):
            return all(runtime.deviceGetAttribute(name, self._index) for name in wanted)

    def upload(self, target: int, source: HostArray) -> None:
        _require_contiguous(source)
        with self._checked("upload"):
            self._runtime.memcpyAsync(
                target, source.ctypes.data, source.nbytes, _HOST_TO_DEVICE, self.stream
            )

    def download(self, target: HostArray, source: int) -> None:
        _require_contiguous(target)
        with self._checked("download"):
            self._runtime.memcpyAsync(
                target.ctypes.data, source, target.nbytes, _DEVICE_TO_HOST, self.stream
            )

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        with self._checked("copy"):
            self._runtime.memcpyAsync(target, source, num_bytes, _DEVICE_TO_DEVICE, self.stream)

    def fill(self, target: int, byte: int, num_bytes: int) -> None:
        with self._checked("fill"):
            self._runtime.memsetAsync(target, byte, num_bytes, self.stream)

    def multiply(
        self, x: DeviceTensor, weight: DeviceTensor, y: DeviceTensor, *, adds: bool = False
    ) -> None:
        tokens, columns = x.shape
        rows = weight.shape[0]
        if weight.shape != (rows, columns) or y.shape != (tokens, rows):
            raise InvariantError(f"a product of {x.shape} and {weight.shape} is not {y.shape}")
        y_type = _R_32F if y.dtype == "float32" else _R_16BF
        zero, one = self._constants.ctypes.data, self._constants.ctypes.data + 4
        with self._checked("matrix product"), self._stream:
            # Row-major y = x W^T is column-major y^T = W x^T.
            self._blas_library().gemmEx(
                self._blas_handle, _TRANSPOSE, _NO_TRANSPOSE, rows, tokens, columns,
                one, weight.address, _R_16BF, weight.row_stride,
                x.address, _R_16BF, x.row_stride,
                one if adds else zero, y.address, y_type, y.row_stride,
                _COMPUTE_32F, _DEFAULT_ALGORITHM,
            )  # fmt: skip

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        with self._checked("graph capture"):
            self._stream.begin_capture()
            try:
                enqueue()
            finally:
                graph = self._stream.end_capture()
        return graph

    def replay(self, graph: Graph) -> None:
        # No context manager here and in `mark`: the device waits between two decode steps.
        try:
            graph.launch(self._stream)
        except RuntimeError as error:
            raise _failure("graph launch", error) from error

    def mark(self, place: int = 0) -> None:
        try:
            self._marks[place].record(self._stream)
        except RuntimeError as error:
            raise _failure("event", error) from error

    def has_passed(self, place: int = 0) -> bool:
        return self._has_passed(self._marks[place])

    def synchronize(self) -> None:
        with self._checked("synchronize"):
            self._stream.synchronize()

    def order_copies(self) -> None:
        with self._checked("event"):
            self._order_event.record(self._stream)
            self._copy_stream.wait_event(self._order_event)

    def mark_copies(self) -> None:
        with self._checked("event"):
            self._copy_event.record(self._copy_stream)

    def copies_have_passed(self) -> bool:
        return self._has_passed(self._copy_event)

    def synchronize_copies(self) -> None:
        with self._checked("synchronize copies"):
            self._copy_stream.synchronize()

    def _has_passed(self, event: Any) -> bool:
        status = int(self._runtime.eventQuery(event.ptr))
        if status not in (_SUCCESS, _NOT_READY):
            raise DeviceError(f"cuda: the device failed: {self._runtime.CUDARuntimeError(status)}")
        return status == _SUCCESS

    def measure(self, enqueue: Callable[[], None]) -> float:
        with self._checked("measurement"):
            start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            start.record(self._stream)
            enqueue()
            end.record(self._stream)
            end.synchronize()
            milliseconds = self._cupy.cuda.get_elapsed_time(start, end)
        return float(milliseconds) * 1e-3

    @contextmanager
    def traced(
        self, on_launch: Callable[[str], None], *, is_serial: bool = False
    ) -> Iterator[None]:
        library = self._kernels
        self._kernels = TracedLibrary(library, on_launch, is_serial=is_serial)
        try:
            yield
        finally:
            self._kernels = library

    def time_families(self, enqueue: Callable[[], None]) -> dict[str, float]:
        events: list[Any] = [self._cupy.cuda.Event()]
        families: list[str] = []

        def enqueue_with_events() -> None:
            self._record_external(events[0])
            enqueue()

        def add_event(family: str) -> None:
            families.append(family)
            events.append(self._cupy.cuda.Event())
            self._record_external(events[-1])

        # An event between two kernels leaves nothing to overlap.
        with self.traced(add_event, is_serial=True):
            graph = self.capture(enqueue_with_events)
        # The first replay only warms up: the events hold the times of the last one.
        for _ in range(2):
            self.replay(graph)
            self.synchronize()
        seconds: dict[str, float] = {}
        with self._checked("measurement"):
            for family, start, end in zip(families, events, events[1:], strict=False):
                elapsed = float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e-3
                seconds[family] = seconds.get(family, 0.0) + elapsed
        return seconds

    def _record_external(self, event: Any) -> None:
        """An event as a node of the graph that is being captured."""
        from cuda.bindings import driver

        flags = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        (status,) = driver.cuEventRecordWithFlags(
            driver.CUevent(event.ptr), driver.CUstream(self.stream), flags
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"cuda: an event was not recorded: {status}")

    def close(self) -> None:
        """After a failure the runtime refuses to free; the process's end does it then."""
        allocations, self._allocations = self._allocations, set()
        blas, self._blas = self._blas, None
        locked, self._locked = self._locked, []
        with suppress(RuntimeError):
            self._runtime.setDevice(self._index)
            for address in allocations:
                self._runtime.free(address)
            for memory in locked:
                self._runtime.hostUnregister(memory.ctypes.data)
            if blas is not None:
                blas.destroy(self._blas_handle)

    def _blas_library(self) -> Any:
        """The library and a handle of our own: CuPy's are one a thread."""
        if self._blas is None:
            from cupy_backends.cuda.libs import cublas

            self._blas_handle = int(cublas.create())
            self._blas = cublas
        return self._blas

    @contextmanager
    def _checked(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # What CuPy raises for the runtime, for cuBLAS and for captures has no nearer root.
            raise _failure(what, error) from error


def _failure(what: str, error: RuntimeError) -> DeviceError:
    return DeviceError(f"cuda: {what} failed: {error}")


def _driver_loads() -> bool:
    """Takes a millisecond where there is no driver, and CuPy a second to import."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _require_contiguous(array: HostArray) -> None:
    if not array.flags.c_contiguous:
        raise InvariantError(f"a host array {array.shape} for a copy is not contiguous")
