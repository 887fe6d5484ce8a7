"""Host memory that is there already: the system gives pages at first use, which takes seconds for
gigabytes, so they are used once ahead of time, in a thread."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from ninfer.contract.arrays import ByteArray


def touched_memory(num_bytes: int) -> ByteArray:
    """[num_bytes] uint8 of zeros from a page's start on, in large pages where the system has them.
    MemoryError when it gives no more. Lets other threads run."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{num_bytes:,} bytes of host memory") from error
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: ByteArray = np.frombuffer(memory, np.uint8)
    array[:: mmap.PAGESIZE] = 0
    return array
