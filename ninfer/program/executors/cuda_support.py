"""Which models the CUDA executor's kernels cover."""

from __future__ import annotations

from ninfer.contract.model import AttentionConfig, ModelConfig, MoeConfig
from ninfer.ops import gdn_device, kv_pages, moe_router, moe_small_t, paged_attention_decode


def unsupported_reason(config: ModelConfig) -> str | None:
    """What of the model has no kernel, or None."""
    moe = config.moe
    reason = unsupported_layers(config.attention, config.hidden_size, config.intermediate_size)
    if reason is not None:
        return reason
    moe_reason = None if moe is None else _unsupported_moe(config.hidden_size, moe)
    return moe_reason or _unsupported_gdn(config)


def unsupported_layers(att: AttentionConfig, hidden_size: int, inner_size: int) -> str | None:
    """What of layers of attention and a dense MLP has no kernel, or None."""
    if att.head_dim not in kv_pages.HEAD_DIMS:
        return f"attention heads of {att.head_dim}, kernels are there for {kv_pages.HEAD_DIMS}"
    if att.num_heads // att.num_kv_heads > paged_attention_decode.MAX_GROUP:
        return f"{att.num_heads} query heads of {att.num_kv_heads}"
    if hidden_size % 8 or inner_size % 8:
        return f"sizes {hidden_size} and {inner_size}, not multiples of 8"
    return None


def _unsupported_moe(hidden_size: int, moe: MoeConfig) -> str | None:
    if (
        moe.num_experts > moe_router.MAX_EXPERTS
        or moe.experts_per_token > moe_router.MAX_EXPERTS_PER_TOKEN
    ):
        return f"{moe.experts_per_token} of {moe.num_experts} experts"
    if hidden_size % moe_small_t.TILE_ROWS or hidden_size > moe_small_t.MAX_COLUMNS:
        step, most = moe_small_t.TILE_ROWS, moe_small_t.MAX_COLUMNS
        return f"experts of width {hidden_size}, not a multiple of {step} up to {most}"
    sizes = (moe.intermediate_size, moe.shared_intermediate_size or 0)
    if any(size % 8 for size in sizes):
        return f"experts of inner sizes {sizes}, not multiples of 8"
    return None


def _unsupported_gdn(config: ModelConfig) -> str | None:
    gdn = config.gdn
    if gdn is None:
        return None
    for size in (gdn.key_head_dim, gdn.value_head_dim):
        if size not in gdn_device.HEAD_DIMS:
            return f"GDN heads of {size}, kernels are there for {gdn_device.HEAD_DIMS}"
    if gdn.conv_width not in gdn_device.CONV_WIDTHS:
        widths = gdn_device.CONV_WIDTHS
        return f"a convolution of width {gdn.conv_width}, kernels are there for {widths}"
    return None
