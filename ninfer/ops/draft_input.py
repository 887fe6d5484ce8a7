"""draft_input: what a draft model reads of a token and of the target's output in front of it.

    x[t] = (rms_norm(table[token_ids[t]], embedding_norm), rms_norm(h[t], hidden_norm))
    h[t] = hidden[s] for a source s >= 0, kept[-1 - s] for s < 0

with sources[t] = s, or in a unit of one row, shifted by one: s = t - 1, and kept[read_slot] for
t = 0.

Shapes     token_ids and sources [N], read_slot [1], table [V, C], hidden [T, C], kept [slots, C],
           norms [C] -> x [N, 2 C]; N >= 1, 8 <= C <= 32768, C % 8 == 0; shifted: N <= T + 1
Dtypes     bf16; indices int32; sums in f32, x rounded once
Units      eps > 0; norms are weights of a norm with offset 1. Sources are real rows: the caller's
           promise
Effects    writes every element of x, nothing else. A row depends on its token and its h alone, with
           the bits of rms_norm; a token id outside [0, V) makes its first half NaN
Errors     OpContractError for a shape, dtype, stride, alignment or eps outside the above
Tolerance  FLOAT32_REDUCTION; launch BF16_REDUCTION
Source     Qwen3.5 multi-token prediction; ops embedding and rms_norm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import rms_norm
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "draft_input"

_OFFSET: Final = 1.0
_PARAMS: Final = np.dtype(
    [
        ("token_ids", "<u8"), ("sources", "<u8"), ("read_slot", "<u8"), ("table", "<u8"),
        ("hidden", "<u8"), ("kept", "<u8"), ("embedding_norm", "<u8"), ("hidden_norm", "<u8"),
        ("x", "<u8"), ("num_ids", "<i4"), ("columns", "<i4"), ("hidden_stride", "<i4"),
        ("kept_stride", "<i4"), ("x_stride", "<i4"), ("eps", "<f4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class DraftNorms:
    """Weights bf16 [C] of the norms of the embedding and of the target's output."""

    embedding: DeviceArray
    hidden: DeviceArray
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows:
    """Where the target's output is read: of this unit, hidden bf16 [T, C], and of the units before,
    kept bf16 [slots, C]."""

    hidden: DeviceArray
    kept: DeviceArray


def shifted_sources(num_tokens: int, read_slot: int) -> IntArray:
    """The sources of a unit of one row."""
    sources = np.arange(-1, num_tokens - 1, dtype=np.int32)
    sources[0] = -1 - read_slot
    return sources


def reference(
    token_ids: IntArray,
    sources: IntArray,
    table: FloatArray,
    hidden: FloatArray,
    kept: FloatArray,
    embedding_norm: FloatArray,
    hidden_norm: FloatArray,
    *,
    eps: float,
) -> FloatArray:
    """x [N, 2 C] in the dtype of `table`."""
    h = np.empty((sources.size, table.shape[1]), table.dtype)
    is_kept = sources < 0
    h[is_kept], h[~is_kept] = kept[-1 - sources[is_kept]], hidden[sources[~is_kept]]
    halves = (
        rms_norm.reference(table[token_ids], embedding_norm, eps=eps, offset=_OFFSET),
        rms_norm.reference(h, hidden_norm, eps=eps, offset=_OFFSET),
    )
    return np.concatenate(halves, axis=1)


def launch(
    kernels: KernelLibrary,
    token_ids: DeviceArray,
    table: DeviceArray,
    rows: HiddenRows,
    norms: DraftNorms,
    x: DeviceArray,
    *,
    stream: int,
    sources: DeviceArray | None = None,
    read_slot: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue x on `stream`; returns before it has run.

    sources      int32 [N], or None for a unit of one row, which has
    read_slot    int32 [1], the StateImage that the unit reads
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    (num_tokens,) = view_of(_OP, "token_ids", token_ids, "int32", 1).shape
    embeddings = view_of(_OP, "table", table, "uint16", 2)
    num_ids, columns = embeddings.shape
    vectors = rms_norm.vectors_per_thread(_OP, columns)
    if num_tokens < 1 or num_ids < 1 or embeddings.row_stride != columns:
        fail(_OP, f"{num_tokens} tokens of a table {embeddings.shape}: needs a token, dense rows")
    if not norms.eps > 0.0:
        fail(_OP, f"eps {norms.eps} is not positive")
    require_alignment(_OP, "table", embeddings, "uint16", 16)
    params = np.zeros((), _PARAMS)
    params["token_ids"] = require_view(_OP, "token_ids", token_ids, "int32", (num_tokens,)).address
    params["table"], params["num_ids"] = embeddings.address, num_ids
    params["columns"], params["eps"] = columns, norms.eps
    for name, weight in (("embedding_norm", norms.embedding), ("hidden_norm", norms.hidden)):
        gain = require_view(_OP, name, weight, "uint16", (columns,), alignment_bytes=16)
        params[name] = gain.address
    for name, array in (("hidden", rows.hidden), ("kept", rows.kept)):
        view = view_of(_OP, name, array, "uint16", 2)
        if view.shape[0] < 1 or view.shape[1] != columns:
            fail(_OP, f"{name} has shape {view.shape}, expected rows of {columns}")
        require_alignment(_OP, name, view, "uint16", 16)
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    if (sources is None) == (read_slot is None):
        fail(_OP, "needs either sources or the read slot of a unit of one row")
    if sources is not None:
        params["sources"] = require_view(_OP, "sources", sources, "int32", (num_tokens,)).address
    if read_slot is not None:
        num_hidden = view_of(_OP, "hidden", rows.hidden, "uint16", 2).shape[0]
        if num_tokens > num_hidden + 1:
            fail(_OP, f"{num_tokens} tokens behind {num_hidden} rows of hidden")
        params["read_slot"] = require_view(_OP, "read_slot", read_slot, "int32", (1,)).address
    output = require_view(
        _OP, "x", x, "uint16", (num_tokens, 2 * columns), alignment_bytes=16,
        allows_row_stride=True,
    )  # fmt: skip
    params["x"], params["x_stride"] = output.address, output.row_stride
    threads = -(-columns // (8 * vectors * 32)) * 32
    kernels.function("draft_rounds", f"draft_input_{vectors}").launch(
        (num_tokens, 2, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )
