"""Host memory that is touched before it is locked."""

from __future__ import annotations

import mmap
import sys

import pytest

from ninfer.program.touched_memory import touched_memory


@pytest.mark.parametrize("num_bytes", [0, 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
def test_it_is_zeros_from_a_page_on_and_can_be_written(num_bytes: int) -> None:
    memory = touched_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory[...] = 7
    assert (memory == 7).all()
    assert num_bytes == 0 or memory.ctypes.data % mmap.PAGESIZE == 0


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory"):
        touched_memory(1 << 60)
    with pytest.raises(MemoryError):
        touched_memory(sys.maxsize + 1)
