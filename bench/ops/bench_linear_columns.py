"""linear_small_t by its number of columns: the products of a step of Qwen3.5-27B, with their ends.

    python -m bench.ops.bench_linear_columns --out DIR [--format fp8_row] [--variants]
                                             [--kernels DIR]

A line a matrix: us, GB/s and share of the read-only rate R at each T; last the sum over the
launches of one step, which is what a round of speculative decoding pays for its products.
--variants then tries other windows of x and other row blocks for the matrices and T at which x does
not fit shared memory, and prints the best ones next to what the plan says.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cupy as cp

from bench.common.record import environment, write_record
from bench.common.timing import time_chain
from bench.ops.bench_linear_small_t import Bench, Case, random_x
from ninfer.contract.errors import OpContractError
from ninfer.ops import linear_plan, linear_small_t
from ninfer.ops.linear_packing import WeightFormat
from ninfer.ops.linear_plan import LinearPlan, RingShape
from ninfer.ops.linear_small_t import Epilogue, InputNorm

TOKENS: Final = (1, 4, 8, 16, 24, 32)
VARIANT_TOKENS: Final = (8, 16, 24, 32)
WINDOW_UNITS: Final = (2, 3, 4, 6, 8, 12, 16)
NARROW_STRIPS: Final = (4, 8)
"""Row blocks tried for matrices whose x is as long as their weights: more rows share a window."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix of `bench_linear_small_t.SHAPES`, its launches in a step, and its ends."""

    name: str
    launches: int
    has_norm: bool
    epilogue: Epilogue


PRODUCTS: Final = (
    Product("27b in_proj", 48, True, Epilogue.STORE_BF16),
    Product("27b qkv", 16, True, Epilogue.STORE_BF16),
    Product("27b out", 64, False, Epilogue.ADD_RESIDUAL),
    Product("27b gate_up", 64, True, Epilogue.SWIGLU),
    Product("27b down", 64, False, Epilogue.ADD_RESIDUAL),
    Product("27b lm_head", 1, False, Epilogue.STORE_FLOAT),
)


class Columns:
    """One product's launches, over as many images as outgrow the cache."""

    def __init__(self, bench: Bench, product: Product, case: Case) -> None:
        self._bench = bench
        self._product = product
        self._case = case
        self._layout = case.packed[0].plan.layout

    @property
    def plan(self) -> LinearPlan:
        return self._case.packed[0].plan

    def measure(self, tokens: int, variant: str, ring: RingShape) -> dict[str, Any]:
        """One row of the table."""
        enqueue = self._launcher(tokens, ring)
        enqueue(0)
        cp.cuda.Device().synchronize()
        timing = time_chain(cp, self._bench.stream, enqueue, items=len(self._case.packed))
        rate = self._layout.image_bytes / (timing.median_us * 1e-6)
        return {
            "case": self._product.name, "format": self._layout.format.value, "tokens": tokens,
            "variant": variant, "launches": self._product.launches,
            "strips": self._layout.strips_per_block, "thread_blocks": self.plan.thread_blocks,
            **dataclasses.asdict(ring), **dataclasses.asdict(timing),
            "gigabytes_s": rate / 1e9, "fraction": rate / self._bench.read_rate,
        }  # fmt: skip

    def _launcher(self, tokens: int, ring: RingShape) -> Any:
        product, layout, count = self._product, self._layout, len(self._case.packed)
        x = random_x(tokens, layout.columns)
        is_gated = product.epilogue is Epilogue.SWIGLU
        dtype = cp.float32 if product.epilogue is Epilogue.STORE_FLOAT else cp.uint16
        rows = layout.rows // 2 if is_gated else layout.rows
        y = cp.zeros((1 if dtype == cp.float32 else count, tokens, rows), dtype)
        size = linear_plan.workspace_size(self.plan, tokens)
        workspace = cp.full(size, 0xFFFFFFFF, cp.uint32).view(cp.float32)
        adds = product.epilogue is Epilogue.ADD_RESIDUAL
        sums = cp.zeros((tokens, layout.strips), cp.float32) if adds else None
        norm = self._norm(tokens) if product.has_norm else None

        def enqueue(index: int) -> None:
            target = y[index % len(y)]
            linear_small_t.launch(
                self._bench.kernels, self._case.packed[index], x, target, workspace=workspace,
                stream=self._bench.stream.ptr, epilogue=product.epilogue,
                residual=target if adds else None, square_sums=sums, norm=norm,
                is_chained=True, ring=ring,
            )  # fmt: skip

        return enqueue

    def _norm(self, tokens: int) -> InputNorm:
        columns = self._layout.columns
        sums = cp.full((tokens, -(-columns // 32)), 32.0, cp.float32)
        return InputNorm(sums, random_x(1, columns)[0], 1e-6, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", type=WeightFormat, default=WeightFormat.FP8_ROW)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--kernels", type=Path, help="where `ninfer kernels build` has written")
    arguments = parser.parse_args()
    bench = Bench(cubin_dir=arguments.kernels)
    print(f"R = {bench.read_rate / 1e9:.0f} GB/s, {arguments.format.value}", flush=True)
    rows: list[dict[str, Any]] = []
    for product in PRODUCTS:
        measured = list(_rows(bench, product, arguments.format, has_variants=arguments.variants))
        _print_product(measured)
        rows += measured
        cp.get_default_memory_pool().free_all_blocks()
    _print_step(rows, bench.read_rate)
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": rows}
    write_record(arguments.out / "linear_columns.json", record)


def _rows(
    bench: Bench, product: Product, fmt: WeightFormat, *, has_variants: bool
) -> Iterator[dict[str, Any]]:
    """What the plan says for every T it takes, then the variants."""
    columns = Columns(bench, product, bench.make_case(product.name, fmt))
    most = linear_plan.max_tokens(columns.plan, bench.kernels.limits)
    for tokens in (count for count in TOKENS if count <= most):
        ring = linear_plan.shape_ring(columns.plan, tokens, bench.kernels.limits)
        yield columns.measure(tokens, "plan", ring)
    if not has_variants:
        return
    yield from _window_rows(bench, columns)
    if columns.plan.layout.strips_per_block >= min(NARROW_STRIPS):
        return
    for strips in NARROW_STRIPS:
        columns = Columns(bench, product, bench.make_case(product.name, fmt, strips))
        for tokens in (1, *VARIANT_TOKENS):
            ring = linear_plan.shape_ring(columns.plan, tokens, bench.kernels.limits)
            yield columns.measure(tokens, f"{strips} strips", ring)


def _window_rows(bench: Bench, columns: Columns) -> Iterator[dict[str, Any]]:
    for tokens in VARIANT_TOKENS:
        seen = set()
        for units in (None, *WINDOW_UNITS):
            try:
                ring = linear_plan.fit_ring(
                    columns.plan, tokens, bench.kernels.limits,
                    resident_blocks=1, max_stages=8, lookahead=0, window_units=units,
                )  # fmt: skip
                if ring in seen:
                    continue
                seen.add(ring)
                yield columns.measure(tokens, "1 window" if units is None else f"2x{units}", ring)
            except OpContractError:
                continue


def _print_product(rows: Sequence[dict[str, Any]]) -> None:
    planned = [row for row in rows if row["variant"] == "plan"]
    cells = [
        f"T{row['tokens']} {row['median_us']:.1f} us {row['gigabytes_s']:.0f}"
        f" {100 * row['fraction']:.0f}%"
        for row in planned
    ]
    print(f"{planned[0]['case']:12s} {' | '.join(cells)}", flush=True)
    for row in planned:
        others = [
            item for item in rows if item["tokens"] == row["tokens"] and item["variant"] != "plan"
        ]
        best = sorted(others, key=lambda item: float(item["median_us"]))[:6]
        if best:
            texts = [_variant_text(item) for item in best]
            print(f"    T{row['tokens']} plan {_variant_text(row)}; {', '.join(texts)}", flush=True)


def _variant_text(row: dict[str, Any]) -> str:
    """Variant, windows by columns by stages, us."""
    shape = f"{row['windows']}x{row['window']}/{row['stages']}"
    return f"{row['variant']} ({shape}) {row['median_us']:.1f}"


def _print_step(rows: Sequence[dict[str, Any]], read_rate: float) -> None:
    """Milliseconds of all products of one step, next to the time that reading the weights takes."""
    planned = [row for row in rows if row["variant"] == "plan"]
    for tokens in TOKENS:
        taken = [row for row in planned if row["tokens"] == tokens]
        if len(taken) < len(PRODUCTS):
            continue
        step_ms = sum(row["launches"] * row["median_us"] for row in taken) / 1e3
        floor_ms = sum(
            row["launches"] * row["median_us"] * row["fraction"] for row in taken
        ) / 1e3  # fmt: skip
        print(f"step T{tokens}: {step_ms:.2f} ms, {100 * floor_ms / step_ms:.0f}% of R")
    print(f"(R = {read_rate / 1e9:.0f} GB/s)")


if __name__ == "__main__":
    main()
