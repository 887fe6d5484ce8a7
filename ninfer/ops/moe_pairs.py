"""moe_pairs: the pairs (token, rank) of a unit, sorted by expert, stable.

    order[i] = the pair t * k + rank at sorted position i;  positions[order[i]] = i
    sorted_experts[i] = its expert;  sorted_tokens[i] = order[i] // k
    offsets[e] = the first sorted position of expert e;  offsets[E] = P

Shapes     expert_ids [T, k], P = T * k -> order, positions, sorted_experts, sorted_tokens [P];
           offsets [E + 1]
Dtypes     int32
Units      expert_ids in [0, E): data to the launch, as moe_router writes them
Effects    writes every element of the outputs
Workspace  none
Errors     OpContractError for another shape or dtype
Tolerance  EXACT
Source     counting sort. sorted_tokens as the ids of `embedding` gathers a large unit's rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view

_OP: Final = "moe_pairs"

_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("expert_ids", "<u8"), ("order", "<u8"), ("positions", "<u8"), ("sorted_experts", "<u8"),
        ("sorted_tokens", "<u8"), ("offsets", "<u8"), ("num_pairs", "<i4"),
        ("experts_per_token", "<i4"), ("num_experts", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """The outputs on the device, int32."""

    order: DeviceArray
    positions: DeviceArray
    sorted_experts: DeviceArray
    sorted_tokens: DeviceArray
    offsets: DeviceArray


def reference(
    expert_ids: NDArray[np.integer[Any]], num_experts: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(order, positions, sorted_experts, sorted_tokens, offsets)."""
    flat = expert_ids.ravel()
    order = np.argsort(flat, kind="stable").astype(np.int32)
    positions = np.empty_like(order)
    positions[order] = np.arange(order.size, dtype=np.int32)
    counts = np.bincount(flat, minlength=num_experts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = (order // expert_ids.shape[1]).astype(np.int32)
    return order, positions, flat[order].astype(np.int32), tokens, offsets


def launch(
    kernels: KernelLibrary,
    expert_ids: DeviceArray,
    pairs: SortedPairs,
    num_experts: int,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the sort on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    source = view_of(_OP, "expert_ids", expert_ids, "int32", 2)
    tokens, count = source.shape
    if tokens < 1 or count < 1 or num_experts < 1:
        fail(_OP, f"expert_ids has shape {source.shape} for {num_experts} experts")
    require_view(_OP, "expert_ids", expert_ids, "int32", (tokens, count))
    params = np.zeros((), _PARAMS)
    params["expert_ids"], params["num_pairs"] = source.address, tokens * count
    params["experts_per_token"], params["num_experts"] = count, num_experts
    for name in ("order", "positions", "sorted_experts", "sorted_tokens"):
        view = require_view(_OP, name, getattr(pairs, name), "int32", (tokens * count,))
        params[name] = view.address
    offsets = require_view(_OP, "offsets", pairs.offsets, "int32", (num_experts + 1,))
    params["offsets"] = offsets.address
    kernels.function("moe_router", "moe_pairs").launch(
        (num_experts, 1, 1), (_THREADS, 1, 1), params, stream=stream, programmatic=is_chained
    )
