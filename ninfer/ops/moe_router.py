"""moe_router: the experts of every token and their weights.

    p[t] = softmax(logits[t]);  expert_ids[t] = the k largest of p[t], ties to the lower id
    weights[t] = p[t, expert_ids[t]], divided by their sum if renormalise

With a shared expert, launch also gives its gate: sigmoid(gate . x[t]).

Shapes     logits [T, E] -> expert_ids and weights [T, k], best first; 1 <= k <= E
           launch: E <= 512, k <= 16; x [T, C], gate [C] -> shared_gate [T]; C % 8 == 0
Dtypes     logits and weights the same floating dtype; expert_ids int64
           launch: logits, weights, shared_gate f32, expert_ids int32, x and gate bf16
Effects    new arrays; launch writes every element of its outputs. A token depends on itself alone.
           Logits that are not finite give the experts 0 .. k - 1 and weights of NaN
Errors     OpContractError for a shape, dtype or k outside the above
Tolerance  FLOAT32_POINTWISE
Source     Shazeer et al. 2017 (arXiv:1701.06538); config keys num_experts, num_experts_per_tok,
           norm_topk_prob
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail, require_rank, require_same_dtype
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "moe_router"

MAX_EXPERTS: Final = 512
MAX_EXPERTS_PER_TOKEN: Final = 16
_PARAMS: Final = np.dtype(
    [
        ("logits", "<u8"), ("logits_stride", "<i4"), ("num_experts", "<i4"),
        ("experts_per_token", "<i4"), ("renormalise", "<i4"), ("x", "<u8"), ("gate", "<u8"),
        ("expert_ids", "<u8"), ("weights", "<u8"), ("shared_gate", "<u8"), ("x_stride", "<i4"),
        ("columns", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SharedGate:
    """x bf16 [T, C], gate bf16 [C] -> shared_gate f32 [T]."""

    x: DeviceArray
    gate: DeviceArray
    shared_gate: DeviceArray


def reference(
    logits: FloatArray, *, experts_per_token: int, renormalise: bool
) -> tuple[NDArray[np.int64], FloatArray]:
    """(expert_ids, weights)."""
    require_rank(_OP, "logits", logits, 2)
    require_same_dtype(_OP, logits)
    if not 1 <= experts_per_token <= logits.shape[1]:
        fail(_OP, f"{experts_per_token} of {logits.shape[1]} experts asked for")
    probabilities = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    probabilities /= np.add.reduce(probabilities, axis=-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    expert_ids = order[:, :experts_per_token].astype(np.int64, copy=False)
    weights = np.take_along_axis(probabilities, expert_ids, axis=-1)
    if renormalise:
        weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return expert_ids, weights


def launch(
    kernels: KernelLibrary,
    logits: DeviceArray,
    expert_ids: DeviceArray,
    weights: DeviceArray,
    *,
    renormalise: bool,
    stream: int,
    shared: SharedGate | None = None,
    is_chained: bool = False,
) -> None:
    """Queue the choice on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    source = view_of(_OP, "logits", logits, "float32", 2)
    chosen = view_of(_OP, "expert_ids", expert_ids, "int32", 2)
    tokens, num_experts = source.shape
    count = chosen.shape[1]
    most = min(MAX_EXPERTS_PER_TOKEN, num_experts)
    if tokens < 1 or num_experts > MAX_EXPERTS or not 1 <= count <= most:
        fail(_OP, f"{count} experts of logits {source.shape}")
    require_view(_OP, "expert_ids", expert_ids, "int32", (tokens, count))
    given = require_view(_OP, "weights", weights, "float32", (tokens, count))
    params = np.zeros((), _PARAMS)
    params["logits"], params["logits_stride"] = source.address, source.row_stride
    params["expert_ids"], params["weights"] = chosen.address, given.address
    params["num_experts"], params["experts_per_token"] = num_experts, count
    params["renormalise"] = renormalise
    if shared is not None:
        _set_shared(params, tokens, shared)
    kernels.function("moe_router", "moe_router_f32").launch(
        (tokens, 1, 1), (64, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _set_shared(params: NDArray[np.void], tokens: int, shared: SharedGate) -> None:
    x = view_of(_OP, "x", shared.x, "uint16", 2)
    columns = x.shape[1]
    if x.shape[0] != tokens or columns < 8 or columns % 8:
        fail(_OP, f"x has shape {x.shape} for {tokens} tokens and a multiple of 8 columns")
    require_alignment(_OP, "x", x, "uint16", 16)
    gate = require_view(_OP, "gate", shared.gate, "uint16", (columns,), alignment_bytes=16)
    output = require_view(_OP, "shared_gate", shared.shared_gate, "float32", (tokens,))
    params["x"], params["x_stride"], params["columns"] = x.address, x.row_stride, columns
    params["gate"], params["shared_gate"] = gate.address, output.address
