"""Device tensors and arenas: addresses follow from shapes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.kernels.device_array import view_of
from ninfer.program.executors.cuda_tensor import ALIGNMENT_BYTES, Arena, DeviceTensor

DTYPES = ("uint8", "uint16", "int32", "float32", "uint64")


def host_tensor(array: np.typing.NDArray[Any]) -> DeviceTensor:
    """A tensor over the array's own memory, so that NumPy tells what is right."""
    return DeviceTensor.dense(array.ctypes.data, array.shape, array.dtype.name)


def read(tensor: DeviceTensor) -> np.typing.NDArray[Any]:
    class Holder:
        __array_interface__ = tensor.__cuda_array_interface__

    return np.asarray(Holder())


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_parts_are_what_numpy_takes(shape: list[int], dtype: str, data: st.DataObject) -> None:
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    tensor = host_tensor(array)
    first = data.draw(st.integers(0, shape[0] - 1))
    last = data.draw(st.integers(first + 1, shape[0]))
    np.testing.assert_array_equal(read(tensor.rows(first, last)), array[first:last])
    if len(shape) > 1:
        np.testing.assert_array_equal(read(tensor.index(first)), array[first])
    count = data.draw(st.integers(1, array.size))
    np.testing.assert_array_equal(read(tensor.as_shape(count)), array.reshape(-1)[:count])


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), data=st.data())
def test_columns_keep_the_pitch(rows: int, columns: int, data: st.DataObject) -> None:
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    first = data.draw(st.integers(0, columns - 1))
    last = data.draw(st.integers(first + 1, columns))
    part = host_tensor(array).columns(first, last)
    np.testing.assert_array_equal(read(part), array[:, first:last])
    row = data.draw(st.integers(0, rows - 1))
    np.testing.assert_array_equal(read(part.rows(row, rows)), array[row:, first:last])
    view = view_of("test", "part", part, "float32", 2)
    assert (view.address, view.shape) == (part.address, (rows, last - first))


@pytest.mark.parametrize(
    "take",
    [
        lambda tensor: tensor.rows(0, 4),
        lambda tensor: tensor.rows(2, 2),
        lambda tensor: tensor.rows(-1, 2),
        lambda tensor: tensor.columns(0, 6),
        lambda tensor: tensor.as_shape(16),
        lambda tensor: tensor.columns(0, 4).as_shape(4),
    ],
)
def test_what_is_not_there_cannot_be_taken(take: Any) -> None:
    with pytest.raises(InvariantError):
        take(DeviceTensor.dense(4096, (3, 5), "uint16"))


@given(st.lists(st.tuples(st.integers(0, 700), st.sampled_from(DTYPES)), max_size=8))
def test_an_arena_of_the_measured_size_just_holds_it(wanted: list[tuple[int, str]]) -> None:
    measuring = Arena()
    for size, dtype in wanted:
        measuring.take((size,), dtype)
    arena = Arena(1 << 20, measuring.used_bytes)
    end = 1 << 20
    for size, dtype in wanted:
        tensor = arena.take((size,), dtype)
        assert tensor.address >= end
        assert tensor.address % ALIGNMENT_BYTES == 0
        end = tensor.address + tensor.num_bytes
    assert end <= (1 << 20) + measuring.used_bytes
    with pytest.raises(InvariantError, match="behind"):
        arena.take((1,), "uint8")
