"""OpBench: what the benchmarks of single Ops share: kernels, a stream, the read rate R, a clock."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cupy as cp

from bench.common.read_rate import measure_read_rate
from bench.common.timing import time_chain
from ninfer.kernels.library import KernelLibrary

_READ_BYTES: Final = 8 << 30
_CACHE_NAME: Final = "ninfer-bench-kernels"


class OpBench:
    """Device 0; its stream is current. `read_rate` is measured on opening."""

    def __init__(self) -> None:
        cp.cuda.Device(0).use()
        self.kernels = KernelLibrary.open(cache_dir=Path(tempfile.gettempdir()) / _CACHE_NAME)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.read_rate = measure_read_rate(cp, self.kernels, self.stream, total_bytes=_READ_BYTES)
        print(f"R = {self.read_rate / 1e12:.3f} TB/s, read only", flush=True)

    def time(self, enqueue: Callable[[int], None], items: int) -> float:
        """Median microseconds of one of the chained enqueue(0) .. enqueue(items - 1)."""
        enqueue(0)
        self.stream.synchronize()
        return time_chain(cp, self.stream, enqueue, items=items).median_us


def random_bf16(*shape: int) -> Any:
    """Standard normal, on the device."""
    values = cp.random.standard_normal(shape, dtype=cp.float32)
    return (values.view(cp.uint32) >> 16).astype(cp.uint16)
