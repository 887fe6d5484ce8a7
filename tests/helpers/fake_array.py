"""An array on no device: the CUDA array interface without memory behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class FakeArray:
    """`row_stride` in elements makes the rows of a matrix lie apart."""

    shape: tuple[int, ...]
    dtype: str
    address: int = 0x1000
    row_stride: int | None = None

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        item = np.dtype(self.dtype).itemsize
        strides = None
        if self.row_stride is not None:
            strides = (self.row_stride * item, item)
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address, False),
            "strides": strides,
            "version": 3,
        }
