"""Parameters of DFlash and DFlash2 draft models and the objects that hold them.

fc [C, taps * C]   hidden_norm [C]   norm [C]
layers.N.input_norm [C]   layers.N.post_norm [C]
layers.N.attn.q_proj [H*D, C]   layers.N.attn.kv_proj = k_proj [Hk*D, C], v_proj [Hk*D, C]
layers.N.attn.o_proj [C, H*D]   layers.N.attn.q_norm [D]   layers.N.attn.k_norm [D]
layers.N.mlp.gate_up   = gate_proj [I, C], up_proj [I, C]      layers.N.mlp.down_proj [C, I]
DFlash2, W taps, groups of g channels:
layers.N.attention_conv.base [2, W, C]   layers.N.attention_conv.kernel [2*W*C/g, C]
layers.N.mlp_conv.base                   layers.N.mlp_conv.kernel
selector.predecessors [V, R]   selector.successors [V, R]   selector.hidden [R, C]
embed_tokens [V, C]   lm_head [Vd, C]   only where the draft does not use its target's
"""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.contract.model import ModelObject
from ninfer.models.dflash_config import BlockConvConfig, DflashConfig
from ninfer.models.parameters import fused_object, single_object, swiglu_objects

COMPONENT = "draft"


def dflash_objects(
    config: DflashConfig, *, has_embedding: bool, has_head: bool
) -> tuple[ModelObject, ...]:
    """In order of use. `has_embedding`, `has_head`: whether it has them for itself."""
    return tuple(_objects(config, has_embedding, has_head))


def _objects(config: DflashConfig, has_embedding: bool, has_head: bool) -> Iterator[ModelObject]:
    hidden, num_taps = config.hidden_size, len(config.tap_layers)
    if has_embedding:
        yield single_object("embed_tokens", (config.vocab_size, hidden), COMPONENT)
    yield single_object("fc", (hidden, num_taps * hidden), COMPONENT)
    yield single_object("hidden_norm", (hidden,), COMPONENT)
    for index in range(len(config.layers)):
        yield from _layer_objects(config, f"layers.{index}")
    yield single_object("norm", (hidden,), COMPONENT)
    if config.selector is not None:
        codebook = (config.vocab_size, config.selector.rank)
        yield single_object("selector.predecessors", codebook, COMPONENT)
        yield single_object("selector.successors", codebook, COMPONENT)
        yield single_object("selector.hidden", (config.selector.rank, hidden), COMPONENT)
    if has_head:
        yield single_object("lm_head", (config.head_vocab_size, hidden), COMPONENT)


def _layer_objects(config: DflashConfig, prefix: str) -> Iterator[ModelObject]:
    att, hidden = config.attention, config.hidden_size
    kv_rows = att.num_kv_heads * att.head_dim
    yield single_object(f"{prefix}.input_norm", (hidden,), COMPONENT)
    if config.conv is not None:
        yield from _conv_objects(config.conv, hidden, f"{prefix}.attention_conv")
    query_rows = att.num_heads * att.head_dim
    parts = [(f"{prefix}.attn.{name}", kv_rows) for name in ("k_proj", "v_proj")]
    yield single_object(f"{prefix}.attn.q_proj", (query_rows, hidden), COMPONENT)
    yield fused_object(f"{prefix}.attn.kv_proj", parts, hidden, COMPONENT)
    yield single_object(f"{prefix}.attn.q_norm", (att.head_dim,), COMPONENT)
    yield single_object(f"{prefix}.attn.k_norm", (att.head_dim,), COMPONENT)
    yield single_object(f"{prefix}.attn.o_proj", (hidden, query_rows), COMPONENT)
    yield single_object(f"{prefix}.post_norm", (hidden,), COMPONENT)
    if config.conv is not None:
        yield from _conv_objects(config.conv, hidden, f"{prefix}.mlp_conv")
    yield from swiglu_objects(f"{prefix}.mlp", hidden, config.intermediate_size, COMPONENT)


def _conv_objects(conv: BlockConvConfig, hidden: int, prefix: str) -> Iterator[ModelObject]:
    yield single_object(f"{prefix}.base", (2, conv.num_taps, hidden), COMPONENT)
    rows = 2 * conv.num_taps * (hidden // conv.group_size)
    yield single_object(f"{prefix}.kernel", (rows, hidden), COMPONENT)
