"""gdn_prefill: Gated DeltaNet between its two projections, many tokens of one sequence at once.

    c, q, k, v, beta, g as in gdn_decode; o, S by the chunks of gdn_chunked
    y[t] = bf16(gated_rms_norm(bf16(o[t]), z[t], norm))

Shapes     projection [T, 2 Hk dk + 2 Hv dv + 2 Hv] = q, k, v, z, b, a; y [T, Hv * dv]; T >= 1;
           dk and dv of HEAD_DIMS, W of CONV_WIDTHS, Hk | Hv; weights, memory: gdn_device;
           read_slots and write_slots [1]
Dtypes     bf16 in and out; state and gates f32; products of bf16 pairs (16 bits and more), f32 sums
Units      eps > 0
Effects    writes every element of y, and windows and states of write_slots (this layer); read_slots
           stay as they are. Equal inputs give equal bits, other chunkings of a prompt do not
Workspace  `workspace_bytes`, uint8, aligned to 16; contents do not matter
Errors     OpContractError for a shape, dtype, alignment, eps or device outside the above
Tolerance  GDN_OUTPUT, GDN_STATE
Source     as gdn_chunked
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.model import GdnConfig
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.ops import gated_rms_norm, gdn_device
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.gdn_device import GdnMemory, GdnWeights

_OP: Final = "gdn_prefill"
_FAMILY: Final = "gdn_prefill"

_STRIP_TOKENS: Final = 32
_STRIP_CHANNELS: Final = 256
_SCAN_THREADS: Final = 256
_PAD: Final = 8
_ALIGNMENT_BYTES: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("projection", "<u8"), ("conv", "<u8"), ("a_log", "<u8"), ("dt_bias", "<u8"),
        ("windows", "<u8"), ("states", "<u8"), ("read_slots", "<u8"), ("write_slots", "<u8"),
        ("y", "<u8"), ("convolved", "<u8"), ("transform", "<u8"), ("scores", "<u8"),
        ("scales", "<u8"), ("window_stride", "<u8"), ("state_stride", "<u8"),
        ("projection_stride", "<i4"), ("y_stride", "<i4"), ("tokens", "<i4"), ("key_heads", "<i4"),
        ("value_heads", "<i4"), ("key_dim", "<i4"), ("value_dim", "<i4"), ("width", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """How the chunks of a layer run on a device; the bits of the result depend on chunk_tokens.

    columns   of the state (value dimensions) that a thread block carries through all chunks
    """

    key_dim: int
    chunk_tokens: int
    columns: int

    @property
    def scan_shared_bytes(self) -> int:
        """As Scan::kSharedBytes of the kernel."""
        keys = self.chunk_tokens * (self.key_dim + _PAD) * 2
        square = self.chunk_tokens * (self.chunk_tokens + _PAD) * 2
        tokens = self.chunk_tokens * (self.columns + _PAD) * 2
        state = self.key_dim * (self.columns + _PAD) * 2
        scales = 4 * self.chunk_tokens * 4
        return 3 * keys + 2 * scales + 4 * square + 7 * tokens + 2 * state

    @property
    def transform_shared_bytes(self) -> int:
        """As Transform::kSharedBytes of the kernel."""
        keys = self.chunk_tokens * (self.key_dim + _PAD) * 2
        square = self.chunk_tokens * (self.chunk_tokens + 4) * 4
        return max(2 * keys, square) + square


def plan_chunks(config: GdnConfig, limits: DeviceLimits) -> ChunkShape:
    """64 tokens a chunk where they fit; wide blocks where narrow ones do not run all at once.

    Raises OpContractError for sizes without a kernel or a device with too little shared memory.
    """
    gdn_device.require_sizes(_OP, config)
    sizes = [(64, 32), (32, 32)]
    if config.value_head_dim >= 64 and config.value_dim // 32 > limits.num_multiprocessors:
        sizes.insert(0, (64, 64))
    shapes = [ChunkShape(config.key_head_dim, tokens, columns) for tokens, columns in sizes]
    fitting = [
        shape for shape in shapes if shape.scan_shared_bytes <= limits.shared_bytes_per_block
    ]
    if not fitting:
        fail(_OP, f"a chunk does not fit the shared memory of {limits.name}")
    return fitting[0]


def workspace_bytes(config: GdnConfig, shape: ChunkShape, max_tokens: int) -> int:
    """For launches of up to max_tokens tokens."""
    return sum(size for _, size in _workspace_parts(config, shape, max_tokens))


def launch(
    kernels: KernelLibrary,
    config: GdnConfig,
    shape: ChunkShape,
    weights: GdnWeights,
    memory: GdnMemory,
    projection: DeviceArray,
    y: DeviceArray,
    *,
    read_slots: DeviceArray,
    write_slots: DeviceArray,
    workspace: DeviceArray,
    eps: float,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue four kernels on `stream`; returns before they have run.

    is_chained   the first may start while the kernel ahead of it in the stream still runs
    """
    gdn_device.require_sizes(_OP, config)
    if not eps > 0.0:
        fail(_OP, f"eps {eps} is not positive")
    params = np.zeros((), _PARAMS)
    tokens = gdn_device.set_projection(_OP, params, config, projection)
    gdn_device.set_output(_OP, params, config, tokens, y)
    gdn_device.set_weights(_OP, params, config, weights)
    require_view(_OP, "norm", weights.norm, "uint16", (config.value_head_dim,))
    gdn_device.set_memory(_OP, params, config, memory)
    for name, slots in (("read_slots", read_slots), ("write_slots", write_slots)):
        params[name] = require_view(_OP, name, slots, "int32", (1,)).address
    _set_workspace(params, config, shape, tokens, workspace)
    params["tokens"] = tokens
    params["key_dim"], params["value_dim"] = config.key_head_dim, config.value_head_dim
    _launch_chunks(kernels, config, shape, params, stream=stream, is_chained=is_chained)
    gated_rms_norm.launch(
        kernels, y, gdn_device.gate_columns(config, params, tokens), weights.norm, y, eps=eps,
        stream=stream, is_chained=True,
    )  # fmt: skip


def _launch_chunks(
    kernels: KernelLibrary,
    config: GdnConfig,
    shape: ChunkShape,
    params: NDArray[np.void],
    *,
    stream: int,
    is_chained: bool,
) -> None:
    tokens, dk, chunk = int(params["tokens"]), shape.key_dim, shape.chunk_tokens
    convolve = kernels.function(_FAMILY, "gdn_convolve")
    transform = kernels.function(_FAMILY, f"gdn_transform_{dk}x{chunk}")
    scan = kernels.function(_FAMILY, f"gdn_chunks_{dk}x{chunk}x{shape.columns}")
    transform.reserve_shared(shape.transform_shared_bytes)
    scan.reserve_shared(shape.scan_shared_bytes)
    convolve.launch(
        (-(-config.conv_dim // _STRIP_CHANNELS), -(-tokens // _STRIP_TOKENS), 1),
        (_STRIP_CHANNELS // 2, 1, 1), params, stream=stream, programmatic=is_chained,
    )  # fmt: skip
    transform.launch(
        (-(-tokens // chunk), config.num_value_heads, 1), (2 * chunk, 1, 1), params,
        stream=stream, shared_bytes=shape.transform_shared_bytes, programmatic=True,
    )  # fmt: skip
    scan.launch(
        (config.num_value_heads, config.value_head_dim // shape.columns, 1),
        (_SCAN_THREADS, 1, 1), params,
        stream=stream, shared_bytes=shape.scan_shared_bytes, programmatic=True,
    )  # fmt: skip


def _workspace_parts(
    config: GdnConfig, shape: ChunkShape, tokens: int
) -> tuple[tuple[str, int], ...]:
    """(parameter, bytes) of each part, in order."""
    chunks = -(-tokens // shape.chunk_tokens)
    squares = chunks * config.num_value_heads * shape.chunk_tokens**2 * 2 * 2
    scales = chunks * config.num_value_heads * shape.chunk_tokens * 4 * 4
    sizes = (
        ("convolved", tokens * config.conv_dim * 2),
        ("transform", squares), ("scores", squares), ("scales", scales),
    )  # fmt: skip
    return tuple((name, -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES) for name, size in sizes)


def _set_workspace(
    params: NDArray[np.void],
    config: GdnConfig,
    shape: ChunkShape,
    tokens: int,
    workspace: DeviceArray,
) -> None:
    view = view_of(_OP, "workspace", workspace, "uint8", 1)
    needed = workspace_bytes(config, shape, tokens)
    if view.shape[0] < needed or view.address % 16:
        fail(_OP, f"workspace holds {view.shape[0]} bytes, expected {needed}, aligned to 16")
    address = view.address
    for name, size in _workspace_parts(config, shape, tokens):
        params[name] = address
        address += size
