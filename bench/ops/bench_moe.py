"""The mixture of experts of 35B-A3B: whole layers of few tokens, and the experts of many.

    python -m bench.ops.bench_moe --out DIR [--formats bf16,nvfp4] [--tokens 1,8] [--many 2048]

Few tokens: three launches, against the bytes of router, shared expert and the distinct experts in
use, at the read-only rate R of this run. Every link of a chain has its own tokens, router and
shared expert, so that few weights are in the cache. Many tokens: choosing and sorting, the grouped
products, adding up.
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
from ninfer.ops import (
    linear_small_t,
    moe_combine,
    moe_grouped,
    moe_pairs,
    moe_router,
    moe_small_t,
)
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.float_codecs import float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import InputNorm, PackedLinear
from ninfer.ops.moe_combine import SharedOutput
from ninfer.ops.moe_pairs import SortedPairs
from ninfer.ops.moe_router import SharedGate
from ninfer.ops.moe_small_t import MoeWeights, MoeWorkspace, SharedExpert
from tests.helpers.packed_weights import random_packed

HIDDEN: Final = 2048
INNER: Final = 512
EXPERTS: Final = 256
EXPERTS_PER_TOKEN: Final = 8
LINKS: Final = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default="bf16,fp8_row,fp8_block,nvfp4")
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--many", default="128,512,2048,8192")
    arguments = parser.parse_args()
    cp.cuda.Device(0).use()
    kernels = KernelLibrary.open()
    stream = cp.cuda.Stream(non_blocking=True)
    stream.use()
    read_rate = measure_read_rate(cp, kernels, stream, total_bytes=8 << 30)
    rows = []
    for name in arguments.formats.split(","):
        layers = _layers(kernels, WeightFormat(name))
        for tokens in map(int, arguments.tokens.split(",")):
            rows += _measure_few(kernels, stream, layers, tokens, read_rate)
        for tokens in map(int, arguments.many.split(",")):
            rows += _measure_many(kernels, stream, layers[0], tokens, read_rate)
        del layers
        cp.get_default_memory_pool().free_all_blocks()
    record = {**environment(cp), "read_rate": read_rate, "rows": rows}
    write_record(arguments.out / "moe.json", record)


def _experts(fmt: WeightFormat, rows: int, columns: int, *, is_gated: bool) -> ExpertWeights:
    """One random expert, repeated: what is read is random, which expert it is does not matter."""
    layout = ImageLayout.of(fmt, rows, columns)
    one = random_packed(layout, 1, is_interleaved=is_gated, scale=columns**-0.5)
    images = cp.empty((EXPERTS, layout.image_bytes), cp.uint8)
    images[:] = cp.asarray(one.image)
    scales = None
    if one.row_scale is not None:
        scales = cp.empty((EXPERTS, rows), cp.float32)
        scales[:] = cp.asarray(one.row_scale)
    return ExpertWeights(layout, images, scales)


def _linear(
    kernels: KernelLibrary, fmt: WeightFormat, rows: int, columns: int, *, is_gated: bool = False
) -> PackedLinear:
    layout = ImageLayout.of(fmt, rows, columns)
    one = random_packed(layout, 2, is_interleaved=is_gated, scale=columns**-0.5)
    scale = None if one.row_scale is None else cp.asarray(one.row_scale)
    plan = linear_small_t.plan_linear(layout, kernels.limits)
    return PackedLinear(plan, cp.asarray(one.image), scale)


def _layers(kernels: KernelLibrary, fmt: WeightFormat) -> list[MoeWeights]:
    """A layer a link: routers and shared experts of their own, the routed experts in common."""
    gate_up = _experts(fmt, 2 * INNER, HIDDEN, is_gated=True)
    down = _experts(fmt, HIDDEN, INNER, is_gated=False)
    gate = cp.asarray(_random_bf16((HIDDEN,), 0))
    return [
        MoeWeights(
            _linear(kernels, WeightFormat.BF16, EXPERTS, HIDDEN), gate_up, down,
            EXPERTS_PER_TOKEN, True, gate,
            SharedExpert(
                _linear(kernels, fmt, 2 * INNER, HIDDEN, is_gated=True),
                _linear(kernels, fmt, HIDDEN, INNER),
            ),
        )
        for _ in range(LINKS)
    ]  # fmt: skip


def _random_bf16(shape: tuple[int, ...], seed: int) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return float_to_bf16(values.astype(np.float32))


def _measure_few(
    kernels: KernelLibrary, stream: Any, layers: list[MoeWeights], tokens: int, read_rate: float
) -> list[dict[str, Any]]:
    """The layer, and its router alone."""
    pairs = tokens * EXPERTS_PER_TOKEN
    norm_weight = cp.asarray(_random_bf16((HIDDEN,), 1))
    xs = [cp.asarray(_random_bf16((tokens, HIDDEN), 2 + link)) for link in range(LINKS)]
    y = cp.empty((tokens, HIDDEN), cp.uint16)
    sums = cp.full((tokens, HIDDEN // 32), 32.0, cp.float32)
    y_sums = cp.empty_like(sums)
    norm = InputNorm(sums, norm_weight, 1e-6, 1.0)
    spaces = [
        MoeWorkspace(
            cp.empty((tokens, HIDDEN), cp.uint16), cp.empty((tokens, EXPERTS), cp.float32),
            cp.empty(tokens, cp.float32), cp.empty((pairs, INNER), cp.uint16),
            cp.empty((tokens, INNER), cp.uint16),
        )
        for _ in range(LINKS)
    ]  # fmt: skip

    def route(link: int) -> None:
        moe_small_t.launch_router(
            kernels, layers[link], xs[link], norm, spaces[link], stream=stream.ptr, is_chained=True
        )

    def experts(link: int) -> None:
        moe_small_t.launch_experts(
            kernels, layers[link], xs[link], y, spaces[link], square_sums=y_sums,
            stream=stream.ptr, is_chained=True,
        )  # fmt: skip

    def whole(link: int) -> None:
        route(link)
        experts(link)

    for link in range(LINKS):
        whole(link)
    stream.synchronize()
    distinct = float(np.mean([_distinct(cp.asnumpy(space.logits)) for space in spaces]))
    layer = layers[0]
    expert_bytes = layer.gate_up.layout.image_bytes + layer.down.layout.image_bytes
    num_bytes = (distinct + 1) * expert_bytes + layer.router.plan.layout.image_bytes
    fmt = layer.gate_up.layout.format.value
    rows = []
    for name, enqueue, floor_bytes in (
        ("layer", whole, num_bytes),
        ("router", route, layer.router.plan.layout.image_bytes),
        ("experts", experts, (distinct + 1) * expert_bytes),
    ):
        timing = time_chain(cp, stream, enqueue, items=LINKS)
        floor = floor_bytes / read_rate * 1e6
        case = f"{name} {fmt} T={tokens}"
        print(
            f"{case:26s} {timing.median_us:8.2f} us  floor {floor:8.2f}"
            f"  {floor / timing.median_us:5.0%}  spread {timing.spread:.0%}"
        )
        rows.append({
            "case": case, "us": timing.median_us, "floor_us": floor, "spread": timing.spread,
            "distinct_experts": distinct,
        })  # fmt: skip
    return rows


def _measure_many(
    kernels: KernelLibrary, stream: Any, layer: MoeWeights, tokens: int, read_rate: float
) -> list[dict[str, Any]]:
    """Everything behind the router's product, by step; the floor of products is the larger of
    model FLOP at 790 TFLOP/s and bytes of the experts in use."""
    pairs_count = tokens * EXPERTS_PER_TOKEN
    x = cp.asarray(_random_bf16((tokens, HIDDEN), 1))
    logits = cp.random.standard_normal((tokens, EXPERTS), dtype=cp.float32)
    ids = cp.empty((tokens, EXPERTS_PER_TOKEN), cp.int32)
    weights = cp.empty((tokens, EXPERTS_PER_TOKEN), cp.float32)
    gates = cp.empty(tokens, cp.float32)
    pairs = SortedPairs(
        cp.empty(pairs_count, cp.int32), cp.empty(pairs_count, cp.int32),
        cp.empty(EXPERTS + 1, cp.int32),
        cp.empty((moe_pairs.max_tiles(pairs_count, EXPERTS), 2), cp.int32),
        cp.empty(1, cp.int32), cp.empty(moe_pairs.num_counts(pairs_count, EXPERTS), cp.int32),
    )  # fmt: skip
    inner = cp.empty((pairs_count, INNER), cp.uint16)
    routed = cp.empty((pairs_count, HIDDEN), cp.uint16)
    shared, y = cp.zeros((tokens, HIDDEN), cp.uint16), cp.empty((tokens, HIDDEN), cp.uint16)
    ptr = stream.ptr
    gate = None if layer.shared_gate is None else SharedGate(x, layer.shared_gate, gates)

    def sort(_link: int) -> None:
        moe_router.launch(
            kernels, logits, ids, weights, renormalise=True, shared=gate, stream=ptr,
            is_chained=True,
        )  # fmt: skip
        moe_pairs.launch(kernels, ids, pairs, EXPERTS, stream=ptr, is_chained=True)

    def gate_up(_link: int) -> None:
        moe_grouped.launch(
            kernels, layer.gate_up, pairs, x, inner, is_gated=True, stream=ptr, is_chained=True
        )

    def down(_link: int) -> None:
        moe_grouped.launch(
            kernels, layer.down, pairs, inner, routed, is_gated=False, stream=ptr, is_chained=True
        )

    def gate_up_portable(_link: int) -> None:
        moe_grouped.launch(
            kernels, layer.gate_up, pairs, x, inner, is_gated=True, stream=ptr, is_chained=True,
            is_portable=True,
        )  # fmt: skip

    def combine(_link: int) -> None:
        moe_combine.launch(
            kernels, routed, weights, x, y, positions=pairs.positions,
            shared=SharedOutput(shared, gates), stream=ptr, is_chained=True,
        )  # fmt: skip

    steps = {
        "sort": sort, "gate_up": gate_up, "down": down, "combine": combine,
        "gate_up portable": gate_up_portable,
    }  # fmt: skip
    for step in steps.values():
        step(0)
    stream.synchronize()
    in_use = int(np.count_nonzero(np.diff(cp.asnumpy(pairs.offsets))))
    rows = []
    for name, step in steps.items():
        timing = time_chain(cp, stream, step, items=4)
        matrix = {"gate_up": layer.gate_up, "down": layer.down}.get(name.split()[0])
        flop = bytes_read = 0
        if matrix is not None:
            flop = 2 * pairs_count * matrix.layout.rows * matrix.layout.columns
            bytes_read = in_use * matrix.layout.image_bytes
        floor = max(flop / 790e12, bytes_read / read_rate) * 1e6
        case = f"{name} {layer.gate_up.layout.format.value} T={tokens}"
        print(
            f"{case:26s} {timing.median_us:8.1f} us  floor {floor:8.1f}"
            f"  {flop / timing.median_us * 1e-6:6.0f} TFLOP/s"
        )
        rows.append({
            "case": case, "us": timing.median_us, "floor_us": floor, "spread": timing.spread,
            "flop": flop, "experts_in_use": in_use,
        })  # fmt: skip
    return rows


def _distinct(logits: Any) -> int:
    ids, _ = moe_router.reference(logits, experts_per_token=EXPERTS_PER_TOKEN, renormalise=True)
    return int(np.unique(ids).size)


if __name__ == "__main__":
    main()
