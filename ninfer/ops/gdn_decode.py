"""gdn_decode: Gated DeltaNet between its two projections, token by token, several rows.

    c[t] = bf16(silu(sum_j conv[:, j] * x[t - W + 1 + j])), x = projection's q, k, v columns; inputs
           before the row's first token come from windows[read_slots[r]]
    q, k = c / sqrt(sum(c^2) + 1e-6) per key head, q also * dk ** -0.5; v = c
    beta, g, S, o = gdn_gates and gdn_recurrent, S from states[read_slots[r]]
    y[t] = bf16(gated_rms_norm(o[t], z[t], norm))

Shapes     projection [T, 2 Hk dk + 2 Hv dv + 2 Hv] = q, k, v, z, b, a; y [T, Hv * dv];
           dk and dv of HEAD_DIMS, W of CONV_WIDTHS, Hk | Hv; weights, memory, rows: gdn_device
Dtypes     bf16 in and out; the state and everything between f32, rounded at c and at y
Units      eps > 0; tokens of row r are row_starts[r] .. row_ends[r] - 1, in order
Effects    writes the rows' tokens of y, zeros in columns of padding, and windows and states of
           write_slots (this layer) unless it is told to keep no state; read_slots stay as they
           are. A token's bits do not depend on T, on how its row is cut into launches, or on other
           rows
Time       about 0.5 us a token of the longest row: for few tokens, or as an oracle of the chunks
Errors     OpContractError for a shape, dtype, alignment or eps outside the above
Tolerance  GDN_OUTPUT, GDN_STATE
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464)
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.model import GdnConfig
from ninfer.kernels.device_array import DeviceArray
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import gdn_device
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.gdn_device import GdnMemory, GdnRows, GdnWeights

_OP: Final = "gdn_decode"

_PARAMS: Final = np.dtype(
    [
        ("projection", "<u8"), ("conv", "<u8"), ("a_log", "<u8"), ("dt_bias", "<u8"),
        ("norm", "<u8"), ("windows", "<u8"), ("states", "<u8"), ("row_starts", "<u8"),
        ("row_ends", "<u8"), ("read_slots", "<u8"), ("write_slots", "<u8"), ("y", "<u8"),
        ("window_stride", "<u8"), ("state_stride", "<u8"), ("projection_stride", "<i4"),
        ("y_stride", "<i4"), ("key_heads", "<i4"), ("value_heads", "<i4"), ("width", "<i4"),
        ("eps", "<f4"), ("keeps_state", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


def launch(
    kernels: KernelLibrary,
    config: GdnConfig,
    weights: GdnWeights,
    memory: GdnMemory,
    rows: GdnRows,
    projection: DeviceArray,
    y: DeviceArray,
    *,
    eps: float,
    stream: int,
    keeps_state: bool = True,
    is_chained: bool = False,
) -> None:
    """Queue all rows on `stream`; returns before they have run.

    keeps_state  whether windows and states of write_slots are written; without it the states behind
                 some of the tokens can be had later from gdn_fold
    is_chained   may start while the kernel ahead of it in the stream still runs: that kernel, and
                 all that it did not wait for itself, may write the projection, but not rows, nor
                 windows and states of read_slots
    """
    gdn_device.require_sizes(_OP, config)
    if not eps > 0.0:
        fail(_OP, f"eps {eps} is not positive")
    params = np.zeros((), _PARAMS)
    params["eps"], params["keeps_state"] = eps, keeps_state
    tokens = gdn_device.set_projection(_OP, params, config, projection)
    gdn_device.set_output(_OP, params, config, tokens, y)
    gdn_device.set_weights(_OP, params, config, weights)
    dk, dv = config.key_head_dim, config.value_head_dim
    params["norm"] = require_view(_OP, "norm", weights.norm, "uint16", (dv,)).address
    gdn_device.set_memory(_OP, params, config, memory)
    num_rows = gdn_device.set_rows(_OP, params, rows)
    threads = gdn_device.step_threads(config)
    kernels.function("gdn_decode", f"gdn_decode_{dk}x{dv}").launch(
        (config.num_value_heads, num_rows, 1), (threads, 1, 1), params, stream=stream,
        programmatic=is_chained,
    )  # fmt: skip
