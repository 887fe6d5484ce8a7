"""From an opened model to a CudaExecutor: weight format, plan, weights, workspace, graphs.

The weights come first and are quantised one by one through staging memory, which is given back
before the workspace is taken. Codes of a quantised checkpoint are kept as they are; what cannot be
kept is decoded to bf16, never quantised a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ninfer.contract.arrays import ByteArray
from ninfer.contract.errors import OpContractError, OptionError
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.units import MemoryPlan
from ninfer.contract.weights import WeightBand, WeightEncoding
from ninfer.kernels.library import DeviceLimits
from ninfer.options import EngineOptions, flag_of
from ninfer.program import host_memory
from ninfer.program.cuda_costs import CudaCosts
from ninfer.program.dflash_loading import DflashDraft, with_draft_tokens
from ninfer.program.draft_choice import components_of
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_device import CudaDevice
from ninfer.program.executors.cuda_dflash_weights import PREFIX, with_dflash
from ninfer.program.executors.cuda_dflash_weights import unsupported_reason as unsupported_dflash
from ninfer.program.executors.cuda_draft_head import with_draft_head
from ninfer.program.executors.cuda_driver import CudaDriver, HostArray
from ninfer.program.executors.cuda_support import unsupported_reason
from ninfer.program.executors.cuda_tensor import Arena
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.cuda_weights import (
    WEIGHT_FORMATS,
    DeviceWeights,
    WeightPlan,
    plan_weights,
)
from ninfer.program.executors.cuda_workspace import Workspace, carve_workspace
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.memory_costs import weights_bytes_of
from ninfer.program.planner import plan_memory
from ninfer.program.read_ahead import read_ahead
from ninfer.program.touched_memory import touched_memory
from ninfer.program.weight_reader import read_bands

LoadProgress = Callable[[str, int, int], None]
Bands = Mapping[str, tuple[WeightBand, ...]]
"""How the rows of every object are stored, by its name."""
WeightFill = Callable[[WeightStore], None]
"""Puts every weight into the store."""

_AUTO_FORMATS: Final = ("bf16", "fp8", "nvfp4")
_USEFUL_CONTEXT_TOKENS: Final = 16_384
_FORMAT_OF_CODES: Final = MappingProxyType(
    {
        WeightEncoding.FP8_ROW: "fp8",
        WeightEncoding.FP8_BLOCK: "fp8",
        WeightEncoding.NVFP4: "nvfp4",
    }
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """How a model lies on a device. `weight_format` as in `--weights`, never auto; of a checkpoint
    whose codes are kept, all their formats (`fp8+nvfp4`)."""

    weight_format: str
    weights: WeightPlan
    memory: MemoryPlan
    kv_dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class BuiltExecutor:
    executor: CudaExecutor
    plan: CudaPlan


def load_cuda(
    source: ModelSource,
    options: EngineOptions,
    progress: LoadProgress,
    draft: DflashDraft | None = None,
) -> BuiltExecutor:
    """Raises OptionError, ModelFileError and DeviceError; nothing stays behind then."""
    components = components_of(source.config, options)
    fill = source_fill(source, progress, components)
    if draft is not None:
        fill = _fill_behind(source, components, draft, progress)
        options = with_draft_tokens(options, draft)
    built = build_cuda(
        source.config,
        open_device(options),
        options,
        fill,
        bands=source.bands,
        dflash=None if draft is None else draft.setup,
    )
    for name, reason in built.plan.weights.decoded.items():
        _logger.info("%s: %s is decoded to bf16: %s", source.path, name, reason)
    return built


def plan_cuda(
    source: ModelSource, options: EngineOptions, draft: DflashDraft | None = None
) -> MemoryPlan:
    """The plan `load_cuda` would follow now. Raises OptionError and DeviceError."""
    if draft is not None:
        options = with_draft_tokens(options, draft)
    setup = None if draft is None else draft.setup
    device = open_device(options)
    try:
        plan = plan_on(source.config, device, options, bands=source.bands, dflash=setup)
        return plan.memory
    finally:
        device.close()


def open_device(options: EngineOptions) -> CudaDevice:
    """Raises DeviceError."""
    cubin_dir = None if options.kernels is None else Path(options.kernels)
    return CudaDevice(options.device, cubin_dir=cubin_dir)


def source_fill(
    source: ModelSource, progress: LoadProgress, components: Sequence[str] = ("text",)
) -> WeightFill:
    """The weights of `source`, read one by one, the next while one is put."""

    def fill(store: WeightStore) -> None:
        for name, bands in read_ahead(read_bands(source, store.encoded, progress, components)):
            if name in store.encoded:
                store.put_bands(name, bands)
            else:
                store.put(name, bands[0].codes)

    return fill


def _fill_behind(
    source: ModelSource, components: Sequence[str], draft: DflashDraft, progress: LoadProgress
) -> WeightFill:
    """The weights of `source`, then those of its draft model."""
    fill_target = source_fill(source, draft.behind(progress), components)
    done_bytes = weights_bytes_of(source.objects, components)

    def fill(store: WeightStore) -> None:
        fill_target(store)
        for name, weight in read_ahead(draft.read(progress, done_bytes)):
            store.put(PREFIX + name, weight)

    return fill


def build_cuda(
    config: ModelConfig,
    driver: CudaDriver,
    options: EngineOptions,
    fill: WeightFill,
    *,
    bands: Bands | None = None,
    dflash: DflashSetup | None = None,
) -> BuiltExecutor:
    """An executor on `driver`, which it owns; on an error the driver is closed. `dflash` is a draft
    model whose weights `fill` puts too."""
    with ExitStack() as undo:
        undo.callback(driver.close)
        plan = plan_on(config, driver, options, bands=bands, dflash=dflash)
        with ThreadPoolExecutor(1, thread_name_prefix="ninfer-touch-memory") as beside:
            # Getting memory from the system takes seconds; reading weights does, too.
            touching = beside.submit(touched_memory, plan.memory.host_bytes)
            weights, workspace = _fill_device(config, driver, plan, fill)
            host_blocks = _lock_host_blocks(driver, plan, touching)
        executor = CudaExecutor(
            config, plan.memory.capacity, driver, weights, workspace, host_blocks, dflash=dflash
        )
        undo.pop_all()
    return BuiltExecutor(executor, plan)


def _lock_host_blocks(driver: CudaDriver, plan: CudaPlan, touching: Future[ByteArray]) -> HostArray:
    """The host tier, page-locked. Raises OptionError."""
    try:
        return driver.lock(touching.result())
    except MemoryError as error:
        raise OptionError(
            flag_of("host_cache_bytes"),
            f"the system locks less memory than {plan.memory.host_bytes:,} bytes: {error}",
        ) from error


def _fill_device(
    config: ModelConfig, driver: CudaDriver, plan: CudaPlan, fill: WeightFill
) -> tuple[DeviceWeights, Workspace]:
    """All memory of the device. Raises OptionError."""
    try:
        return _load_weights(driver, plan, fill), _make_workspace(config, driver, plan)
    except MemoryError as error:
        raise OptionError(
            flag_of("memory_budget"),
            f"the device gives less memory than the plan's {plan.memory.total_bytes:,} bytes:"
            f" {error}",
        ) from error


def plan_on(
    config: ModelConfig,
    driver: CudaDriver,
    options: EngineOptions,
    *,
    bands: Bands | None = None,
    dflash: DflashSetup | None = None,
) -> CudaPlan:
    """The plan for what is free on the device now. Raises OptionError.

    `--weights auto` keeps the codes of a quantised checkpoint; of others it takes the widest format
    that leaves room for a useful context.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise OptionError(flag_of("executor"), f"cuda cannot run this model: {reason}; cpu can")
    if dflash is not None:
        _check_draft(dflash)
    free_bytes, _ = driver.memory_info()
    limits = driver.kernels.limits
    plan_format = partial(_plan_format, config, limits, options, dflash)
    codes = _formats_of_codes(bands or {})
    if bands is not None and codes and options.weights != "bf16":
        _check_format_of_codes(options.weights, codes)
        name = "+".join(codes)
        return plan_format(name, free_bytes, bands=bands)
    if options.weights != "auto":
        return plan_format(options.weights, free_bytes)
    useful = min(_USEFUL_CONTEXT_TOKENS, config.max_position_embeddings)
    for name in _AUTO_FORMATS[:-1]:
        try:
            plan = plan_format(name, free_bytes)
        except OptionError:
            continue
        if options.max_context is not None or plan.memory.capacity.max_context >= useful:
            return plan
    return plan_format(_AUTO_FORMATS[-1], free_bytes)


def _check_draft(dflash: DflashSetup) -> None:
    reason = unsupported_dflash(dflash.config)
    if reason is not None:
        raise OptionError(
            flag_of("draft_model"), f"cuda cannot run this draft model: {reason}; cpu can"
        )


def _formats_of_codes(bands: Bands) -> tuple[str, ...]:
    """The formats of the codes there are, as in `--weights`."""
    found = {
        _FORMAT_OF_CODES[band.encoding]
        for parts in bands.values()
        for band in parts
        if band.encoding is not WeightEncoding.FLOAT
    }
    return tuple(sorted(found))


def _check_format_of_codes(wanted: str, codes: tuple[str, ...]) -> None:
    """Codes are kept or decoded, never quantised a second time."""
    if wanted != "auto" and codes != (wanted,):
        raise OptionError(
            flag_of("weights"),
            f"{wanted} is not what the checkpoint holds ({' and '.join(codes)}): auto keeps its"
            " codes, bf16 decodes them",
        )


def _plan_format(
    config: ModelConfig,
    limits: DeviceLimits,
    options: EngineOptions,
    dflash: DflashSetup | None,
    name: str,
    free_bytes: int,
    *,
    bands: Bands | None = None,
) -> CudaPlan:
    """`bands` of a checkpoint whose codes are kept; what it has left plain stays bf16."""
    components = components_of(config, options)
    try:
        if bands is None:
            weights = plan_weights(config, WEIGHT_FORMATS[name], components=components)
        else:
            weights = plan_weights(config, WEIGHT_FORMATS["bf16"], bands, components=components)
        if dflash is not None:
            weights = with_dflash(weights, dflash)
    except OpContractError as error:
        raise OptionError(flag_of("weights"), f"{name} does not fit this model: {error}") from error
    if "mtp" in components or (dflash is not None and not dflash.has_head):
        weights = with_draft_head(config, weights)
    costs = CudaCosts(config, weights, limits, options.kv_dtype)
    memory = plan_memory(
        config,
        options,
        weights_bytes=weights.num_bytes,
        available_bytes=free_bytes,
        host_bytes=host_memory.available_bytes() or 0,
        costs=costs,
    )
    return CudaPlan(name, weights, memory, options.kv_dtype)


def _load_weights(driver: CudaDriver, plan: CudaPlan, fill: WeightFill) -> DeviceWeights:
    size = plan.weights.num_bytes
    store = WeightStore(driver, plan.weights, Arena(driver.allocate(size), size))
    fill(store)
    return store.finish()


def _make_workspace(config: ModelConfig, driver: CudaDriver, plan: CudaPlan) -> Workspace:
    memory = plan.memory
    size = memory.kv_bytes + memory.state_bytes + memory.workspace_bytes
    tensors = carve_workspace(
        Arena(driver.allocate(size), size),
        config,
        plan.weights,
        memory.capacity,
        driver.kernels.limits,
        kv_dtype=plan.kv_dtype,
    )
    return Workspace(driver, tensors, config)
