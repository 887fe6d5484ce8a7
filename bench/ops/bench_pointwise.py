"""embedding, rms_norm, swiglu, dequantise and copies: time, floor and fraction of the floor.

    python -m bench.ops.bench_pointwise --out DIR

The floor is bytes read plus written over the read-only rate R of this run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

from bench.common.op_bench import OpBench
from bench.common.record import environment, write_record
from ninfer.ops import copies, dequantise, embedding, rms_norm, swiglu
from ninfer.ops.linear_packing import ImageLayout, WeightFormat

TOKENS: Final = (1, 8, 2048, 8192)
HIDDEN: Final = {"4b": (2560, 9216), "27b": (5120, 17408), "35b-a3b": (2048, 512)}
MATRICES: Final = {
    "4b gate_up": (18432, 2560),
    "4b down": (2560, 9216),
    "27b gate_up": (34816, 5120),
}
CHAIN_BYTES: Final = 1 << 28
MAX_LINKS: Final = 64

Case = tuple[str, int, Callable[[int], None], int]
"""Name, bytes of a link, enqueue(link), links."""


class Bench(OpBench):
    def measure(self, case: Case) -> dict[str, Any]:
        name, size, enqueue, links = case
        median = self.time(enqueue, links)
        floor = size / self.read_rate * 1e6
        print(f"{name:32s} {median:9.2f} us  floor {floor:9.2f}  {floor / median:5.0%}")
        return {"case": name, "bytes": size, "us": median, "floor_us": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = Bench()
    rows = [bench.measure(case) for case in _cases(bench)]
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": rows}
    write_record(arguments.out / "pointwise.json", record)


def _cases(bench: Bench) -> Iterator[Case]:
    for model, (hidden, inner) in HIDDEN.items():
        for tokens in TOKENS:
            yield from _activation_cases(bench, model, tokens, hidden, inner)
    for name, (rows, columns) in MATRICES.items():
        for fmt in WeightFormat:
            yield _dequantise_case(bench, name, ImageLayout.of(fmt, rows, columns))
    for size in (64 << 10, 4 << 20, 151 << 20):
        yield _copy_case(bench, size)


def _activation_cases(
    bench: Bench, model: str, tokens: int, hidden: int, inner: int
) -> Iterator[Case]:
    kernels, stream = bench.kernels, bench.stream.ptr
    row_bytes = tokens * hidden * 2
    links = _links(row_bytes * 2)
    x, y = (cp.zeros((links, tokens, hidden), cp.uint16) for _ in range(2))
    weight, table = cp.zeros(hidden, cp.uint16), cp.zeros((65536, hidden), cp.uint16)
    ids = cp.random.randint(0, 65536, (links, tokens), dtype=cp.int32)
    sums = cp.zeros((tokens, -(-hidden // 32)), cp.float32)

    def gather(link: int) -> None:
        embedding.launch(
            kernels, ids[link], table, y[link], square_sums=sums, stream=stream, is_chained=True
        )

    def norm(link: int) -> None:
        rms_norm.launch(
            kernels, x[link], weight, y[link], eps=1e-6, offset=1.0, stream=stream,
            is_chained=True,
        )  # fmt: skip

    yield f"{model} embedding T={tokens}", 2 * row_bytes, gather, links
    yield f"{model} rms_norm T={tokens}", 2 * row_bytes, norm, links
    gated_bytes = tokens * inner * 6
    gated_links = _links(gated_bytes)
    wide = cp.zeros((gated_links, tokens, 2 * inner), cp.uint16)
    out = cp.zeros((gated_links, tokens, inner), cp.uint16)

    def gate(link: int) -> None:
        swiglu.launch(kernels, wide[link], out[link], stream=stream, is_chained=True)

    yield f"{model} swiglu T={tokens}", gated_bytes, gate, gated_links


def _dequantise_case(bench: Bench, name: str, layout: ImageLayout) -> Case:
    total = layout.image_bytes + layout.rows * layout.columns * 2
    links = max(2, min(8, (2 << 30) // total))
    images = cp.zeros((links, layout.image_bytes), cp.uint8)
    y = cp.empty((links, layout.rows, layout.columns), cp.uint16)
    scale = cp.ones(layout.rows, cp.float32) if layout.format.has_row_scale else None

    def unpack(link: int) -> None:
        dequantise.launch(
            bench.kernels, layout, images[link], y[link], row_scale=scale,
            stream=bench.stream.ptr, is_chained=True,
        )  # fmt: skip

    return f"dequantise {name} {layout.format.value}", total, unpack, links


def _copy_case(bench: Bench, size: int) -> Case:
    links = max(2, min(MAX_LINKS, CHAIN_BYTES // size))
    source, target = (cp.zeros((links, size), cp.uint8) for _ in range(2))
    ranges = [
        cp.asarray(copies.describe([(source[i].data.ptr, target[i].data.ptr, size)]).view(np.uint8))
        for i in range(links)
    ]

    def copy(link: int) -> None:
        copies.launch(
            bench.kernels, ranges[link], 1, size, stream=bench.stream.ptr, is_chained=True
        )

    return f"copy {size >> 10} KiB", 2 * size, copy, links


def _links(link_bytes: int) -> int:
    return max(2, min(MAX_LINKS, CHAIN_BYTES // link_bytes))


if __name__ == "__main__":
    main()
