"""Bytes a decode step must move at least: weights and KV read once, states read and written.

The floor of a step is these bytes over the rate at which the device can read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.model import MlpKind, ModelConfig
from ninfer.contract.units import PAGE_TOKENS
from ninfer.program.executors import cuda_memory
from ninfer.program.executors.cuda_weights import EMBED, WeightPlan


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes of one decode step."""

    weights_bytes: int
    kv_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.state_bytes


def step_traffic(
    config: ModelConfig, weights: WeightPlan, *, kv_dtype: str, num_rows: int, context_tokens: int
) -> StepTraffic:
    """`context_tokens` a row, the new one included. Of experts, those that independent rows are
    expected to choose count."""
    page = cuda_memory.page_bytes(config, kv_dtype)
    return StepTraffic(
        weights_bytes=_weights_bytes(config, weights, num_rows),
        kv_bytes=num_rows * context_tokens * page // PAGE_TOKENS,
        state_bytes=2 * num_rows * cuda_memory.slot_bytes(config),
    )


def _weights_bytes(config: ModelConfig, weights: WeightPlan, num_rows: int) -> int:
    moe = config.moe
    share = 1.0
    if moe is not None:
        share = 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** num_rows
    total = float(num_rows * config.hidden_size * 2)
    for vector in weights.vectors:
        if vector.name != EMBED:
            total += vector.num_bytes
    for matrix in weights.matrices:
        total += matrix.num_bytes * (share if ".experts." in matrix.name else 1.0)
    return round(total)


def active_parameters(config: ModelConfig, weights: WeightPlan) -> int:
    """Parameters that a token is multiplied by, without the head: twice that is its FLOP."""
    total = 0.0
    for matrix in weights.matrices:
        if matrix.name == "lm_head":
            continue
        values = matrix.layout.rows * matrix.layout.columns * matrix.num_matrices
        if ".experts." in matrix.name and config.moe is not None:
            values = values * config.moe.experts_per_token // config.moe.num_experts
        total += values
    return round(total)


def has_experts(config: ModelConfig) -> bool:
    return any(layer.mlp is MlpKind.MOE for layer in config.layers)
