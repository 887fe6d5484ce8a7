"""copies: ranges of memory copied, or filled with zeros, by one launch.

Shapes     ranges [n] of RANGE, n >= 1: source and target addresses and bytes; source 0 is zeros
Units      bytes and addresses are multiples of 16; a range of 0 bytes does nothing; all memory
           is the device's own or page-locked memory of the host
Effects    writes every byte of the targets. Targets overlap neither each other nor any source
Workspace  none
Errors     OpContractError for a range off these rules or a descriptor array of another size
Tolerance  EXACT
Source     the definition
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.device_array import DeviceArray
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view

_OP: Final = "copies"

RANGE: Final = np.dtype([("source", "<u8"), ("target", "<u8"), ("bytes", "<u8")])
"""One range; source 0 asks for zeros."""
ALIGNMENT_BYTES: Final = 16

_THREADS: Final = 256
_PIECE_BYTES: Final = 64 * 1024
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_MAX_RANGES: Final = 65535
_PARAMS: Final = np.dtype([("ranges", "<u8"), ("num_ranges", "<u8")])


def describe(ranges: Sequence[tuple[int | None, int, int]]) -> NDArray[np.void]:
    """Descriptors [n] of (source or None, target, bytes), for the caller to bring to the device.

    Raises OpContractError for misaligned ranges, or a target that overlaps anything.
    """
    described = np.zeros(len(ranges), RANGE)
    for index, (source, target, size) in enumerate(ranges):
        if size < 0 or target <= 0 or any(n % ALIGNMENT_BYTES for n in (source or 0, target, size)):
            fail(_OP, f"range {index}: {source}, {target}, {size} bytes are not multiples of 16")
        described[index] = (source or 0, target, size)
    _check_overlaps(described)
    return described


def launch(
    kernels: KernelLibrary,
    ranges: DeviceArray,
    num_ranges: int,
    max_bytes: int,
    *,
    stream: int,
    max_blocks: int | None = None,
    is_chained: bool = False,
) -> None:
    """Queue the copies on `stream`; returns before they have run.

    ranges       uint8 [num_ranges * RANGE.itemsize], unchanged until the launch has run
    max_bytes    of the longest range: how many thread blocks share one
    max_blocks   most thread blocks in all, so that other kernels have room beside them
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    if not 1 <= num_ranges <= _MAX_RANGES or max_bytes < 1 or max_blocks == 0:
        fail(_OP, f"{num_ranges} ranges of up to {max_bytes} bytes")
    view = require_view(
        _OP, "ranges", ranges, "uint8", (num_ranges * RANGE.itemsize,), alignment_bytes=8
    )
    params = np.zeros((), _PARAMS)
    params["ranges"], params["num_ranges"] = view.address, num_ranges
    most = kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    rows = num_ranges if max_blocks is None else min(num_ranges, max_blocks)
    most = -(-most // rows) if max_blocks is None else max_blocks // rows
    blocks = min(-(-max_bytes // _PIECE_BYTES), most)
    kernels.function("copies", "copies").launch(
        (blocks, rows, 1), (_THREADS, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _check_overlaps(described: NDArray[np.void]) -> None:
    filled = described[described["bytes"] > 0]
    copied = filled[filled["source"] > 0]
    begins = np.concatenate([filled["target"], copied["source"]])
    ends = begins + np.concatenate([filled["bytes"], copied["bytes"]])
    is_target = np.arange(begins.size) < filled.size
    order = np.argsort(begins, kind="stable")
    written_to = read_to = 0
    for begin, end, writes in zip(
        begins[order].tolist(), ends[order].tolist(), is_target[order].tolist(), strict=True
    ):
        if begin < written_to or (writes and begin < read_to):
            fail(_OP, f"a range at {begin} overlaps a target")
        if writes:
            written_to = max(written_to, end)
        else:
            read_to = max(read_to, end)
