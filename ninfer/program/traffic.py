"""What a model must move and compute at least: bytes of a decode step, FLOP of a prompt.

A decode step reads weights and KV once and reads and writes states; its floor is those bytes over
the rate at which the device can read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS
from ninfer.program.executors import cuda_memory
from ninfer.program.executors.cuda_weights import EMBED, HEAD, WeightPlan


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
        total += matrix.num_bytes * (1.0 if matrix.num_experts is None else share)
    return round(total)


def prompt_flop(config: ModelConfig, weights: WeightPlan, num_tokens: int) -> int:
    """Floating-point operations of a prompt: the projections of every token, causal attention, and
    one row of the head."""
    active = 0
    for matrix in weights.matrices:
        values = matrix.num_matrices * matrix.layout.rows * matrix.layout.columns
        if matrix.name == HEAD:
            continue
        if matrix.num_experts is not None and config.moe is not None:
            values = values * config.moe.experts_per_token // matrix.num_experts
        active += values
    att = config.attention
    scores = 2 * num_tokens**2 * att.num_heads * att.head_dim * config.num_attention_layers
    return 2 * active * num_tokens + scores + 2 * config.vocab_size * config.hidden_size
