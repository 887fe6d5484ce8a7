"""dflash_proposals: the guesses of a block, out of what was chosen behind its columns.

    proposals[b, i - 1] = chosen[b W + i] where ordinals[b W + i] >= 0 and i < W, else -1

Shapes     chosen and ordinals [R * W], a block's (dflash_block), W >= 2 -> proposals [R, K]
Dtypes     int32
Units      a negative choice is none and stays negative: whoever reads cuts there
Effects    writes every element of proposals, which overlap no input
Errors     OpContractError for a shape or dtype outside the above
Tolerance  EXACT
Source     docs/dflash.md
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view

_OP: Final = "dflash_proposals"

_MAX_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("chosen", "<u8"), ("ordinals", "<u8"), ("proposals", "<u8"), ("num_rows", "<i4"),
        ("columns", "<i4"), ("num_proposals", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


def reference(chosen: IntArray, ordinals: IntArray, proposals: IntArray) -> None:
    """Writes `proposals`."""
    num_rows, num_proposals = proposals.shape
    guesses = np.where(ordinals >= 0, chosen, -1).reshape(num_rows, -1)[:, 1:][:, :num_proposals]
    proposals[:] = -1
    proposals[:, : guesses.shape[1]] = guesses


def launch(
    kernels: KernelLibrary,
    chosen: DeviceArray,
    ordinals: DeviceArray,
    proposals: DeviceArray,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the proposals on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    num_rows, num_proposals = view_of(_OP, "proposals", proposals, "int32", 2).shape
    (num_columns,) = view_of(_OP, "chosen", chosen, "int32", 1).shape
    if num_rows < 1 or num_proposals < 1 or num_columns % num_rows or num_columns < 2 * num_rows:
        fail(_OP, f"{num_columns} columns of {num_rows} rows, {num_proposals} proposals each")
    params = np.zeros((), _PARAMS)
    params["num_rows"], params["columns"] = num_rows, num_columns // num_rows
    params["num_proposals"] = num_proposals
    for name, array, shape in (
        ("chosen", chosen, (num_columns,)),
        ("ordinals", ordinals, (num_columns,)),
        ("proposals", proposals, (num_rows, num_proposals)),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape).address
    threads = min(_MAX_THREADS, -(-num_rows * num_proposals // 32) * 32)
    blocks = -(-num_rows * num_proposals // threads)
    kernels.function("dflash", "dflash_proposals").launch(
        (blocks, 1, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )
