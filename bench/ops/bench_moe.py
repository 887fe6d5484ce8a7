"""The mixture of experts of 35B-A3B at few tokens: time, floor and fraction of the floor.

    python -m bench.ops.bench_moe --out DIR

Random experts a token. The floor of a product is the weights of the distinct experts, read once at
the read-only rate R of this run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

from bench.common.read_rate import measure_read_rate
from bench.common.record import environment, write_record
from bench.common.timing import time_chain
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import moe_experts_small_t, moe_pairs, moe_router
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.moe_experts_small_t import ExpertWeights
from ninfer.ops.moe_pairs import SortedPairs

HIDDEN: Final = 2048
INNER: Final = 512
EXPERTS: Final = 256
EXPERTS_PER_TOKEN: Final = 8
TOKENS: Final = (1, 2, 4, 8, 16)
LINKS: Final = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    cp.cuda.Device(0).use()
    kernels = KernelLibrary.open(cache_dir=Path("/tmp/ninfer-bench-kernels"))
    stream = cp.cuda.Stream(non_blocking=True)
    stream.use()
    read_rate = measure_read_rate(cp, kernels, stream, total_bytes=8 << 30)
    rows = []
    for fmt in WeightFormat:
        for is_gated in (True, False):
            weights = _weights(fmt, is_gated)
            for tokens in TOKENS:
                rows.append(_measure(kernels, stream, weights, tokens, is_gated, read_rate))
    rows += [_measure_router(kernels, stream, tokens) for tokens in (1, 8, 2048)]
    record = {**environment(cp), "read_rate": read_rate, "rows": rows}
    write_record(arguments.out / "moe.json", record)


def _weights(fmt: WeightFormat, is_gated: bool) -> ExpertWeights:
    shape = (2 * INNER, HIDDEN) if is_gated else (HIDDEN, INNER)
    layout = ImageLayout.of(fmt, *shape)
    scales = cp.ones((EXPERTS, layout.rows), cp.float32) if fmt.has_row_scale else None
    return ExpertWeights(layout, cp.zeros((EXPERTS, layout.image_bytes), cp.uint8), scales)


def _measure(
    kernels: KernelLibrary,
    stream: Any,
    weights: ExpertWeights,
    tokens: int,
    is_gated: bool,
    read_rate: float,
) -> dict[str, Any]:
    """Every link has its own random experts, so that few of them are in the cache."""
    rng = np.random.default_rng(tokens)
    layout = weights.layout
    num_pairs = tokens * EXPERTS_PER_TOKEN
    chosen = [
        np.stack([rng.permutation(EXPERTS)[:EXPERTS_PER_TOKEN] for _ in range(tokens)])
        for _ in range(LINKS)
    ]
    pairs = [SortedPairs(*map(cp.asarray, moe_pairs.reference(ids, EXPERTS))) for ids in chosen]
    x = cp.zeros((tokens if is_gated else num_pairs, layout.columns), cp.uint16)
    columns = layout.rows // 2 if is_gated else layout.rows
    y = cp.zeros((num_pairs, columns), cp.uint16 if is_gated else cp.float32)

    def enqueue(link: int) -> None:
        moe_experts_small_t.launch(
            kernels, weights, pairs[link], x, y, is_gated=is_gated, stream=stream.ptr,
            is_chained=True,
        )  # fmt: skip

    enqueue(0)
    stream.synchronize()
    median = time_chain(cp, stream, enqueue, items=LINKS).median_us
    distinct = float(np.mean([np.unique(ids).size for ids in chosen]))
    floor = distinct * layout.image_bytes / read_rate * 1e6
    name = f"{'gate_up' if is_gated else 'down'} {layout.format.value} T={tokens}"
    print(f"{name:28s} {median:8.2f} us  floor {floor:8.2f}  {floor / median:5.0%}")
    return {"case": name, "us": median, "floor_us": floor}


def _measure_router(kernels: KernelLibrary, stream: Any, tokens: int) -> dict[str, Any]:
    """Router and sort; nothing but latency."""
    num_pairs = tokens * EXPERTS_PER_TOKEN
    logits = cp.random.standard_normal((tokens, EXPERTS), dtype=cp.float32)
    ids = cp.zeros((tokens, EXPERTS_PER_TOKEN), cp.int32)
    weights = cp.zeros((tokens, EXPERTS_PER_TOKEN), cp.float32)
    order, positions, experts, sorted_tokens = (cp.zeros(num_pairs, cp.int32) for _ in range(4))
    pairs = SortedPairs(order, positions, experts, sorted_tokens, cp.zeros(EXPERTS + 1, cp.int32))

    def enqueue(_link: int) -> None:
        moe_router.launch(
            kernels, logits, ids, weights, renormalise=True, stream=stream.ptr, is_chained=True
        )
        moe_pairs.launch(kernels, ids, pairs, EXPERTS, stream=stream.ptr, is_chained=True)

    enqueue(0)
    stream.synchronize()
    median = time_chain(cp, stream, enqueue, items=LINKS).median_us
    print(f"router and pairs T={tokens:5d} {median:8.2f} us")
    return {"case": f"router and pairs T={tokens}", "us": median}


if __name__ == "__main__":
    main()
