"""What the launches of Gated DeltaNet take: weights, StateImages and rows of one layer.

    projection of a token: q [Hk, dk], k [Hk, dk], v [Hv, dv], z [Hv, dv], b [Hv], a [Hv]
    conv channels Cd: those of q, k and v

The checks live here too, so that the step and the chunk form refuse the same arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.model import GdnConfig
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view

HEAD_DIMS: Final = (32, 64, 128)
"""Key and value head sizes that have kernels."""
CONV_WIDTHS: Final = (2, 3, 4)

_MAX_STEP_THREADS: Final = 512
_STATE_PER_THREAD: Final = 4
"""Least number of state elements of a thread that takes steps."""


@dataclass(frozen=True, slots=True, eq=False)
class GdnWeights:
    """conv bf16 [Cd, W], a_log and dt_bias f32 [Hv], norm bf16 [dv]."""

    conv: DeviceArray
    a_log: DeviceArray
    dt_bias: DeviceArray
    norm: DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class GdnMemory:
    """windows bf16 [slots, L, Cd, W - 1], oldest first; states f32 [slots, L, Hv, dv, dk]."""

    windows: DeviceArray
    states: DeviceArray
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class GdnRows:
    """int32: row_starts [R + 1], the first column of each row; read_slots and write_slots [R].

    row_ends   [R], behind the last token of each row; the columns from there to the next row's
               first are padding. None: rows have none

    No row's write_slot is any row's read_slot, and write_slots differ; row_starts[r] <= row_ends[r]
    <= row_starts[r + 1]: the caller's promise.
    """

    row_starts: DeviceArray
    read_slots: DeviceArray
    write_slots: DeviceArray
    row_ends: DeviceArray | None = None


@dataclass(frozen=True, slots=True)
class ProjectionColumns:
    """Columns of a projection as a matrix with gaps between its rows; implements DeviceArray."""

    address: int
    shape: tuple[int, int]
    row_stride: int

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return {
            "shape": self.shape, "typestr": "<u2", "data": (self.address, False),
            "strides": (2 * self.row_stride, 2), "version": 3,
        }  # fmt: skip


def gate_columns(config: GdnConfig, params: NDArray[np.void], tokens: int) -> ProjectionColumns:
    """z [T, Hv * dv] of the projection that `params` holds."""
    address = int(params["projection"]) + 2 * config.conv_dim
    return ProjectionColumns(address, (tokens, config.value_dim), int(params["projection_stride"]))


def projection_width(config: GdnConfig) -> int:
    """Columns of the projection that both forms read."""
    return config.conv_dim + config.value_dim + 2 * config.num_value_heads


def step_threads(config: GdnConfig) -> int:
    """Threads of a block that steps through the tokens of a head (`StepShape` of gdn_step.cuh)."""
    elements = config.key_head_dim * config.value_head_dim
    return min(_MAX_STEP_THREADS, elements // _STATE_PER_THREAD)


def require_sizes(op: str, config: GdnConfig) -> None:
    """Raises OpContractError for sizes without a kernel."""
    if config.key_head_dim not in HEAD_DIMS or config.value_head_dim not in HEAD_DIMS:
        sizes = f"{config.key_head_dim} and {config.value_head_dim}"
        fail(op, f"head sizes {sizes}, expected some of {HEAD_DIMS}")
    if config.conv_width not in CONV_WIDTHS:
        fail(op, f"conv width {config.conv_width}, expected one of {CONV_WIDTHS}")
    if config.num_key_heads < 1 or config.num_value_heads % config.num_key_heads:
        heads = f"{config.num_value_heads} value heads and {config.num_key_heads} key heads"
        fail(op, f"{heads}: not a multiple")


def set_projection(
    op: str, params: NDArray[np.void], config: GdnConfig, projection: DeviceArray
) -> int:
    """Fills projection and its stride; returns T."""
    source = view_of(op, "projection", projection, "uint16", 2)
    tokens, width = source.shape
    if tokens < 1 or width != projection_width(config):
        expected = projection_width(config)
        fail(op, f"projection has shape {source.shape}, expected [T >= 1, {expected}]")
    require_alignment(op, "projection", source, "uint16", 4)
    params["projection"], params["projection_stride"] = source.address, source.row_stride
    return tokens


def set_output(
    op: str, params: NDArray[np.void], config: GdnConfig, tokens: int, y: DeviceArray
) -> None:
    """Fills y [T, Hv * dv] and its stride."""
    shape = (tokens, config.value_dim)
    output = require_view(op, "y", y, "uint16", shape, alignment_bytes=4, allows_row_stride=True)
    params["y"], params["y_stride"] = output.address, output.row_stride


def set_weights(op: str, params: NDArray[np.void], config: GdnConfig, weights: GdnWeights) -> None:
    """Fills conv, a_log and dt_bias, and the sizes that go with them."""
    set_recurrence(op, params, config, weights)
    set_heads(params, config)


def set_recurrence(
    op: str, params: NDArray[np.void], config: GdnConfig, weights: GdnWeights
) -> None:
    """Fills conv, a_log and dt_bias."""
    conv_shape = (config.conv_dim, config.conv_width)
    params["conv"] = require_view(op, "conv", weights.conv, "uint16", conv_shape).address
    heads = (config.num_value_heads,)
    params["a_log"] = require_view(op, "a_log", weights.a_log, "float32", heads).address
    params["dt_bias"] = require_view(op, "dt_bias", weights.dt_bias, "float32", heads).address


def set_heads(params: NDArray[np.void], config: GdnConfig) -> None:
    """Fills the convolution's width and the numbers of heads."""
    params["width"] = config.conv_width
    params["key_heads"], params["value_heads"] = config.num_key_heads, config.num_value_heads


def set_memory(op: str, params: NDArray[np.void], config: GdnConfig, memory: GdnMemory) -> int:
    """Fills windows and states of the layer in slot 0, and their strides; returns the slots."""
    windows = view_of(op, "windows", memory.windows, "uint16", 4)
    slots, layers = windows.shape[:2]
    if not 0 <= memory.layer < layers or slots < 1:
        fail(op, f"layer {memory.layer} of windows {windows.shape}")
    window = (config.conv_dim, config.conv_width - 1)
    require_view(op, "windows", memory.windows, "uint16", (slots, layers, *window))
    state = (config.num_value_heads, config.value_head_dim, config.key_head_dim)
    states = require_view(
        op, "states", memory.states, "float32", (slots, layers, *state), alignment_bytes=16
    )
    window_size, state_size = int(np.prod(window)), int(np.prod(state))
    params["windows"] = windows.address + memory.layer * window_size * 2
    params["states"] = states.address + memory.layer * state_size * 4
    params["window_stride"], params["state_stride"] = layers * window_size, layers * state_size
    return slots


def set_rows(op: str, params: NDArray[np.void], rows: GdnRows) -> int:
    """Fills row_starts, row_ends and slots; returns R."""
    reads = view_of(op, "read_slots", rows.read_slots, "int32", 1)
    num_rows = reads.shape[0]
    if num_rows < 1:
        fail(op, "no rows")
    writes = require_view(op, "write_slots", rows.write_slots, "int32", (num_rows,))
    starts = require_view(op, "row_starts", rows.row_starts, "int32", (num_rows + 1,))
    params["read_slots"], params["write_slots"] = reads.address, writes.address
    params["row_starts"] = starts.address
    params["row_ends"] = starts.address + 4
    if rows.row_ends is not None:
        ends = require_view(op, "row_ends", rows.row_ends, "int32", (num_rows,))
        params["row_ends"] = ends.address
    return num_rows
