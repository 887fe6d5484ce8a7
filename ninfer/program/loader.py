"""From an opened model to a Program: plan, read the weights, build the executor.

The plan comes before the first byte is read, so what cannot fit fails at once. A failure later on
leaves nothing half-loaded behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError, OptionError
from ninfer.contract.model import ModelConfig, ModelObject, ModelSource
from ninfer.contract.units import Capacity, Executor, MemoryPlan
from ninfer.options import EngineOptions, flag_of
from ninfer.program import host_cpus, host_memory, memory_costs
from ninfer.program.planner import plan_memory
from ninfer.program.program import ModelProgram


def load_program(
    source: ModelSource, options: EngineOptions, progress: Callable[[str, int, int], None]
) -> tuple[ModelProgram, MemoryPlan]:
    """Load the text component; may run in a thread.

    `progress(stage, done_bytes, total_bytes)` is called with stage "weights", first with nothing
    done and after each object. Raises OptionError (executor, memory, context) and ModelFileError.
    """
    plan = plan_model(source, options)
    weights: dict[str, Float32Array] = {}
    with ExitStack() as undo:
        undo.callback(weights.clear)
        try:
            _read_weights(source, weights, progress)
            executor = _cpu_executor(source.config, weights, plan.capacity, options)
        except MemoryError as error:
            raise OptionError(
                flag_of("memory_budget"),
                f"the system gives less memory than the plan's {plan.total_bytes:,} bytes",
            ) from error
        undo.callback(executor.close)
        program = ModelProgram(source.config, executor, plan.capacity)
        undo.pop_all()
    return program, plan


def plan_model(source: ModelSource, options: EngineOptions) -> MemoryPlan:
    """The plan `load_program` would follow now, without reading a weight. Raises OptionError."""
    if options.executor == "cuda":
        raise OptionError(flag_of("executor"), "this build has no CUDA executor yet")
    available = host_memory.available_bytes()
    if available is None:
        available = options.memory_budget
    if available is None:
        raise OptionError(
            flag_of("memory_budget"), "needed here: the system does not say what memory is free"
        )
    return plan_memory(
        source.config,
        options,
        weights_bytes=memory_costs.weights_bytes_of(source.objects),
        available_bytes=available,
    )


def _read_weights(
    source: ModelSource,
    weights: dict[str, Float32Array],
    progress: Callable[[str, int, int], None],
) -> None:
    missing = {item.name: item for item in source.objects if item.component == "text"}
    done, total = 0, memory_costs.weights_bytes_of(source.objects)
    progress("weights", done, total)
    for item, array in source.read_float32():
        _check_object(missing.pop(item.name, None), item, array)
        weights[item.name] = array
        done += array.nbytes
        progress("weights", done, total)
    if missing:
        raise InvariantError(f"{source.path}: {', '.join(missing)} were not read")


def _check_object(expected: ModelObject | None, item: ModelObject, array: Float32Array) -> None:
    if expected is None:
        raise InvariantError(f"{item.name} was read twice or is not an object of the model")
    if array.shape != expected.shape or array.dtype != np.float32:
        raise InvariantError(
            f"{item.name} was read as {array.dtype} {array.shape}, not float32 {expected.shape}"
        )


def _cpu_executor(
    config: ModelConfig,
    weights: Mapping[str, Float32Array],
    capacity: Capacity,
    options: EngineOptions,
) -> Executor:
    from ninfer.program.executors.cpu import CpuExecutor

    num_threads = options.cpu_threads or host_cpus.default_threads(host_cpus.usable_cpus())
    return CpuExecutor(config, weights, capacity, num_threads=num_threads)
