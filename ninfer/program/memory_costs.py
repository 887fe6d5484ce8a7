"""What a model costs in bytes: MemoryCosts, which a plan is solved by, and CpuCosts.

page       K and V of 64 tokens in every attention layer, and in those of a draft model
slot       convolution window and recurrent state of every GDN layer; what a draft model starts from
workspace  the largest set of intermediate arrays that live at one time (on the CPU an estimate)

On the CPU executor every number is float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Protocol

from ninfer.contract.model import GdnConfig, ModelConfig, ModelObject
from ninfer.contract.units import Capacity
from ninfer.ops.gdn_chunked import CHUNK_TOKENS
from ninfer.ops.paged_attention import KEY_BLOCK_TOKENS
from ninfer.program.executors.cpu import PASS_TOKENS
from ninfer.program.executors.cpu_memory import page_values, slot_values
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE, DraftShape

FLOAT32_BYTES: Final = 4
_CACHE_BYTES: Final = 48 << 20
"""On this executor a tier is worth little: prefill is slow, but so few tokens are."""
_SAMPLER_BYTES: Final = 40
"""A vocabulary entry while one row is sampled: float64 weights, sums and noise, an order."""


class MemoryCosts(Protocol):
    """Bytes of one model on one executor."""

    @property
    def default_prefill_chunk(self) -> int: ...

    @property
    def default_budget(self) -> str:
        """What `default_budget_bytes` is, in words: `half of what is free`."""

    def default_budget_bytes(self, available_bytes: int) -> int: ...

    @property
    def default_cache_bytes(self) -> int | None:
        """Most bytes that a default budget has beyond the lanes' contexts, for checkpoints; None:
        all of it."""

    def default_host_bytes(self, host_bytes: int) -> int:
        """The host tier, when `host_bytes` are free on the host."""

    def page_bytes(self) -> int:
        """0 for a model without attention layers."""

    def slot_bytes(self) -> int:
        """0 for a model without GDN layers that nothing drafts for."""

    def workspace_bytes(self, capacity: Capacity) -> Mapping[str, int]:
        """By what it is for. Grows with every number of the capacity; pages do not matter."""


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """MemoryCosts of the CPU executor."""

    config: ModelConfig
    draft: DraftShape = NO_DRAFT_SHAPE

    @property
    def default_prefill_chunk(self) -> int:
        return 256

    @property
    def default_budget(self) -> str:
        return "half of what is free"

    def default_budget_bytes(self, available_bytes: int) -> int:
        return available_bytes // 2

    @property
    def default_cache_bytes(self) -> int | None:
        return _CACHE_BYTES

    def default_host_bytes(self, host_bytes: int) -> int:
        return min(host_bytes // 16, _CACHE_BYTES)

    def page_bytes(self) -> int:
        return page_values(self.config, self.draft) * FLOAT32_BYTES

    def slot_bytes(self) -> int:
        return slot_values(self.config, self.draft) * FLOAT32_BYTES

    def workspace_bytes(self, capacity: Capacity) -> Mapping[str, int]:
        chunk = capacity.prefill_chunk
        # The inputs of a decode step.
        lanes = capacity.max_concurrency * (1 + capacity.max_draft_tokens)
        return {
            "logits_bytes": logits_bytes(self.config, prefill_chunk=chunk, max_concurrency=lanes),
            "activation_bytes": activation_bytes(
                self.config,
                prefill_chunk=chunk,
                max_concurrency=lanes,
                max_context=capacity.max_context,
            ),
            **self._draft_workspace(capacity, lanes),
        }

    def _draft_workspace(self, capacity: Capacity, lanes: int) -> Mapping[str, int]:
        """What a draft model holds of a pass beside the target's output."""
        if not capacity.has_draft_model:
            return {}
        num_tokens = max(min(capacity.prefill_chunk, PASS_TOKENS), lanes)
        values = 7 * num_tokens * self.config.hidden_size
        return {"draft_bytes": values * FLOAT32_BYTES}


def weights_bytes_of(
    objects: Iterable[ModelObject], components: Collection[str] = ("text",)
) -> int:
    """Bytes of some components."""
    return sum(object_bytes(item) for item in objects if item.component in components)


def object_bytes(item: ModelObject) -> int:
    return prod(item.shape) * FLOAT32_BYTES


def logits_bytes(config: ModelConfig, *, prefill_chunk: int, max_concurrency: int) -> int:
    """Logits of a scored chunk (its passes, then joined) or of a sampled decode batch, whichever is
    more."""
    scored = 2 * prefill_chunk * FLOAT32_BYTES
    sampled = max_concurrency * FLOAT32_BYTES + _SAMPLER_BYTES
    return config.vocab_size * max(scored, sampled)


def activation_bytes(
    config: ModelConfig, *, prefill_chunk: int, max_concurrency: int, max_context: int
) -> int:
    """The residual stream and the widest block of the largest pass through the layers."""
    num_tokens = max(min(prefill_chunk, PASS_TOKENS), max_concurrency)
    keys = min(max_context, KEY_BLOCK_TOKENS)
    widest = max(
        _attention_values(config, num_tokens, keys),
        0 if config.gdn is None else _gdn_values(config.gdn, num_tokens),
        _mlp_values(config, num_tokens),
    )
    return (3 * num_tokens * config.hidden_size + widest) * FLOAT32_BYTES


def _attention_values(config: ModelConfig, num_tokens: int, num_keys: int) -> int:
    """Projections, three copies of the queries, scores and their mask, one gathered key block."""
    att = config.attention
    query = att.num_heads * att.head_dim
    key = att.num_kv_heads * att.head_dim
    projected = (2 if att.has_output_gate else 1) * query + 2 * key
    scores = (att.num_heads + 1) * num_tokens * num_keys
    return num_tokens * (projected + 3 * query) + scores + 2 * num_keys * key


def _gdn_values(gdn: GdnConfig, num_tokens: int) -> int:
    """Projections with the convolved copy, and the arrays of the chunked delta rule."""
    projected = 2 * gdn.conv_dim + gdn.value_dim + 2 * gdn.num_value_heads
    num_padded = -(-num_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
    head = 4 * (CHUNK_TOKENS + gdn.key_head_dim + gdn.value_head_dim)
    return num_tokens * projected + num_padded * gdn.num_value_heads * head


def _mlp_values(config: ModelConfig, num_tokens: int) -> int:
    """gate, up and their product; experts run one after the other, at worst with every token."""
    inner = config.intermediate_size
    moe = config.moe
    if moe is None:
        return 3 * num_tokens * inner
    inner = max(inner, moe.intermediate_size, moe.shared_intermediate_size or 0)
    return num_tokens * (3 * inner + 2 * config.hidden_size + 2 * moe.num_experts)
