"""draft_step: a chosen draft becomes the next input of the draft model; once for each draft.

    proposals[b, k] = chosen[b] where the row's chain is alive (ordinals[b] >= 0), else -1
    token_ids[b] = max(chosen[b], 0);  sources[b] = b
    ordinals[b] += 1, or -1 where the chain ends: it had ended before, nothing was chosen
                   (chosen < 0), or the next ordinal is not below limits[b]
    rope_positions[:, b] += 1;  the position of the sampler's row b += 1

Shapes     DraftChain of R rows; chosen, limits, token_ids and sources [R]; proposals [R, K];
           0 <= k < K
Dtypes     int32; rows of the sampler uint8 [R * device_sampling.ROW.itemsize]
Units      ordinals and limits in tokens
Effects    writes token_ids, sources, column k of proposals and, in place, the chain. token_ids may
           be chosen; nothing else overlaps
Errors     OpContractError for a shape, dtype or alignment outside the above
Tolerance  EXACT
Source     docs/speculation.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.device_sampling import ROW

_OP: Final = "draft_step"
Array_co = TypeVar("Array_co", covariant=True)

_MAX_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("chosen", "<u8"), ("limits", "<u8"), ("token_ids", "<u8"), ("sources", "<u8"),
        ("proposals", "<u8"), ("ordinals", "<u8"), ("rope_positions", "<u8"), ("rows", "<u8"),
        ("num_rows", "<i4"), ("num_proposals", "<i4"), ("index", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class DraftChain(Generic[Array_co]):
    """Where the draft model stands: of the pair that it read last in each row, the cache ordinal
    [R] (-1: no page, or the chain has ended) and rotary positions [3, R]; and how the token behind
    it is chosen, rows of the sampler uint8 [R * ROW.itemsize]."""

    ordinals: Array_co
    rope_positions: Array_co
    rows: Array_co


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs(Generic[Array_co]):
    """token_ids and sources [R] for draft_input, proposals [R, K]."""

    token_ids: Array_co
    sources: Array_co
    proposals: Array_co


def reference(
    chosen: IntArray,
    limits: IntArray,
    chain: DraftChain[NDArray[Any]],
    outputs: StepOutputs[NDArray[Any]],
    *,
    index: int,
) -> None:
    """Writes `outputs` and moves `chain` on, in place."""
    was_alive = chain.ordinals >= 0
    outputs.proposals[:, index] = np.where(was_alive, chosen, -1)
    outputs.sources[:] = np.arange(chosen.size)
    is_alive = was_alive & (chosen >= 0) & (chain.ordinals + 1 < limits)
    chain.ordinals[:] = np.where(is_alive, chain.ordinals + 1, -1)
    chain.rope_positions[:] += 1
    chain.rows.view(ROW)["position"] += 1
    outputs.token_ids[:] = np.maximum(chosen, 0)


def launch(
    kernels: KernelLibrary,
    chosen: DeviceArray,
    limits: DeviceArray,
    chain: DraftChain[DeviceArray],
    outputs: StepOutputs[DeviceArray],
    *,
    index: int,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the step on `stream`; returns before it has run.

    Some launches read ordinals of theirs before they wait for the kernel ahead
    (paged_attention_decode): between this and the first of those, one launch must not be chained.

    index        k, the column of proposals
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    num_rows, num_proposals = view_of(_OP, "proposals", outputs.proposals, "int32", 2).shape
    if num_rows < 1 or not 0 <= index < num_proposals:
        fail(_OP, f"proposal {index} of {num_proposals} in {num_rows} rows")
    params = np.zeros((), _PARAMS)
    params["num_rows"], params["num_proposals"] = num_rows, num_proposals
    params["index"] = index
    for name, array, shape in (
        ("chosen", chosen, (num_rows,)),
        ("limits", limits, (num_rows,)),
        ("token_ids", outputs.token_ids, (num_rows,)),
        ("sources", outputs.sources, (num_rows,)),
        ("proposals", outputs.proposals, (num_rows, num_proposals)),
        ("ordinals", chain.ordinals, (num_rows,)),
        ("rope_positions", chain.rope_positions, (3, num_rows)),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape).address
    rows_bytes = (num_rows * ROW.itemsize,)
    rows = require_view(_OP, "rows", chain.rows, "uint8", rows_bytes, alignment_bytes=8)
    params["rows"] = rows.address
    threads = min(_MAX_THREADS, -(-num_rows // 32) * 32)
    kernels.function("draft_rounds", "draft_step").launch(
        (-(-num_rows // threads), 1, 1), (threads, 1, 1), params,
        stream=stream, programmatic=is_chained,
    )  # fmt: skip
