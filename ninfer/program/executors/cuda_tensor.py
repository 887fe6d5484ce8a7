"""DeviceTensor: address, shape and dtype of a tensor in device memory; Arena: where they come from.

Neither owns memory nor touches the device, so plans can be made and checked without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import numpy as np

from ninfer.contract.errors import InvariantError

ALIGNMENT_BYTES: Final = 256
"""Every tensor of an arena starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor with contiguous rows; implements the CUDA array interface.

    dtype        NumPy name; bf16 is `uint16`, e4m3 and packed images are `uint8`
    row_stride   elements from one row (last axis) to the next; only tensors of two axes may have
                 gaps between rows
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    row_stride: int

    @classmethod
    def dense(cls, address: int, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        return cls(address, shape, dtype, shape[-1])

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address, False),
            "strides": None if self.is_dense else self._strides,
        }

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without gaps."""
        return prod(self.shape) * self.itemsize

    @property
    def is_dense(self) -> bool:
        return self.row_stride == self.shape[-1]

    @property
    def _strides(self) -> tuple[int, int]:
        return self.row_stride * self.itemsize, self.itemsize

    def rows(self, first: int, last: int) -> DeviceTensor:
        """Entries [first, last) of the first axis."""
        if not 0 <= first < last <= self.shape[0]:
            raise InvariantError(f"rows {first}..{last} of a tensor {self.shape}")
        step = prod(self.shape[1:]) if self.is_dense else self.row_stride
        address = self.address + first * step * self.itemsize
        return replace(
            self, address=address, shape=(last - first, *self.shape[1:]),
            row_stride=last - first if len(self.shape) == 1 else self.row_stride,
        )  # fmt: skip

    def index(self, position: int) -> DeviceTensor:
        """Entry `position` of the first axis, without that axis."""
        part = self.rows(position, position + 1)
        return DeviceTensor.dense(part.address, self.shape[1:], self.dtype)

    def columns(self, first: int, last: int) -> DeviceTensor:
        """Columns [first, last) of a matrix."""
        if len(self.shape) != 2 or not 0 <= first < last <= self.shape[1]:
            raise InvariantError(f"columns {first}..{last} of a tensor {self.shape}")
        return replace(
            self, address=self.address + first * self.itemsize, shape=(self.shape[0], last - first)
        )

    def as_shape(self, *shape: int) -> DeviceTensor:
        """The first elements of a dense tensor under another shape."""
        if not self.is_dense or prod(shape) > prod(self.shape):
            raise InvariantError(f"a tensor {self.shape} does not hold {shape}")
        return DeviceTensor.dense(self.address, shape, self.dtype)


class Arena:
    """Hands out consecutive pieces of one stretch of device memory, aligned, never back.

    Made with address 0 and no size it only measures: `used_bytes` is what a plan needs.
    """

    def __init__(self, address: int = 0, size_bytes: int | None = None) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self.used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        """InvariantError when the stretch is used up."""
        tensor = DeviceTensor.dense(self._address + self.used_bytes, shape, dtype)
        needed = -(-tensor.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._size_bytes is not None and self.used_bytes + needed > self._size_bytes:
            raise InvariantError(
                f"a tensor {shape} of {needed} bytes behind {self.used_bytes} of {self._size_bytes}"
            )
        self.used_bytes += needed
        return tensor
