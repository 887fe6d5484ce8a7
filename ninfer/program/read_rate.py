"""R: the rate at which a device reads its memory once, the yardstick of decode."""

from __future__ import annotations

import statistics
from typing import Final

import numpy as np

from ninfer.program.executors.cuda_driver import CudaDriver

_STAGE_BYTES: Final = 16_384
_STAGES: Final = 6
_THREADS: Final = 160
_REPEATS: Final = 7
_MOST_BYTES: Final = 8 << 30
_PARAMS: Final = np.dtype(
    [("data", "<u8"), ("sink", "<u8"), ("chunks", "<u8"), ("stages", "<i4"), ("padding", "<i4")]
)


def measure_read_rate(driver: CudaDriver) -> float:
    """Bytes a second, median over reads of up to 8 GiB of what is free. Raises DeviceError."""
    free_bytes, _ = driver.memory_info()
    chunks = min(_MOST_BYTES, free_bytes // 2) // _STAGE_BYTES
    size = chunks * _STAGE_BYTES
    data, sink = driver.allocate(size), driver.allocate(4)
    driver.fill(data, 1, size)
    params = np.zeros((), _PARAMS)
    params["data"], params["sink"] = data, sink
    params["chunks"], params["stages"] = chunks, _STAGES
    function = driver.kernels.function("stream_read", "stream_read")
    shared_bytes = _STAGES * (_STAGE_BYTES + 16)
    function.reserve_shared(shared_bytes)

    def read() -> None:
        function.launch(
            (driver.kernels.limits.num_multiprocessors * 2, 1, 1),
            (_THREADS, 1, 1),
            params,
            stream=driver.stream,
            shared_bytes=shared_bytes,
        )

    driver.measure(read)
    seconds = statistics.median(driver.measure(read) for _ in range(_REPEATS))
    driver.release(data)
    driver.release(sink)
    return size / seconds
