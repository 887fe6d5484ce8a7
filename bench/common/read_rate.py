"""R: the read-only streaming rate of this device, measured in the run that quotes it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from bench.common.timing import time_chain
from ninfer.kernels.library import KernelLibrary

_STAGE_BYTES: Final = 16384
_STAGES: Final = 6
_THREADS: Final = 160
_PARAMS: Final = np.dtype(
    [("data", "<u8"), ("sink", "<u8"), ("chunks", "<u8"), ("stages", "<i4"), ("padding", "<i4")]
)


def measure_read_rate(cp: Any, kernels: KernelLibrary, stream: Any, *, total_bytes: int) -> float:
    """Bytes a second over `total_bytes`, several times the cache; the best of three medians."""
    data = cp.zeros(total_bytes, cp.uint8)
    data[:: 1 << 12] = 1
    sink = cp.zeros(1, cp.uint32)
    params = np.zeros((), _PARAMS)
    params["data"], params["sink"] = data.data.ptr, sink.data.ptr
    params["chunks"], params["stages"] = total_bytes // _STAGE_BYTES, _STAGES
    function = kernels.function("stream_read", "stream_read")
    shared_bytes = _STAGES * (_STAGE_BYTES + 16)
    function.reserve_shared(shared_bytes)
    stream.synchronize()

    def read(_item: int) -> None:
        function.launch(
            (kernels.limits.num_multiprocessors * 2, 1, 1), (_THREADS, 1, 1), params,
            stream=stream.ptr, shared_bytes=shared_bytes,
        )  # fmt: skip

    timings = [time_chain(cp, stream, read, items=1) for _ in range(3)]
    return total_bytes / (min(timing.median_us for timing in timings) * 1e-6)
