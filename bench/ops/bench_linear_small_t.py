"""linear_small_t over the shapes of two models: time, rate, and fraction of the read-only rate R.

    python -m bench.ops.bench_linear_small_t --out DIR [--rings]

Chains of kernels over different images (cold cache) in a CUDA Graph, with programmatic dependent
launch unless told otherwise. Every weight is packed on the device from random codes and checked
against a float32 product of the decoded weight first. --rings compares ring shapes, splits and
launch kinds instead of walking the whole table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

from bench.common.read_rate import measure_read_rate
from bench.common.record import environment, write_record
from bench.common.timing import time_chain
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import linear_pack, linear_plan, linear_small_t
from ninfer.ops.float_codecs import e2m1_to_float, e4m3_to_float
from ninfer.ops.linear_packing import E2M1_SHIFT, ImageLayout, WeightFormat
from ninfer.ops.linear_plan import LinearPlan, RingShape
from ninfer.ops.linear_small_t import PackedLinear

SHAPES: Final = {
    "4b in_proj": (12352, 2560),
    "4b out_proj": (2560, 4096),
    "4b gate_up": (18432, 2560),
    "4b down": (2560, 9216),
    "4b lm_head": (248320, 2560),
    "27b in_proj": (16480, 5120),
    "27b qkv": (14336, 5120),
    "27b out": (5120, 6144),
    "27b gate_up": (34816, 5120),
    "27b down": (5120, 17408),
    "27b lm_head": (248320, 5120),
}
RINGS: Final = ((1, 1, 8), (1, 2, 6), (2, 2, 3))
"""(thread blocks a multiprocessor, blocks that share its memory, most stages)."""
RING_AHEAD: Final = tuple(itertools.product((1, 8), (0, 4)))
"""(T, units ahead of the ring)."""
TOKENS: Final = (1, 2, 4, 8, 16)
MAX_THREADS: Final = 640
"""Of a multiprocessor, by the kernel's registers."""
CHAIN_BYTES: Final = 1 << 30
MAX_LINKS: Final = 96
MAX_ERROR: Final = 4e-3
"""Relative L2 error of a bf16 result."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Copies of one packed weight that together outgrow the cache."""

    name: str
    format: WeightFormat
    packed: tuple[PackedLinear, ...]

    def with_plan(self, plan: LinearPlan) -> Case:
        packed = tuple(dataclasses.replace(item, plan=plan) for item in self.packed)
        return dataclasses.replace(self, packed=packed)


class Bench:
    """The device, its rate R and the buffers that all cases share."""

    def __init__(self, cubin_dir: Path | None = None) -> None:
        cp.cuda.Device(0).use()
        self.kernels = KernelLibrary.open(
            cache_dir=Path(tempfile.gettempdir()) / "ninfer-bench-kernels", cubin_dir=cubin_dir
        )
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.read_rate = measure_read_rate(cp, self.kernels, self.stream, total_bytes=8 << 30)

    def make_case(self, name: str, fmt: WeightFormat, strips: int | None = None) -> Case:
        """Pack random codes, check the product, and copy the image until the chain is cold."""
        layout = ImageLayout.of(fmt, *SHAPES[name])
        if strips is not None:
            layout = dataclasses.replace(layout, strips_per_block=strips)
        codes, scales, row_scale, decoded = _random_weight(layout)
        image = cp.empty(layout.image_bytes, cp.uint8)
        linear_pack.launch(
            self.kernels, layout, codes, image, scales=scales, stream=self.stream.ptr
        )
        plan = linear_small_t.plan_linear(layout, self.kernels.limits)
        first = PackedLinear(plan, image, row_scale)
        self._check(name, first, decoded)
        count = max(2, min(MAX_LINKS, CHAIN_BYTES // layout.image_bytes))
        copies = [first] + [
            dataclasses.replace(first, image=image.copy()) for _ in range(count - 1)
        ]
        cp.cuda.Device().synchronize()
        return Case(name, fmt, tuple(copies))

    def measure(
        self,
        case: Case,
        tokens: int,
        *,
        is_chained: bool = True,
        ring: RingShape | None = None,
    ) -> dict[str, Any]:
        """One row of the table."""
        plan = case.packed[0].plan
        layout = plan.layout
        x = random_x(tokens, layout.columns)
        y = cp.empty((len(case.packed), tokens, layout.rows), cp.uint16)
        workspace = _workspace(plan)
        shape = ring or linear_plan.shape_ring(plan, tokens, self.kernels.limits)

        def enqueue(index: int) -> None:
            linear_small_t.launch(
                self.kernels, case.packed[index], x, y[index], workspace=workspace,
                stream=self.stream.ptr, is_chained=is_chained, ring=shape,
            )  # fmt: skip

        enqueue(0)
        cp.cuda.Device().synchronize()
        timing = time_chain(cp, self.stream, enqueue, items=len(case.packed))
        rate = layout.image_bytes / (timing.median_us * 1e-6)
        return {
            "case": case.name, "format": case.format.value, "tokens": tokens,
            "bytes": layout.image_bytes, "strips": layout.strips_per_block,
            "thread_blocks": plan.thread_blocks,
            **dataclasses.asdict(shape),
            "is_chained": is_chained, **dataclasses.asdict(timing),
            "terabytes_s": rate / 1e12, "fraction": rate / self.read_rate,
        }  # fmt: skip

    def _check(self, name: str, packed: PackedLinear, decoded: Any) -> None:
        layout = packed.plan.layout
        x = random_x(8, layout.columns)
        y = cp.full((8, layout.rows), 0x7FC1, cp.uint16)
        linear_small_t.launch(
            self.kernels, packed, x, y, workspace=_workspace(packed.plan), stream=self.stream.ptr
        )
        self.stream.synchronize()
        want = _bf16_values(x) @ decoded.T
        error = float(cp.linalg.norm(_bf16_values(y) - want) / cp.linalg.norm(want))
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name} {layout.format.value}: relative error {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rings", action="store_true")
    parser.add_argument("--formats", default=",".join(item.value for item in WeightFormat))
    parser.add_argument("--cases", default="")
    arguments = parser.parse_args()
    formats = [WeightFormat(name) for name in arguments.formats.split(",")]
    names = arguments.cases.split(",") if arguments.cases else list(SHAPES)
    bench = Bench()
    print(f"R = {bench.read_rate / 1e12:.3f} TB/s, read only", flush=True)
    rows = list(
        _ring_rows(bench, names, formats) if arguments.rings else _table_rows(bench, names, formats)
    )
    name = "linear_small_t_rings" if arguments.rings else "linear_small_t"
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": rows}
    write_record(arguments.out / f"{name}.json", record)
    if arguments.rings:
        _print_rings(rows)
    else:
        _print_table(rows)


def _table_rows(
    bench: Bench, names: list[str], formats: list[WeightFormat]
) -> Iterator[dict[str, Any]]:
    for name, fmt in itertools.product(names, formats):
        case = bench.make_case(name, fmt)
        for tokens in TOKENS:
            yield bench.measure(case, tokens)
        yield bench.measure(case, 1, is_chained=False)
        del case
        cp.get_default_memory_pool().free_all_blocks()


def _ring_rows(
    bench: Bench, names: list[str], formats: list[WeightFormat]
) -> Iterator[dict[str, Any]]:
    limits = bench.kernels.limits
    for name, fmt, strips in itertools.product(names, formats, (None,)):
        case = bench.make_case(name, fmt, strips)
        layout = case.packed[0].plan.layout
        for blocks, resident, stages in RINGS:
            if blocks * linear_plan.threads(fmt) > MAX_THREADS:
                continue
            plan = LinearPlan(layout, min(layout.units, blocks * limits.num_multiprocessors))
            for tokens, lookahead in RING_AHEAD:
                ring = linear_plan.fit_ring(
                    plan, tokens, limits,
                    resident_blocks=resident, max_stages=stages, lookahead=lookahead,
                )  # fmt: skip
                row = bench.measure(case.with_plan(plan), tokens, ring=ring)
                yield {**row, "blocks": blocks, "resident": resident}
        del case
        cp.get_default_memory_pool().free_all_blocks()


def _print_table(rows: list[dict[str, Any]]) -> None:
    for key, group in itertools.groupby(rows, key=lambda row: (row["case"], row["format"])):
        cells = [
            f"T{row['tokens']}{'' if row['is_chained'] else ' plain'} "
            f"{row['terabytes_s']:.2f} {100 * row['fraction']:.0f}%"
            for row in group
        ]
        print(f"{key[0]:12s} {key[1]:9s} {' | '.join(cells)}")


def _print_rings(rows: list[dict[str, Any]]) -> None:
    """The five best settings of every case, and how they differ."""
    order = sorted(rows, key=lambda row: (row["case"], row["format"], row["tokens"]))
    for key, group in itertools.groupby(
        order, key=lambda row: (row["case"], row["format"], row["tokens"])
    ):
        best = sorted(group, key=lambda row: -row["fraction"])[:6]
        cells = [
            f"{row['strips']}:{row['blocks']}/{row['resident']}x{row['stages']}+{row['lookahead']}"
            f" {100 * row['fraction']:.0f}"
            for row in best
        ]
        print(f"{key[0]:12s} {key[1]:9s} T{key[2]} {', '.join(cells)}")


def _workspace(plan: LinearPlan) -> Any:
    size = linear_small_t.workspace_size(plan)
    return cp.full(size, 0xFFFFFFFF, cp.uint32).view(cp.float32)


def random_x(tokens: int, columns: int) -> Any:
    """bf16 codes [T, K]."""
    values = cp.random.standard_normal((tokens, columns), dtype=cp.float32)
    return (values.view(cp.uint32) >> 16).astype(cp.uint16)


def _bf16_values(codes: Any) -> Any:
    return (codes.astype(cp.uint32) << 16).view(cp.float32)


def _random_weight(layout: ImageLayout) -> tuple[Any, Any, Any, Any]:
    """codes, scales, row_scale as linear_pack takes them, and the decoded float32 [N, K]."""
    rows, columns = layout.rows, layout.columns
    if layout.format is WeightFormat.BF16:
        values = cp.random.standard_normal((rows, columns), dtype=cp.float32)
        codes = (values.view(cp.uint32) >> 16).astype(cp.uint16)
        return codes, None, None, _bf16_values(codes)
    row_scale = cp.random.uniform(0.01, 0.02, rows, dtype=cp.float32)
    if layout.format is WeightFormat.NVFP4:
        codes = cp.random.randint(0, 256, (rows, columns // 2), dtype=cp.uint8)
        scales = cp.random.randint(0x28, 0x48, (rows, columns // 16), dtype=cp.uint8)
        table = cp.asarray(e2m1_to_float(np.arange(16, dtype=np.uint8)))
        decoded = cp.stack([table[codes & 15], table[codes >> 4]], axis=-1).reshape(rows, columns)
        decoded *= cp.repeat(_e4m3_values(scales), 16, axis=1)
        decoded *= row_scale[:, None]
        return codes, scales, row_scale * cp.float32(E2M1_SHIFT), decoded
    codes = cp.random.randint(0, 0x7F, (rows, columns), dtype=cp.uint8)
    codes ^= cp.random.randint(0, 2, (rows, columns), dtype=cp.uint8) << 7
    decoded = _e4m3_values(codes)
    if layout.format is WeightFormat.FP8_ROW:
        decoded *= row_scale[:, None]
        return codes, None, row_scale, decoded
    blocks = (-(-rows // 128), -(-columns // 128))
    scales = cp.random.uniform(0.5, 2.0, blocks, dtype=cp.float32)
    decoded *= cp.repeat(cp.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :columns]
    return codes, scales, None, decoded


def _e4m3_values(codes: Any) -> Any:
    return cp.asarray(e4m3_to_float(np.arange(256, dtype=np.uint8)))[codes]


if __name__ == "__main__":
    main()
