"""Checks that launches make of arrays on the device: dtype, shape, stride, alignment."""

from __future__ import annotations

from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.ops.checks import fail


def require_view(
    op: str,
    name: str,
    array: DeviceArray,
    dtype: str,
    shape: tuple[int, ...],
    *,
    alignment_bytes: int = 1,
    allows_row_stride: bool = False,
) -> DeviceView:
    """The view of an array of exactly this dtype and shape.

    Rows are contiguous, and follow each other without gaps unless `allows_row_stride`; then every
    row starts at a multiple of `alignment_bytes`, which is at most 16. Raises OpContractError.
    """
    view = view_of(op, name, array, dtype, len(shape))
    if view.shape != shape:
        fail(op, f"{name} has shape {view.shape}, expected {shape}")
    require_alignment(op, name, view, dtype, alignment_bytes)
    strides = array.__cuda_array_interface__.get("strides")
    if not allows_row_stride and strides is not None and not _is_dense(array, shape):
        fail(op, f"{name} has strides {strides}, expected contiguous rows one after another")
    return view


def require_alignment(
    op: str, name: str, view: DeviceView, dtype: str, alignment_bytes: int
) -> None:
    """Address, and the pitch of several rows, are multiples of `alignment_bytes`."""
    item_bytes = {"uint8": 1, "uint16": 2, "float32": 4, "int32": 4, "uint32": 4}.get(dtype, 8)
    pitch = view.row_stride * item_bytes if len(view.shape) == 2 and view.shape[0] > 1 else 0
    if view.address % alignment_bytes or pitch % alignment_bytes:
        fail(op, f"the rows of {name} are not aligned to {alignment_bytes} bytes")


def _is_dense(array: DeviceArray, shape: tuple[int, ...]) -> bool:
    strides = array.__cuda_array_interface__["strides"]
    expected = int(array.__cuda_array_interface__["typestr"][2:])
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
