"""Gated DeltaNet layers of real shapes: time, floor, and fraction of the floor.

    python -m bench.ops.bench_gdn --out DIR

steps    rows of T columns, floor: states read and written once at the read-only rate R of this run;
         with outputs only: read once
fold     the states behind T columns of each row, 24 layers in one launch, floor as for steps
chunks   one prompt, floor: projection read, y written, at R; the same in other chunk shapes; each
         kernel of it alone, without a floor

Before it is timed, a layer is checked against float64 with few tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import cupy as cp
import numpy as np

from bench.common.op_bench import OpBench, random_bf16
from bench.common.record import environment, write_record
from ninfer.contract.model import GdnConfig
from ninfer.kernels.library import KernelFunction, KernelLibrary
from ninfer.ops import gdn_decode, gdn_fold, gdn_prefill
from ninfer.ops.float_codecs import bf16_to_float
from ninfer.ops.gdn_device import GdnMemory, GdnRows, GdnWeights, projection_width
from ninfer.ops.gdn_fold import FoldLayer
from ninfer.ops.gdn_prefill import ChunkShape
from tests.helpers.gdn_layer import EPS, LAYER, oracle, random_layer
from tests.helpers.tolerance import GDN_OUTPUT

CONFIGS: Final = {
    "0.8b": GdnConfig(16, 16, 128, 128, 4),
    "4b, 35b-a3b": GdnConfig(16, 32, 128, 128, 4),
    "27b": GdnConfig(16, 48, 128, 128, 4),
}
STEP_SHAPES: Final = ((1, 1), (2, 1), (4, 1), (8, 1), (32, 1), (1, 4), (1, 8), (1, 16), (8, 4))
"""(rows, columns of a row)."""
ROUND_SHAPES: Final = ((1, 2), (1, 4), (1, 6), (8, 2), (8, 4), (8, 6))
"""The same, of rows that check drafts."""
PROMPTS: Final = (512, 2048, 8192)
CHUNK_SIZES: Final = ((64, 64), (64, 32), (32, 32))
CHAIN_LAYERS: Final = 24
PREFILL_LINKS: Final = 4


class OneEntry:
    """A library of which only one entry really launches."""

    def __init__(self, kernels: KernelLibrary, entry: str) -> None:
        self._kernels, self._entry = kernels, entry
        self.limits = kernels.limits

    def function(self, name: str, entry: str) -> KernelFunction:
        function = self._kernels.function(name, entry)
        return function if entry.startswith(self._entry) else cast(KernelFunction, _Silent())


class _Silent:
    def reserve_shared(self, shared_bytes: int) -> None:
        pass

    def launch(self, *arguments: Any, **options: Any) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Weights and StateImages of layers that together outgrow the cache."""

    weights: GdnWeights
    windows: Any
    states: Any

    def memory(self, layer: int) -> GdnMemory:
        return GdnMemory(self.windows, self.states, layer % self.states.shape[1])


class Bench(OpBench):
    def steps(
        self, name: str, config: GdnConfig, rows: int, columns: int, *, keeps_state: bool = True
    ) -> dict[str, Any]:
        layers = _random_layers(config, rows)
        tokens = rows * columns
        projection = _random_projection(config, tokens)
        y = cp.empty((tokens, config.value_dim), cp.uint16)
        unit = _unit_rows(rows, columns)

        def enqueue(layer: int) -> None:
            gdn_decode.launch(
                self.kernels, config, layers.weights, layers.memory(layer), unit, projection, y,
                eps=EPS, stream=self.stream.ptr, keeps_state=keeps_state, is_chained=True,
            )  # fmt: skip

        size = (1 + keeps_state) * _state_bytes(config, rows)
        case = f"{name} steps R={rows} T={columns}" + ("" if keeps_state else " outputs only")
        return self._row(case, size, enqueue, CHAIN_LAYERS)

    def fold(self, name: str, config: GdnConfig, rows: int, columns: int) -> dict[str, Any]:
        layers = _random_layers(config, rows)
        unit, tokens = _unit_rows(rows, columns), rows * columns
        parts = [
            FoldLayer(layers.weights, _random_projection(config, tokens))
            for _ in range(CHAIN_LAYERS)
        ]
        table = cp.asarray(gdn_fold.describe(config, parts).view(np.uint8))

        def enqueue(_: int) -> None:
            gdn_fold.launch(
                self.kernels, config, table, layers.windows, layers.states, unit,
                stream=self.stream.ptr, is_chained=True,
            )  # fmt: skip

        size = 2 * CHAIN_LAYERS * _state_bytes(config, rows)
        case = f"{name} fold R={rows} T={columns} L={CHAIN_LAYERS}"
        return self._row(case, size, enqueue, PREFILL_LINKS)

    def chunks(self, name: str, config: GdnConfig, tokens: int) -> Iterator[dict[str, Any]]:
        planned = gdn_prefill.plan_chunks(config, self.kernels.limits)
        layers = _random_layers(config, 1)
        projection = _random_projection(config, tokens)
        y = cp.empty((tokens, config.value_dim), cp.uint16)
        read, write = cp.array([1], cp.int32), cp.array([2], cp.int32)

        def prepare(shape: ChunkShape, kernels: KernelLibrary) -> Callable[[int], None]:
            size = gdn_prefill.workspace_bytes(config, shape, tokens)
            workspace = cp.zeros(size, cp.uint8)

            def enqueue(layer: int) -> None:
                gdn_prefill.launch(
                    kernels, config, shape, layers.weights, layers.memory(layer), projection, y,
                    read_slots=read, write_slots=write, workspace=workspace, eps=EPS,
                    stream=self.stream.ptr, is_chained=True,
                )  # fmt: skip

            return enqueue

        title = f"{name} chunks T={tokens}"
        size = tokens * (projection_width(config) + config.value_dim) * 2
        for chunk_tokens, columns in CHUNK_SIZES:
            shape = ChunkShape(config.key_head_dim, chunk_tokens, columns)
            mark = " planned" if shape == planned else ""
            case = f"{title} {chunk_tokens}x{columns}{mark}"
            yield self._row(case, size, prepare(shape, self.kernels), PREFILL_LINKS)
        for entry in ("gdn_convolve", "gdn_transform", "gdn_chunks", "gated_rms_norm"):
            alone = cast(KernelLibrary, OneEntry(self.kernels, entry))
            median = self.time(prepare(planned, alone), PREFILL_LINKS)
            print(f"{title}: {entry:44s} {median:9.2f} us", flush=True)
            yield {"case": f"{title}: {entry}", "us": median}

    def check(self, config: GdnConfig) -> None:
        """Both forms against float64; leaves with an error when one is off."""
        layer = random_layer(config, [70], slowness=20.0)
        want = oracle(layer, in_chunks=True)
        weights = GdnWeights(
            *[cp.asarray(item) for item in (layer.conv, layer.a_log, layer.dt_bias, layer.norm)]
        )
        memory = GdnMemory(cp.asarray(layer.windows), cp.asarray(layer.states), LAYER)
        starts, read, write = (
            cp.asarray(item) for item in (layer.row_starts, layer.read_slots, layer.write_slots)
        )
        projection = cp.asarray(layer.projection)
        y = cp.empty((2, 70, config.value_dim), cp.uint16)
        shape = gdn_prefill.plan_chunks(config, self.kernels.limits)
        workspace = cp.zeros(gdn_prefill.workspace_bytes(config, shape, 70), cp.uint8)
        gdn_decode.launch(
            self.kernels, config, weights, memory, GdnRows(starts, read, write), projection, y[0],
            eps=EPS, stream=self.stream.ptr,
        )  # fmt: skip
        gdn_prefill.launch(
            self.kernels, config, shape, weights, memory, projection, y[1], read_slots=read,
            write_slots=write, workspace=workspace, eps=EPS, stream=self.stream.ptr,
        )  # fmt: skip
        self.stream.synchronize()
        for form, codes in zip(("steps", "chunks"), cp.asnumpy(y), strict=True):
            got = bf16_to_float(codes).astype(np.float64)
            error = float(np.linalg.norm(got - want.y) / np.linalg.norm(want.y))
            if not error <= GDN_OUTPUT:
                raise SystemExit(f"{form} of {config}: relative error {error}")

    def _row(
        self, case: str, size: int, enqueue: Callable[[int], None], items: int
    ) -> dict[str, Any]:
        median = self.time(enqueue, items)
        floor = size / self.read_rate * 1e6
        print(f"{case:44s} {median:9.2f} us  floor {floor:8.2f}  {floor / median:5.0%}", flush=True)
        return {"case": case, "bytes": size, "us": median, "floor_us": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = Bench()
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": list(_rows(bench))}
    write_record(arguments.out / "gdn.json", record)


def _rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for name, config in CONFIGS.items():
        bench.check(config)
        for rows, columns in STEP_SHAPES:
            yield bench.steps(name, config, rows, columns)
        for rows, columns in ROUND_SHAPES:
            yield bench.steps(name, config, rows, columns, keeps_state=False)
            yield bench.fold(name, config, rows, columns)
        for tokens in PROMPTS:
            yield from bench.chunks(name, config, tokens)
        cp.get_default_memory_pool().free_all_blocks()


def _unit_rows(rows: int, columns: int) -> GdnRows:
    """Rows without padding that read slots from 1 on and write those behind them."""
    slots = cp.arange(1, 2 * rows + 1, dtype=cp.int32)
    starts = cp.arange(0, rows * columns + 1, columns, dtype=cp.int32)
    return GdnRows(starts, slots[:rows], slots[rows:], starts[1:])


def _state_bytes(config: GdnConfig, rows: int) -> int:
    return 4 * rows * config.num_value_heads * config.key_head_dim * config.value_head_dim


def _random_layers(config: GdnConfig, rows: int) -> Layers:
    """Slots 1 .. 2 * rows, in CHAIN_LAYERS layers."""
    heads = config.num_value_heads
    weights = GdnWeights(
        random_bf16(config.conv_dim, config.conv_width),
        cp.zeros(heads, cp.float32),
        cp.zeros(heads, cp.float32),
        random_bf16(config.value_head_dim),
    )
    slots = (2 * rows + 1, CHAIN_LAYERS)
    state = (heads, config.value_head_dim, config.key_head_dim)
    windows = cp.zeros((*slots, config.conv_dim, config.conv_width - 1), cp.uint16)
    states = cp.random.standard_normal((*slots, *state), dtype=cp.float32)
    return Layers(weights, windows, states)


def _random_projection(config: GdnConfig, tokens: int) -> Any:
    return random_bf16(tokens, projection_width(config))


if __name__ == "__main__":
    main()
