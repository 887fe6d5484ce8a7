"""moe_pairs: the pairs (token, rank) of a unit sorted by expert, stable, and tiles of them.

    positions[t * k + rank] = the pair's sorted position
    sorted_tokens[i] = the token of the pair at sorted position i
    offsets[e] = the first sorted position of expert e;  offsets[E] = P
    tiles[j] = (expert, first sorted position): each expert's positions in runs of TILE_TOKENS, the
               last one shorter, experts in order; num_tiles[0] of them

Shapes     expert_ids [T, k], P = T * k -> positions, sorted_tokens [P]; offsets [E + 1];
           tiles [max_tiles(P, E), 2]; num_tiles [1]; counts [num_counts(P, E)]; E <= 512
Dtypes     int32
Units      expert_ids in [0, E): data to the launch, as moe_router writes them
Effects    writes every element of positions, sorted_tokens, offsets and num_tiles, and the tiles
           that there are
Workspace  counts
Errors     OpContractError for another shape or dtype
Tolerance  EXACT
Source     counting sort
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
from ninfer.ops.moe_router import MAX_EXPERTS

_OP: Final = "moe_pairs"

TILE_TOKENS: Final = 128
_THREADS: Final = 256
_BLOCK_PAIRS: Final = 1024
_PARAMS: Final = np.dtype(
    [
        ("expert_ids", "<u8"), ("counts", "<u8"), ("positions", "<u8"), ("sorted_tokens", "<u8"),
        ("offsets", "<u8"), ("tiles", "<u8"), ("num_tiles", "<u8"), ("num_pairs", "<i4"),
        ("experts_per_token", "<i4"), ("num_experts", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """The outputs on the device, and the workspace."""

    positions: DeviceArray
    sorted_tokens: DeviceArray
    offsets: DeviceArray
    tiles: DeviceArray
    num_tiles: DeviceArray
    counts: DeviceArray


def max_tiles(num_pairs: int, num_experts: int) -> int:
    """Most tiles that so many pairs make."""
    return min(num_pairs, num_pairs // TILE_TOKENS + num_experts)


def num_counts(num_pairs: int, num_experts: int) -> int:
    return -(-num_pairs // _BLOCK_PAIRS) * num_experts


def reference(
    expert_ids: NDArray[np.integer[Any]], num_experts: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(positions, sorted_tokens, offsets, tiles)."""
    flat = expert_ids.ravel()
    order = np.argsort(flat, kind="stable").astype(np.int32)
    positions = np.empty_like(order)
    positions[order] = np.arange(order.size, dtype=np.int32)
    counts = np.bincount(flat, minlength=num_experts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = (order // expert_ids.shape[1]).astype(np.int32)
    tiles = [
        (expert, first)
        for expert in range(num_experts)
        for first in range(offsets[expert], offsets[expert + 1], TILE_TOKENS)
    ]
    return positions, tokens, offsets, np.array(tiles, np.int32)


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
    if tokens < 1 or count < 1 or not 1 <= num_experts <= MAX_EXPERTS:
        fail(_OP, f"expert_ids has shape {source.shape} for {num_experts} experts")
    require_view(_OP, "expert_ids", expert_ids, "int32", (tokens, count))
    num_pairs = tokens * count
    params = np.zeros((), _PARAMS)
    params["expert_ids"], params["num_pairs"] = source.address, num_pairs
    params["experts_per_token"], params["num_experts"] = count, num_experts
    for name, shape in (
        ("positions", (num_pairs,)),
        ("sorted_tokens", (num_pairs,)),
        ("offsets", (num_experts + 1,)),
        ("tiles", (max_tiles(num_pairs, num_experts), 2)),
        ("num_tiles", (1,)),
        ("counts", (num_counts(num_pairs, num_experts),)),
    ):
        view = require_view(_OP, name, getattr(pairs, name), "int32", shape, alignment_bytes=8)
        params[name] = view.address
    blocks = (-(-num_pairs // _BLOCK_PAIRS), 1, 1)
    for entry, chained in (("moe_pairs_count", is_chained), ("moe_pairs_place", True)):
        kernels.function("moe_pairs", entry).launch(
            blocks, (_THREADS, 1, 1), params, stream=stream, programmatic=chained
        )
