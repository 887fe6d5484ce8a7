"""The experts a mixture-of-experts model took on the device, and the float32 model led by them.

Rounding to bf16 moves router logits a little, so where two experts are close either may be taken.
What follows then is another model run, not an error: it is compared with the float32 model that is
made to take the same experts, and how much worse these are by its own router is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.model import MlpKind, ModelConfig, ModelSource
from ninfer.contract.units import UnitRow
from ninfer.ops import moe_router, rotary
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu_batch import prefill_batch
from ninfer.program.executors.cpu_model import CpuModel
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_model import CudaModel
from ninfer.program.executors.cuda_small_units import SmallUnits
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers import executor_driver as driver


@dataclass(eq=False)
class RouterLog:
    """`parts` of each layer with experts, in order: router logits [t, E] of unit after unit."""

    experts_per_token: int
    parts: list[list[Float32Array]] = field(default_factory=list)

    def logits(self) -> Float32Array:
        """[layers, n, E] of all inputs since the log began."""
        return np.array([np.concatenate(layer) for layer in self.parts])

    def choices(self) -> NDArray[np.int64]:
        """Experts [layers, n, k], as the router chooses them."""
        best_first = np.argsort(-self.logits(), axis=-1, kind="stable")
        return best_first[..., : self.experts_per_token]


@dataclass(frozen=True, slots=True, eq=False)
class LedRun:
    """Logits [n, V] of the float32 model with given experts.

    router_logits   [layers, n, E]
    lags   [n] over all layers, the most by which the best router logit of an expert that was left
           out exceeds the worst of one that was taken; not above 0 where the choice was the model's
    """

    logits: Float32Array
    router_logits: Float32Array
    lags: NDArray[np.float64]


@contextmanager
def watched_router(executor: CudaExecutor, config: ModelConfig) -> Iterator[RouterLog]:
    """While it is open, what every router of every unit said. Units of one row, that is prompts;
    those of few inputs run kernel by kernel, which leaves the bits of their graphs."""
    log = RouterLog(0 if config.moe is None else config.moe.experts_per_token)
    layers = [layer.index for layer in config.layers if layer.mlp is MlpKind.MOE]
    queue_layers = CudaModel.queue_layers
    num_inputs: list[int] = []

    def run_small(units: SmallUnits, row: UnitRow) -> tuple[UnitTensors, DeviceTensor]:
        num_inputs.append(row.token_ids.size)
        try:
            width = units.queue_inputs(row)
            return units.tensors(width), units.queue_unit(width)
        finally:
            num_inputs.pop()

    def watch(model: CudaModel, unit: UnitTensors, hidden: DeviceTensor) -> Iterator[None]:
        for block, _ in enumerate(queue_layers(model, unit, hidden)):
            if block % 2 == 1 and block // 2 in layers:
                place = layers.index(block // 2)
                count = num_inputs[-1] if num_inputs else unit.num_tokens
                log.parts[place].append(_read_logits(executor, count))
            yield

    log.parts.extend([] for _ in layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaModel, "queue_layers", watch)
        patch.setattr(SmallUnits, "queue", run_small)
        yield log


def run_with_experts(
    source: ModelSource, prompt: Sequence[int], choices: NDArray[np.int64]
) -> LedRun:
    """The float32 model over a prompt, taking `choices` [layers, n, k] in place of its own."""
    lags = np.full(len(prompt), -np.inf)
    said: list[NDArray[Any]] = []
    layers = iter(choices)

    def lead(
        logits: NDArray[Any], *, experts_per_token: int, renormalise: bool
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        taken = next(layers)
        said.append(logits.copy())
        is_taken = np.zeros(logits.shape, bool)
        np.put_along_axis(is_taken, taken, True, axis=1)
        assert (is_taken.sum(axis=1) == experts_per_token).all()
        worst = np.where(is_taken, logits, np.inf).min(axis=1)
        best = np.where(is_taken, -np.inf, logits).max(axis=1)
        np.maximum(lags, best - worst, out=lags)
        # Among all experts the router's own weights; then those of the taken ones.
        order, ordered = choose(logits, experts_per_token=logits.shape[1], renormalise=False)
        weights = np.empty_like(ordered)
        np.put_along_axis(weights, order, ordered, axis=1)
        weights = np.take_along_axis(weights, taken, axis=1)
        if renormalise:
            weights /= weights.sum(axis=1, keepdims=True)
        return taken, weights

    weights = {item.name: array for item, array in source.read_float32()}
    model = CpuModel(
        source.config, weights, cpu_memory.allocate(source.config, driver.default_capacity())
    )
    frequencies = rotary.frequencies(source.config.attention.rope)
    row = driver.sequence().row(prompt, samples=False)
    batch = prefill_batch(row, 0, len(prompt), frequencies)
    choose = moe_router.reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_router, "reference", lead)
        *_, hidden = model.hidden_states(batch)
    scores = model.head(model.final_norm(hidden), batch.project).astype(np.float32)
    return LedRun(scores, np.array(said, np.float32), lags)


def _read_logits(executor: CudaExecutor, num_tokens: int) -> Float32Array:
    buffers = executor.workspace.buffers.moe
    assert buffers is not None
    source = buffers.logits.rows(0, num_tokens)
    assert source.is_dense
    logits = np.empty(source.shape, np.float32)
    executor.driver.download(logits, source.address)
    executor.driver.synchronize()
    return logits
