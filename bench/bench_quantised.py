"""Checkpoints that are quantised already: how fast their codes reach the device, and decode steps.

    python -m bench.bench_quantised --out DIR [--synthetic qwen3.5-27b] [--layouts NAME,NAME]

Made-up codes and scales of a model's real shapes, as `open_model` would give them:

    fp8         blocks of 128 x 128; b and a of DeltaNet layers in BF16, as Qwen releases have them
    fp8-whole   the same with b and a in blocks too, so that no object has parts of two formats
    mixed       NVFP4 in the MLPs, FP8 with a scale a row elsewhere; b and a in BF16
    nvfp4       NVFP4 everywhere; b and a in BF16

The difference of the first two is what a second product a DeltaNet layer costs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cupy
import numpy as np

from bench.common.record import environment, write_record
from ninfer.contract.model import ModelConfig, ModelObject
from ninfer.contract.weights import EncodedBand, WeightBand, WeightEncoding, band_shapes
from ninfer.models.parameters import model_objects
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.options import EngineOptions
from ninfer.program.benchmark import BenchCase, ModelBenchmark
from ninfer.program.cuda_loader import build_cuda, open_device
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.read_rate import measure_read_rate

OPTIONS: Final = EngineOptions(
    executor="cuda", max_concurrency=8, max_context=2048, prefill_chunk=1024
)
_CASES: Final = (BenchCase(1024, 1, 64), BenchCase(1024, 8, 64))
_PLAIN: Final = ("embed_tokens", "lm_head", "router", "shared_gate", "conv", "in_b", "in_a")
_SCALE: Final = 1e-3
_PATTERN_VALUES: Final = 1 << 24
_PATTERN_BYTE: Final = 0x3C
"""Twice this is 0.0115 in bf16."""

Encode = Callable[[str], WeightEncoding]
LAYOUTS: Final[dict[str, Encode]] = {
    "fp8": lambda part: WeightEncoding.FP8_BLOCK,
    "fp8-whole": lambda part: WeightEncoding.FP8_BLOCK,
    "mixed": lambda part: (
        WeightEncoding.NVFP4 if ".mlp." in part or ".moe." in part else WeightEncoding.FP8_ROW
    ),
    "nvfp4": lambda part: WeightEncoding.NVFP4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--synthetic", choices=SYNTHETIC_MODELS, default="qwen3.5-27b")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    arguments = parser.parse_args()
    config = SYNTHETIC_MODELS[arguments.synthetic]
    # Once, on a device that holds nothing else: between models it reads 10 % lower.
    driver = open_device(OPTIONS)
    read_rate = measure_read_rate(driver)
    driver.close()
    rows: list[dict[str, Any]] = []
    for layout in arguments.layouts.split(","):
        rows += measure(config, layout, read_rate)
    write_record(
        arguments.out / "quantised.json",
        {**environment(cupy), "model": arguments.synthetic, "rows": rows},
    )


def measure(config: ModelConfig, layout: str, read_rate: float) -> list[dict[str, Any]]:
    driver = open_device(OPTIONS)
    bands = {item.name: bands_of(item, layout) for item in model_objects(config)}
    load_s, num_bytes = 0.0, 0

    def fill(store: WeightStore) -> None:
        nonlocal load_s, num_bytes
        made: dict[tuple[Any, ...], EncodedBand] = {}
        pattern = DeviceTensor.dense(
            driver.allocate(2 * _PATTERN_VALUES), (_PATTERN_VALUES,), "uint16"
        )
        driver.fill(pattern.address, _PATTERN_BYTE, pattern.num_bytes)
        for item in model_objects(config):
            if item.component != "text":
                continue
            if item.name not in store.encoded and len(item.shape) == 1:
                store.put(item.name, np.full(item.shape, 0.01, np.float32))
                continue
            if item.name not in store.encoded:
                store.put_pattern(item.name, pattern)
                continue
            parts = tuple(made_up(item, band, made) for band in bands[item.name])
            started = time.perf_counter()
            store.put_bands(item.name, parts)
            load_s += time.perf_counter() - started
            num_bytes += sum(part.codes.nbytes for part in parts)
        driver.synchronize()
        driver.release(pattern.address)

    built = build_cuda(config, driver, OPTIONS, fill, bands=bands)
    benchmark = ModelBenchmark(
        config, built.executor, built.plan.memory.capacity, built.plan.weights,
        kv_dtype=OPTIONS.kv_dtype, read_rate=read_rate,
    )  # fmt: skip
    rows = []
    try:
        for case in _CASES:
            figures = asyncio.run(benchmark.run(case))
            row = {
                "layout": layout,
                "weights": built.plan.weight_format,
                "weights_bytes": built.plan.weights.num_bytes,
                "code_bytes_s": num_bytes / load_s,
                "read_rate": read_rate,
                **dataclasses.asdict(figures),
            }
            print(
                f"{layout:10} {row['weights']:10} batch {case.batch}:"
                f" step {figures.step_s.median * 1e6:7.0f} us, {figures.fraction:6.1%} of the floor"
                f" (device {figures.device_fraction:6.1%}), {figures.kernels_a_step} kernels,"
                f" prefill {figures.prefill_tokens_s:7.0f} tokens/s,"
                f" codes {num_bytes / load_s / 1e9:.1f} GB/s",
                flush=True,
            )
            rows.append(row)
    finally:
        built.executor.close()
    return rows


def bands_of(item: ModelObject, layout: str) -> tuple[WeightBand, ...]:
    return tuple(
        WeightBand(encoding_of(part.name, part.shape, layout), part.shape[-2])
        if len(part.shape) > 1
        else WeightBand(WeightEncoding.FLOAT, part.shape[0])
        for part in item.parts
    )


def encoding_of(part: str, shape: tuple[int, ...], layout: str) -> WeightEncoding:
    leaf = part.rpartition(".")[2]
    plain = [name for name in _PLAIN if layout != "fp8-whole" or not name.startswith("in_")]
    if len(shape) < 2 or leaf in plain or part.startswith("mtp"):
        return WeightEncoding.FLOAT
    return LAYOUTS[layout](part)


def made_up(
    item: ModelObject, band: WeightBand, made: dict[tuple[Any, ...], EncodedBand]
) -> EncodedBand:
    """Codes at random; bands of one kind and shape are the same arrays."""
    experts, columns = item.shape[:-2], item.shape[-1]
    key = (band, experts, columns)
    if key in made:
        return made[key]
    rng = np.random.default_rng(len(made))
    shapes = band_shapes(band.encoding, band.num_rows, columns)
    arrays: dict[str, Any] = {}
    for field, shape in shapes.items():
        whole = (*experts, *shape)
        if band.encoding is WeightEncoding.FLOAT:
            arrays[field] = np.full(whole, 0.01, np.float32)
        elif field == "codes" and band.encoding is WeightEncoding.NVFP4:
            arrays[field] = rng.integers(0, 256, whole, np.uint8)
        elif field == "codes":
            signs = rng.integers(0, 2, whole, np.uint8) << np.uint8(7)
            arrays[field] = rng.integers(0x20, 0x48, whole, np.uint8) | signs
        elif field == "scales" and band.encoding is WeightEncoding.NVFP4:
            arrays[field] = rng.integers(0x30, 0x40, whole, np.uint8)
        else:
            arrays[field] = np.full(whole, _SCALE, np.float32)
    made[key] = EncodedBand(band.encoding, **arrays)
    return made[key]


if __name__ == "__main__":
    main()
