"""Benchmarks of a model's own weights or of made-up ones, ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.units import MemoryPlan
from ninfer.models.dflash_parameters import dflash_objects
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.models.synthetic_drafts import NUM_TOKEN_IDS, SYNTHETIC_DRAFTS
from ninfer.options import EngineOptions, flag_of
from ninfer.program.benchmark import ModelBenchmark
from ninfer.program.cuda_loader import Bands, WeightFill, build_cuda, open_device, source_fill
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_device import unusable_reason
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.read_rate import measure_read_rate
from ninfer.program.synthetic_weights import fill_synthetic


@dataclass(frozen=True, slots=True, eq=False)
class BenchSetup:
    """An executor, what it runs and on what. `start_s` is from the open device to ready graphs."""

    name: str
    device_name: str
    weight_format: str
    kv_dtype: str
    read_rate: float
    start_s: float
    plan: MemoryPlan
    executor: CudaExecutor
    benchmark: ModelBenchmark


def open_benchmark(
    source: ModelSource, options: EngineOptions, progress: Callable[[str, int, int], None]
) -> BenchSetup:
    """A model's own weights. Raises OptionError, ModelFileError and DeviceError."""
    driver = _open(options)
    fill = source_fill(source, progress)
    return _setup(source.name, source.config, driver, options, fill, bands=source.bands)


def open_synthetic_benchmark(name: str, options: EngineOptions) -> BenchSetup:
    """Made-up weights; `name` as in SYNTHETIC_MODELS. Raises OptionError and DeviceError."""
    config = SYNTHETIC_MODELS.get(name)
    if config is None:
        raise OptionError(
            flag_of("synthetic"), f"{name!r} is not one of {', '.join(SYNTHETIC_MODELS)}"
        )
    dflash = _synthetic_dflash(name) if options.spec == "dflash" else None
    driver = _open(options)

    def fill(store: WeightStore) -> None:
        fill_synthetic(driver, config, store, dflash)

    return _setup(name, config, driver, options, fill, dflash=dflash)


def _synthetic_dflash(name: str) -> DflashSetup:
    config = SYNTHETIC_DRAFTS.get(name)
    if config is None:
        raise OptionError(
            flag_of("spec"), f"dflash is made up for {', '.join(SYNTHETIC_DRAFTS)} only"
        )
    objects = dflash_objects(config, has_embedding=False, has_head=False)
    return DflashSetup(config, objects, None, NUM_TOKEN_IDS)


def _open(options: EngineOptions) -> CudaDriver:
    reason = unusable_reason(options.device)
    if reason is not None:
        raise OptionError(flag_of("executor"), f"bench needs a GPU: {reason}")
    return open_device(options)


def _setup(
    name: str,
    config: ModelConfig,
    driver: CudaDriver,
    options: EngineOptions,
    fill: WeightFill,
    *,
    bands: Bands | None = None,
    dflash: DflashSetup | None = None,
) -> BenchSetup:
    read_rate = measure_read_rate(driver)
    started = time.perf_counter()
    built = build_cuda(config, driver, options, fill, bands=bands, dflash=dflash)
    start_s = time.perf_counter() - started
    benchmark = ModelBenchmark(
        config,
        built.executor,
        built.plan.memory.capacity,
        built.plan.weights,
        kv_dtype=options.kv_dtype,
        read_rate=read_rate,
    )
    return BenchSetup(
        name=name,
        device_name=driver.kernels.limits.name,
        weight_format=built.plan.weight_format,
        kv_dtype=options.kv_dtype,
        read_rate=read_rate,
        start_s=start_s,
        plan=built.plan.memory,
        executor=built.executor,
        benchmark=benchmark,
    )
