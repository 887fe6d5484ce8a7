"""Weights of a layer's experts on the device, and matrices as kernels of experts take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.linear_packing import ImageLayout
from ninfer.ops.linear_small_t import PackedLinear

MATRIX_PARAMS: Final = np.dtype(
    [
        ("images", "<u8"), ("row_scales", "<u8"), ("image_bytes", "<u8"), ("rows", "<i4"),
        ("columns", "<i4"), ("units_per_block", "<i4"), ("row_blocks", "<i4"),
        ("strips_per_block", "<i4"), ("last_strips", "<i4"),
    ]
)  # fmt: skip
"""The struct Matrix of the kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """images uint8 [E, layout.image_bytes], row_scales f32 [E, N] for fp8_row and nvfp4 alone.

    nvfp4's row_scales carry linear_packing.E2M1_SHIFT, as for PackedLinear.
    """

    layout: ImageLayout
    images: DeviceArray
    row_scales: DeviceArray | None = None


def expert_matrices(op: str, name: str, weights: ExpertWeights) -> NDArray[np.void]:
    """MATRIX_PARAMS of the experts. Raises OpContractError for another shape or alignment."""
    num_experts = view_of(op, name, weights.images, "uint8", 2).shape[0]
    return _matrix_params(op, name, weights.layout, weights.images, weights.row_scales, num_experts)


def single_matrix(op: str, name: str, weight: PackedLinear) -> NDArray[np.void]:
    """MATRIX_PARAMS of one matrix."""
    return _matrix_params(op, name, weight.plan.layout, weight.image, weight.row_scale, None)


def _matrix_params(
    op: str,
    name: str,
    layout: ImageLayout,
    images: DeviceArray,
    row_scales: DeviceArray | None,
    num_experts: int | None,
) -> NDArray[np.void]:
    axes = () if num_experts is None else (num_experts,)
    params = np.zeros((), MATRIX_PARAMS)
    params["images"] = require_view(
        op, name, images, "uint8", (*axes, layout.image_bytes), alignment_bytes=16
    ).address
    if (row_scales is not None) != layout.format.has_row_scale:
        fail(op, f"row scales are for fp8_row and nvfp4, {name} is {layout.format.value}")
    if row_scales is not None:
        shape = (*axes, layout.rows)
        view = require_view(op, f"{name}'s row scales", row_scales, "float32", shape)
        params["row_scales"] = view.address
    params["image_bytes"] = layout.image_bytes
    for field in (
        "rows", "columns", "units_per_block", "row_blocks", "strips_per_block", "last_strips",
    ):  # fmt: skip
        params[field] = getattr(layout, field)
    return params
