"""UnitBuffers: everything a unit computes in between, carved once for the largest unit.

A unit of T columns takes the first elements of each buffer. Units run one after another on one
stream, so decode and prefill share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.contract.model import ModelConfig
from ninfer.contract.units import Capacity
from ninfer.kernels.library import DeviceLimits
from ninfer.ops import linear_small_t
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import HEAD, WeightPlan

SMALL_TOKENS: Final = linear_small_t.MAX_TOKENS
"""Most columns of a row that take the decode kernels, whose bits do not depend on T."""


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """max_rows decode rows; max_tokens columns of the largest unit; max_small columns of the
    largest unit that takes the decode kernels."""

    max_rows: int
    max_tokens: int
    max_small: int

    @classmethod
    def of(cls, capacity: Capacity) -> UnitSizes:
        small = max(capacity.max_concurrency, SMALL_TOKENS)
        return cls(capacity.max_concurrency, max(capacity.prefill_chunk, small), small)


@dataclass(frozen=True, slots=True)
class UnitBuffers:
    """bf16 unless said; N = max_tokens, S = max_small.

    hidden, normed   [N, C] residual stream and its normalised copy
    square_sums      f32 [S, ceil(C / 32)] of hidden, by the Op that wrote it
    projected        flat: the widest projection of N columns (qkv, in_proj, gate and up)
    mixed            flat: the widest input of an output projection (heads, values, inner)
    logits           f32 [S, V]
    partials         f32, flat: sums that thread blocks of a linear exchange; all bits set at rest
    unpacked         flat: the largest matrix, row-major
    """

    hidden: DeviceTensor
    normed: DeviceTensor
    square_sums: DeviceTensor
    projected: DeviceTensor
    mixed: DeviceTensor
    logits: DeviceTensor
    partials: DeviceTensor
    unpacked: DeviceTensor


def carve_buffers(
    arena: Arena,
    config: ModelConfig,
    weights: WeightPlan,
    sizes: UnitSizes,
    limits: DeviceLimits,
) -> UnitBuffers:
    """InvariantError when the arena is too small."""
    hidden = config.hidden_size
    layouts = [matrix.layout for matrix in weights.matrices]
    partials = max(
        linear_small_t.workspace_size(linear_small_t.plan_linear(layout, limits))
        for layout in layouts
    )
    unpacked = max(
        matrix.layout.rows * matrix.layout.columns
        for matrix in weights.matrices
        if matrix.name != HEAD
    )
    return UnitBuffers(
        hidden=arena.take((sizes.max_tokens, hidden), "uint16"),
        normed=arena.take((sizes.max_tokens, hidden), "uint16"),
        square_sums=arena.take((sizes.max_small, -(-hidden // 32)), "float32"),
        projected=arena.take((sizes.max_tokens * _widest_projection(config),), "uint16"),
        mixed=arena.take((sizes.max_tokens * _widest_mixed(config),), "uint16"),
        logits=_logits(arena, sizes.max_small, config.vocab_size),
        partials=arena.take((partials,), "float32"),
        unpacked=arena.take((unpacked,), "uint16"),
    )


def _logits(arena: Arena, rows: int, vocab_size: int) -> DeviceTensor:
    """Rows start at multiples of 16 bytes."""
    padded = -(-vocab_size // 4) * 4
    return arena.take((rows, padded), "float32").columns(0, vocab_size)


def qkv_width(config: ModelConfig) -> int:
    att = config.attention
    heads = (2 if att.has_output_gate else 1) * att.num_heads + 2 * att.num_kv_heads
    return heads * att.head_dim


def in_proj_width(config: ModelConfig) -> int:
    """0 without GDN layers."""
    gdn = config.gdn
    return 0 if gdn is None else gdn.conv_dim + gdn.value_dim + 2 * gdn.num_value_heads


def _inner_width(config: ModelConfig) -> int:
    moe = config.moe
    shared = 0 if moe is None else moe.shared_intermediate_size or 0
    return max(config.intermediate_size, shared)


def _widest_projection(config: ModelConfig) -> int:
    return max(qkv_width(config), in_proj_width(config), 2 * _inner_width(config))


def _widest_mixed(config: ModelConfig) -> int:
    att, gdn = config.attention, config.gdn
    values = 0 if gdn is None else gdn.value_dim
    return max(att.num_heads * att.head_dim, values, _inner_width(config))
