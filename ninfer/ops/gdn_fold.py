"""gdn_fold: the states behind the first tokens of each row, in all layers, from what went in.

    windows[write_slots[r]], states[write_slots[r]] = what gdn_decode leaves there behind tokens
    row_starts[r] .. row_ends[r] - 1 of the layer's projection, from read_slots[r]

Shapes     a projection [T, 2 Hk dk + 2 Hv dv + 2 Hv] a layer, one row stride for all; windows
           [slots, L, Cd, W - 1], states [slots, L, Hv, dv, dk], rows: gdn_device; sizes of
           gdn_decode
Dtypes     as gdn_decode
Units      a row of 0 tokens (row_ends[r] <= row_starts[r]) writes nothing
Effects    writes windows and states of write_slots in all layers, bit for bit those of gdn_decode;
           read_slots stay as they are
Time       reads and writes each state once
Errors     OpContractError for a shape, dtype or alignment outside the above
Tolerance  EXACT against gdn_decode
Source     gdn_decode
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.model import GdnConfig
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import gdn_device
from ninfer.ops.device_checks import require_view
from ninfer.ops.gdn_device import GdnMemory, GdnRows, GdnWeights

_OP: Final = "gdn_fold"

LAYER: Final = np.dtype(
    [
        ("projection", "<u8"), ("conv", "<u8"), ("a_log", "<u8"), ("dt_bias", "<u8"),
        ("projection_stride", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip
"""What is read of one layer."""

_PARAMS: Final = np.dtype(
    [
        ("layers", "<u8"), ("windows", "<u8"), ("states", "<u8"), ("row_starts", "<u8"),
        ("row_ends", "<u8"), ("read_slots", "<u8"), ("write_slots", "<u8"),
        ("window_stride", "<u8"), ("state_stride", "<u8"), ("key_heads", "<i4"),
        ("value_heads", "<i4"), ("width", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FoldLayer:
    """One layer: its weights (norm is not read) and the projection that gdn_decode took or will
    take, with room for as many tokens as any unit has."""

    weights: GdnWeights
    projection: DeviceArray


def describe(config: GdnConfig, layers: Sequence[FoldLayer]) -> NDArray[np.void]:
    """The table [L] of LAYER that `launch` reads, for the caller to bring to the device.

    Raises OpContractError for sizes without a kernel and for arrays that gdn_decode refuses.
    """
    gdn_device.require_sizes(_OP, config)
    table = np.zeros(len(layers), LAYER)
    for index, layer in enumerate(layers):
        entry = table[index, ...]
        gdn_device.set_projection(_OP, entry, config, layer.projection)
        gdn_device.set_recurrence(_OP, entry, config, layer.weights)
    return table


def launch(
    kernels: KernelLibrary,
    config: GdnConfig,
    layers: DeviceArray,
    windows: DeviceArray,
    states: DeviceArray,
    rows: GdnRows,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue all rows of all layers on `stream`; returns before they have run.

    layers       uint8 [L * LAYER.itemsize], what `describe` made; L is that of windows and states
    is_chained   may start while the kernel ahead of it in the stream still runs: that kernel, and
                 all that it did not wait for itself, may write row_ends and the projections, but
                 neither row_starts and slots, nor windows and states of read_slots
    """
    gdn_device.require_sizes(_OP, config)
    params = np.zeros((), _PARAMS)
    gdn_device.set_heads(params, config)
    gdn_device.set_memory(_OP, params, config, GdnMemory(windows, states, 0))
    num_layers = view_of(_OP, "windows", windows, "uint16", 4).shape[1]
    table = require_view(
        _OP, "layers", layers, "uint8", (num_layers * LAYER.itemsize,), alignment_bytes=8
    )
    params["layers"] = table.address
    num_rows = gdn_device.set_rows(_OP, params, rows)
    dk, dv = config.key_head_dim, config.value_head_dim
    kernels.function("gdn_fold", f"gdn_fold_{dk}x{dv}").launch(
        (config.num_value_heads, num_rows, num_layers), (gdn_device.step_threads(config), 1, 1),
        params, stream=stream, programmatic=is_chained,
    )  # fmt: skip
