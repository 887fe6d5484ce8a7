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
from ninfer.ops import (
    gdn_device,
    gdn_prefill,
    linear_small_t,
    moe_pairs,
    paged_attention_decode,
)
from ninfer.ops.kv_pages import stored_dim
from ninfer.ops.moe_pairs import SortedPairs
from ninfer.program.executors.cuda_dflash_widths import (
    NO_DFLASH_WIDTHS,
    dflash_attention_values,
    dflash_widths,
)
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import HEAD, WeightPlan

SMALL_TOKENS: Final = 16
"""Most columns of a row that take the decode kernels, whose bits do not depend on T."""
MOE_BLOCK_TOKENS: Final = 8192
"""Most tokens whose experts run at once: an expert's weights are read once a block of them."""


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """max_tokens columns of the largest unit; max_small columns of the largest unit that takes the
    decode kernels."""

    max_tokens: int
    max_small: int

    @classmethod
    def of(cls, capacity: Capacity) -> UnitSizes:
        # A draft model reads one column more a row than the target checks.
        columns = 1 + capacity.max_draft_tokens + capacity.has_draft_model
        small = max(capacity.max_concurrency * columns, SMALL_TOKENS)
        return cls(max(capacity.prefill_chunk, small), small)


@dataclass(frozen=True, slots=True)
class MoeBuffers:
    """For E experts, k a token, blocks of up to M tokens and P = M * k pairs; inner size I.

    logits        f32 [N, E] of the router
    expert_ids, weights   int32 and f32, flat, P
    positions, sorted_tokens, tiles, counts   int32, flat: what moe_pairs makes of P pairs
    offsets       int32 [E + 1]; num_tiles int32 [1]
    inner         bf16, flat, P * I
    routed        bf16, flat, P * C
    shared        bf16 [N, C]; shared_gate f32, flat, M
    """

    block_tokens: int
    logits: DeviceTensor
    expert_ids: DeviceTensor
    weights: DeviceTensor
    positions: DeviceTensor
    sorted_tokens: DeviceTensor
    tiles: DeviceTensor
    counts: DeviceTensor
    offsets: DeviceTensor
    num_tiles: DeviceTensor
    inner: DeviceTensor
    routed: DeviceTensor
    shared: DeviceTensor
    shared_gate: DeviceTensor

    def pairs(self, num_pairs: int, num_experts: int) -> SortedPairs:
        """Where the sorted pairs of a block of tokens go."""
        return SortedPairs(
            positions=self.positions.as_shape(num_pairs),
            sorted_tokens=self.sorted_tokens.as_shape(num_pairs),
            offsets=self.offsets,
            tiles=self.tiles.as_shape(moe_pairs.max_tiles(num_pairs, num_experts), 2),
            num_tiles=self.num_tiles,
            counts=self.counts.as_shape(moe_pairs.num_counts(num_pairs, num_experts)),
        )


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
    query            flat: normed and rotated queries of N columns
    attention        f32, flat: partial results of decode attention
    scratch          bytes that a mixer's kernels pass to each other
    """

    hidden: DeviceTensor
    normed: DeviceTensor
    square_sums: DeviceTensor
    projected: DeviceTensor
    mixed: DeviceTensor
    logits: DeviceTensor
    partials: DeviceTensor
    unpacked: DeviceTensor
    query: DeviceTensor
    attention: DeviceTensor
    scratch: DeviceTensor
    moe: MoeBuffers | None


def carve_moe_buffers(arena: Arena, config: ModelConfig, sizes: UnitSizes) -> MoeBuffers | None:
    """None for a model without experts."""
    moe = config.moe
    if moe is None:
        return None
    block_tokens = min(MOE_BLOCK_TOKENS, sizes.max_tokens)
    num_pairs = block_tokens * moe.experts_per_token
    pairs = (num_pairs,)
    return MoeBuffers(
        block_tokens=block_tokens,
        logits=arena.take((sizes.max_tokens, moe.num_experts), "float32"),
        expert_ids=arena.take(pairs, "int32"),
        weights=arena.take(pairs, "float32"),
        positions=arena.take(pairs, "int32"),
        sorted_tokens=arena.take(pairs, "int32"),
        tiles=arena.take((2 * moe_pairs.max_tiles(num_pairs, moe.num_experts),), "int32"),
        counts=arena.take((moe_pairs.num_counts(num_pairs, moe.num_experts),), "int32"),
        offsets=arena.take((moe.num_experts + 1,), "int32"),
        num_tiles=arena.take((1,), "int32"),
        inner=arena.take((num_pairs * moe.intermediate_size,), "uint16"),
        routed=arena.take((num_pairs * config.hidden_size,), "uint16"),
        shared=arena.take((sizes.max_tokens, config.hidden_size), "uint16"),
        shared_gate=arena.take((block_tokens,), "float32"),
    )


def carve_buffers(
    arena: Arena,
    config: ModelConfig,
    weights: WeightPlan,
    sizes: UnitSizes,
    limits: DeviceLimits,
    *,
    max_pages: int,
) -> UnitBuffers:
    """InvariantError when the arena is too small."""
    hidden, att = config.hidden_size, config.attention
    query = att.num_heads * stored_dim(att.head_dim)
    partial_results = paged_attention_decode.workspace_size(
        sizes.max_small, att.num_heads, stored_dim(att.head_dim), max_pages
    )
    widths = NO_DFLASH_WIDTHS
    if weights.dflash is not None:
        dflash = weights.dflash.config
        widths = dflash_widths(dflash)
        more = dflash_attention_values(dflash, sizes.max_small, max_pages)
        partial_results = max(partial_results, more)
    single = [matrix for matrix in weights.matrices if matrix.num_experts is None]
    partials = max(
        linear_small_t.workspace_size(
            linear_small_t.plan_linear(matrix.layout, limits),
            min(sizes.max_small, linear_small_t.MAX_TOKENS),
        )
        for matrix in (*single, *(rows.matrix for rows in weights.draft_head))
    )
    unpacked = max(
        matrix.layout.rows * matrix.layout.columns for matrix in single if matrix.name != HEAD
    )
    return UnitBuffers(
        hidden=arena.take((sizes.max_tokens, hidden), "uint16"),
        normed=arena.take((sizes.max_tokens, hidden), "uint16"),
        square_sums=arena.take((sizes.max_small, -(-hidden // 32)), "float32"),
        projected=arena.take(
            (sizes.max_tokens * max(_widest_projection(config), widths.projected),), "uint16"
        ),
        mixed=arena.take((sizes.max_tokens * max(_widest_mixed(config), widths.mixed),), "uint16"),
        logits=carve_logits(arena, sizes.max_small, config.vocab_size),
        partials=arena.take((partials,), "float32"),
        unpacked=arena.take((unpacked,), "uint16"),
        query=arena.take((sizes.max_tokens * max(query, widths.query),), "uint16"),
        attention=arena.take((partial_results,), "float32"),
        scratch=arena.take((_scratch_bytes(config, sizes, limits),), "uint8"),
        moe=carve_moe_buffers(arena, config, sizes),
    )


def carve_logits(arena: Arena, rows: int, vocab_size: int) -> DeviceTensor:
    """f32 [rows, V]; rows start at multiples of 16 bytes."""
    padded = -(-vocab_size // 4) * 4
    return arena.take((rows, padded), "float32").columns(0, vocab_size)


def _scratch_bytes(config: ModelConfig, sizes: UnitSizes, limits: DeviceLimits) -> int:
    gdn = config.gdn
    if gdn is None:
        return 0
    chunks = gdn_prefill.plan_chunks(gdn, limits)
    return gdn_prefill.workspace_bytes(gdn, chunks, sizes.max_tokens)


def qkv_width(config: ModelConfig) -> int:
    att = config.attention
    heads = (2 if att.has_output_gate else 1) * att.num_heads + 2 * att.num_kv_heads
    return heads * att.head_dim


def _inner_width(config: ModelConfig) -> int:
    moe = config.moe
    shared = 0 if moe is None else moe.shared_intermediate_size or 0
    return max(config.intermediate_size, shared)


def _widest_projection(config: ModelConfig) -> int:
    in_proj = 0 if config.gdn is None else gdn_device.projection_width(config.gdn)
    return max(qkv_width(config), in_proj, 2 * _inner_width(config))


def _widest_mixed(config: ModelConfig) -> int:
    att, gdn = config.attention, config.gdn
    values = 0 if gdn is None else gdn.value_dim
    return max(att.num_heads * att.head_dim, values, _inner_width(config))
