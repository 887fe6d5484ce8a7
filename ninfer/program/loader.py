"""From an opened model to a Program: choose the executor, plan, read the weights, build it.

The plan comes before the first byte is read, so what cannot fit fails at once. A failure later on
leaves nothing half-loaded behind. The CUDA executor and what it needs are imported once chosen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.units import Capacity, Executor, MemoryPlan
from ninfer.options import EngineOptions, flag_of
from ninfer.program import host_cpus, host_memory, memory_costs
from ninfer.program.dflash_loading import DflashDraft, open_dflash_draft, with_draft_tokens
from ninfer.program.draft_choice import components_of, has_draft_model
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_draft import DraftModel
from ninfer.program.executors.cpu_mtp import MtpModel
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE, mtp_shape
from ninfer.program.model_fingerprint import model_fingerprint
from ninfer.program.planner import plan_memory
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskLayout, DiskStore
from ninfer.program.weight_reader import read_weights

_logger = logging.getLogger(__name__)
_GPU_SETTINGS: Final[Mapping[str, object]] = {
    item.name: item.default
    for item in dataclasses.fields(EngineOptions)
    if item.name in ("device", "weights", "kv_dtype", "kernels")
}
"""What the CPU executor cannot follow, with the values that ask for nothing."""


def load_program(
    source: ModelSource, options: EngineOptions, progress: Callable[[str, int, int], None]
) -> tuple[ModelProgram, MemoryPlan]:
    """Load the text component, and with `--spec` its MTP module or a draft model; may run in a
    thread.

    `progress(stage, done_bytes, total_bytes)` is called with stage "weights", first with nothing
    done and after each object. Raises OptionError (executor, memory, context, speculation,
    cache folder), ModelFileError and DeviceError.
    """
    draft = open_dflash_draft(source, options)
    if _takes_cuda(options):
        from ninfer.program.cuda_loader import load_cuda

        built = load_cuda(source, options, progress, draft)
        numbers = f"cuda {built.plan.weight_format} {built.plan.kv_dtype}"
        return _make_program(source, options, built.executor, built.plan.memory, numbers, draft)
    executor, plan = _load_cpu(source, options, progress, draft)
    return _make_program(source, options, executor, plan, "cpu float32", draft)


def plan_model(source: ModelSource, options: EngineOptions) -> MemoryPlan:
    """The plan `load_program` would follow now, without reading a weight. Raises OptionError,
    DeviceError, and ModelFileError for a draft model."""
    draft = open_dflash_draft(source, options)
    if _takes_cuda(options):
        from ninfer.program.cuda_loader import plan_cuda

        return plan_cuda(source, options, draft)
    return _plan_cpu(source, options, draft)


def _takes_cuda(options: EngineOptions) -> bool:
    """Raises OptionError when a GPU is asked for and none can be used, and for a setting that only
    the other executor could follow."""
    place = "on the CPU executor"
    if options.executor != "cpu":
        from ninfer.program.executors.cuda_device import unusable_reason

        reason = unusable_reason(options.device)
        if reason is None:
            if options.cpu_threads is not None:
                raise OptionError(
                    flag_of("cpu_threads"), "it is for the CPU, and here the model runs on a GPU"
                )
            return True
        if options.executor == "cuda":
            raise OptionError(flag_of("executor"), f"cuda cannot be used: {reason}")
        place = f"{place} ({reason})"
    for name, default in _GPU_SETTINGS.items():
        if getattr(options, name) != default:
            raise OptionError(flag_of(name), f"it is for a GPU, and here the model runs {place}")
    return False


def _load_cpu(
    source: ModelSource,
    options: EngineOptions,
    progress: Callable[[str, int, int], None],
    draft: DflashDraft | None,
) -> tuple[Executor, MemoryPlan]:
    plan = _plan_cpu(source, options, draft)
    components = components_of(source.config, options)
    weights: dict[str, Float32Array] = {}
    draft_model: DraftModel | None = None
    with ExitStack() as undo:
        undo.callback(weights.clear)
        try:
            target_progress = progress if draft is None else draft.behind(progress)
            for name, array in read_weights(source, target_progress, components):
                weights[name] = array
            if draft is not None:
                draft_model = draft.load(progress, plan.weights_bytes - draft.weights_bytes)
            elif options.spec == "mtp":
                draft_model = MtpModel(source.config, weights)
            executor = _cpu_executor(source.config, weights, plan.capacity, options, draft_model)
        except MemoryError as error:
            raise OptionError(
                flag_of("memory_budget"),
                f"the system gives less memory than the plan's {plan.total_bytes:,} bytes",
            ) from error
        undo.pop_all()
    return executor, plan


def _make_program(
    source: ModelSource,
    options: EngineOptions,
    executor: Executor,
    plan: MemoryPlan,
    numbers: str,
    draft: DflashDraft | None = None,
) -> tuple[ModelProgram, MemoryPlan]:
    """The Program over an executor, which it owns; on an error the executor is closed."""
    with ExitStack() as undo:
        undo.callback(executor.close)
        disk = _open_disk(source, options, executor, plan, numbers, draft)
        if disk is not None:
            undo.callback(disk.close)
        program = ModelProgram(source.config, executor, plan.capacity, disk)
        undo.pop_all()
    return program, plan


def _open_disk(
    source: ModelSource,
    options: EngineOptions,
    executor: Executor,
    plan: MemoryPlan,
    numbers: str,
    draft: DflashDraft | None,
) -> DiskStore | None:
    if options.cache_dir is None:
        return None
    if plan.capacity.num_host_blocks == 0:
        _logger.warning("cache: %s is not used without host memory", options.cache_dir)
        return None
    block_bytes = executor.page_bytes
    num_state_blocks = -(-executor.slot_bytes // block_bytes)
    try:
        if has_draft_model(options):
            numbers = f"{numbers} {options.spec}"
        if draft is not None:
            numbers = f"{numbers} {draft.fingerprint(numbers)}"
        fingerprint = model_fingerprint(source, numbers)
        layout = DiskLayout(fingerprint, block_bytes, num_state_blocks)
        return DiskStore(Path(options.cache_dir), options.cache_dir_bytes, layout)
    except OSError as error:
        raise OptionError(
            flag_of("cache_dir"), f"{options.cache_dir}: {error.strerror or error}"
        ) from error


def _plan_cpu(source: ModelSource, options: EngineOptions, draft: DflashDraft | None) -> MemoryPlan:
    available = host_memory.available_bytes()
    if available is None:
        available = options.memory_budget
    if available is None:
        raise OptionError(
            flag_of("memory_budget"), "needed here: the system does not say what memory is free"
        )
    components = components_of(source.config, options)
    weights_bytes = memory_costs.weights_bytes_of(source.objects, components)
    if draft is not None:
        options = with_draft_tokens(options, draft)
        weights_bytes += draft.weights_bytes
    return plan_memory(
        source.config,
        options,
        weights_bytes=weights_bytes,
        available_bytes=available,
        host_bytes=available,
        costs=_cpu_costs(source.config, components, draft),
    )


def _cpu_costs(
    config: ModelConfig, components: Sequence[str], draft: DflashDraft | None
) -> memory_costs.CpuCosts:
    if draft is not None:
        return draft.costs(config)
    return memory_costs.CpuCosts(
        config, mtp_shape(config) if "mtp" in components else NO_DRAFT_SHAPE
    )


def _cpu_executor(
    config: ModelConfig,
    weights: Mapping[str, Float32Array],
    capacity: Capacity,
    options: EngineOptions,
    draft_model: DraftModel | None,
) -> Executor:
    num_threads = options.cpu_threads or host_cpus.default_threads(host_cpus.usable_cpus())
    return CpuExecutor(config, weights, capacity, draft_model=draft_model, num_threads=num_threads)
