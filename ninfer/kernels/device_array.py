"""What a launch needs to know of an array on the device, whoever owns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ninfer.contract.errors import OpContractError


class DeviceArray(Protocol):
    """Anything with the CUDA array interface; bf16 is held as uint16, e4m3 and nibbles as uint8."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Address, shape and row pitch of an array whose rows are contiguous."""

    address: int
    shape: tuple[int, ...]
    row_stride: int
    """Elements from one row to the next; the row length for a single row or a vector."""


def view_of(op: str, name: str, array: DeviceArray, dtype: str, rank: int) -> DeviceView:
    """Check dtype (`uint16`), rank and contiguous rows. Raises OpContractError naming both."""
    interface = array.__cuda_array_interface__
    shape: tuple[int, ...] = tuple(interface["shape"])
    expected = np.dtype(dtype)
    if interface["typestr"] != expected.str or len(shape) != rank:
        found = f"{np.dtype(interface['typestr'])} with {len(shape)} axes"
        raise OpContractError(f"{op}: {name} is {found}, expected {dtype} with {rank}")
    strides = interface.get("strides")
    row_stride = shape[-1]
    if strides is not None:
        if shape[-1] > 1 and strides[-1] != expected.itemsize:
            raise OpContractError(f"{op}: the rows of {name} are not contiguous")
        if rank == 2 and shape[0] > 1:
            row_stride = strides[0] // expected.itemsize
    return DeviceView(int(interface["data"][0]), shape, row_stride)
