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
from ninfer.ops import moe_router, rotary
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu_batch import prefill_batch
from ninfer.program.executors.cpu_model import CpuModel
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_model import CudaModel
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers import executor_driver as driver


@dataclass(eq=False)
class ExpertLog:
    """`parts` of each layer with experts, in order: expert ids [t, k] of one unit after another."""

    parts: list[list[NDArray[np.int32]]] = field(default_factory=list)

    def choices(self) -> NDArray[np.int32]:
        """[layers, n, k] of all inputs since the log began."""
        return np.array([np.concatenate(layer) for layer in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class LedRun:
    """Logits [n, V] of the float32 model with given experts.

    lags   [n] over all layers, the most by which the best router logit of an expert that was left
           out exceeds the worst of one that was taken; not above 0 where the choice was the model's
    """

    logits: Float32Array
    lags: NDArray[np.float64]


@contextmanager
def watched_experts(executor: CudaExecutor, config: ModelConfig) -> Iterator[ExpertLog]:
    """While it is open, what every layer of every unit chose. Units of one row, that is prompts."""
    log = ExpertLog()
    layers = [layer.index for layer in config.layers if layer.mlp is MlpKind.MOE]
    queue_layers = CudaModel.queue_layers

    def watch(model: CudaModel, unit: UnitTensors, hidden: DeviceTensor) -> Iterator[None]:
        for block, _ in enumerate(queue_layers(model, unit, hidden)):
            if block % 2 == 1 and block // 2 in layers:
                place = layers.index(block // 2)
                log.parts[place].append(_read_experts(executor, config, unit.num_tokens))
            yield

    log.parts.extend([] for _ in layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaModel, "queue_layers", watch)
        yield log


def run_with_experts(
    source: ModelSource, prompt: Sequence[int], choices: NDArray[np.int32]
) -> LedRun:
    """The float32 model over a prompt, taking `choices` [layers, n, k] in place of its own."""
    lags = np.full(len(prompt), -np.inf)
    layers = iter(choices)

    def lead(
        logits: NDArray[Any], *, experts_per_token: int, renormalise: bool
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        taken = next(layers).astype(np.int64)
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
    return LedRun(model.logits(hidden, batch.project).astype(np.float32), lags)


def _read_experts(
    executor: CudaExecutor, config: ModelConfig, num_tokens: int
) -> NDArray[np.int32]:
    buffers, moe = executor.workspace.buffers.moe, config.moe
    assert buffers is not None
    assert moe is not None
    assert num_tokens <= buffers.block_tokens, "only the last block's experts are there"
    ids = np.empty((num_tokens, moe.experts_per_token), np.int32)
    executor.driver.download(ids, buffers.expert_ids.address)
    executor.driver.synchronize()
    return ids
