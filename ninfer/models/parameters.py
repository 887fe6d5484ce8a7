"""Canonical parameters of the Qwen3 and Qwen3.5 families and the objects that hold them.

Shapes are [out, in]; a linear is x @ W.T. Matrices that read the same input are fused row-wise
into one object, so that an executor runs one product where the mathematics has several.

    embed_tokens [V, C]   norm [C]   lm_head [V, C] (absent when tied)
    layers.N.input_norm [C]   layers.N.post_norm [C]
    layers.N.attn.qkv_proj   = q_proj ([H*D, C], or [2*H*D, C] with an output gate: per head D query
                               rows, then D gate rows), k_proj [Hk*D, C], v_proj [Hk*D, C]
    layers.N.attn.o_proj [C, H*D]   layers.N.attn.q_norm [D]   layers.N.attn.k_norm [D]
    layers.N.gdn.in_proj     = in_qkv [2*kd + vd, C], in_z [vd, C], in_b [Hv, C], in_a [Hv, C]
    layers.N.gdn.conv [2*kd + vd, W]   .A_log [Hv]   .dt_bias [Hv]   .norm [dv]   .out_proj [C, vd]
    layers.N.mlp.gate_up     = gate_proj [I, C], up_proj [I, C]      layers.N.mlp.down_proj [C, I]
    layers.N.moe.router [E, C]   .experts.gate_up [E, 2*I, C]   .experts.down [E, C, I]
    layers.N.moe.shared.gate_up = gate_proj, up_proj   .shared.down_proj   .shared_gate [1, C]
    mtp.fc [C, 2*C]   mtp.norm_embedding [C]   mtp.norm_hidden [C]   mtp.norm [C]   mtp.layers.0.*
"""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import (
    LogicalParameter,
    MixerKind,
    MlpKind,
    ModelConfig,
    ModelObject,
)


def model_objects(config: ModelConfig) -> tuple[ModelObject, ...]:
    """All text objects in order of use, then those of the MTP module if the model has one."""
    return (*_text_objects(config), *_mtp_objects(config))


def _text_objects(config: ModelConfig) -> Iterator[ModelObject]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield single_object("embed_tokens", (vocab, hidden))
    for layer in config.layers:
        prefix = f"layers.{layer.index}"
        yield single_object(f"{prefix}.input_norm", (hidden,))
        if layer.mixer is MixerKind.ATTENTION:
            yield from _attention_objects(config, f"{prefix}.attn", "text")
        else:
            yield from _gdn_objects(config, f"{prefix}.gdn")
        yield single_object(f"{prefix}.post_norm", (hidden,))
        yield from _mlp_objects(config, layer.mlp, prefix, "text")
    yield single_object("norm", (hidden,))
    if not config.tie_word_embeddings:
        yield single_object("lm_head", (vocab, hidden))


def _mtp_objects(config: ModelConfig) -> Iterator[ModelObject]:
    if config.num_mtp_layers == 0:
        return
    hidden = config.hidden_size
    yield single_object("mtp.norm_embedding", (hidden,), "mtp")
    yield single_object("mtp.norm_hidden", (hidden,), "mtp")
    yield single_object("mtp.fc", (hidden, 2 * hidden), "mtp")
    for index in range(config.num_mtp_layers):
        prefix = f"mtp.layers.{index}"
        yield single_object(f"{prefix}.input_norm", (hidden,), "mtp")
        yield from _attention_objects(config, f"{prefix}.attn", "mtp")
        yield single_object(f"{prefix}.post_norm", (hidden,), "mtp")
        mlp = MlpKind.MOE if config.moe is not None else MlpKind.DENSE
        yield from _mlp_objects(config, mlp, prefix, "mtp")
    yield single_object("mtp.norm", (hidden,), "mtp")


def _attention_objects(config: ModelConfig, prefix: str, component: str) -> Iterator[ModelObject]:
    att, hidden = config.attention, config.hidden_size
    q_rows = att.num_heads * att.head_dim * (2 if att.has_output_gate else 1)
    kv_rows = att.num_kv_heads * att.head_dim
    yield fused_object(
        f"{prefix}.qkv_proj",
        [
            (f"{prefix}.q_proj", q_rows),
            (f"{prefix}.k_proj", kv_rows),
            (f"{prefix}.v_proj", kv_rows),
        ],
        hidden,
        component,
    )
    yield single_object(f"{prefix}.q_norm", (att.head_dim,), component)
    yield single_object(f"{prefix}.k_norm", (att.head_dim,), component)
    yield single_object(f"{prefix}.o_proj", (hidden, att.num_heads * att.head_dim), component)


def _gdn_objects(config: ModelConfig, prefix: str) -> Iterator[ModelObject]:
    gdn = config.gdn
    if gdn is None:
        raise InvariantError("a layer with linear attention needs GDN sizes")
    hidden, heads = config.hidden_size, gdn.num_value_heads
    yield fused_object(
        f"{prefix}.in_proj",
        [
            (f"{prefix}.in_qkv", gdn.conv_dim),
            (f"{prefix}.in_z", gdn.value_dim),
            (f"{prefix}.in_b", heads),
            (f"{prefix}.in_a", heads),
        ],
        hidden,
        "text",
    )
    yield single_object(f"{prefix}.conv", (gdn.conv_dim, gdn.conv_width))
    yield single_object(f"{prefix}.A_log", (heads,))
    yield single_object(f"{prefix}.dt_bias", (heads,))
    yield single_object(f"{prefix}.norm", (gdn.value_head_dim,))
    yield single_object(f"{prefix}.out_proj", (hidden, gdn.value_dim))


def _mlp_objects(
    config: ModelConfig, kind: MlpKind, prefix: str, component: str
) -> Iterator[ModelObject]:
    if kind is MlpKind.DENSE:
        yield from swiglu_objects(
            f"{prefix}.mlp", config.hidden_size, config.intermediate_size, component
        )
    else:
        yield from _moe_objects(config, f"{prefix}.moe", component)


def _moe_objects(config: ModelConfig, prefix: str, component: str) -> Iterator[ModelObject]:
    moe, hidden = config.moe, config.hidden_size
    if moe is None:
        raise InvariantError("a mixture-of-experts layer needs its sizes")
    experts, inner = moe.num_experts, moe.intermediate_size
    yield single_object(f"{prefix}.router", (experts, hidden), component)
    yield single_object(f"{prefix}.experts.gate_up", (experts, 2 * inner, hidden), component)
    yield single_object(f"{prefix}.experts.down", (experts, hidden, inner), component)
    if moe.shared_intermediate_size is not None:
        yield single_object(f"{prefix}.shared_gate", (1, hidden), component)
        yield from swiglu_objects(
            f"{prefix}.shared", hidden, moe.shared_intermediate_size, component
        )


def swiglu_objects(prefix: str, hidden: int, inner: int, component: str) -> Iterator[ModelObject]:
    """Of a SwiGLU MLP of `inner` rows: gate and up in one, then down."""
    yield fused_object(
        f"{prefix}.gate_up",
        [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)],
        hidden,
        component,
    )
    yield single_object(f"{prefix}.down_proj", (hidden, inner), component)


def single_object(name: str, shape: tuple[int, ...], component: str = "text") -> ModelObject:
    """An object that is one parameter."""
    return ModelObject(name, shape, (LogicalParameter(name, shape),), component)


def fused_object(
    name: str, parts: list[tuple[str, int]], columns: int, component: str
) -> ModelObject:
    """Matrices (name, rows) with the same input, one below another."""
    parameters = tuple(LogicalParameter(part, (rows, columns)) for part, rows in parts)
    shape = (sum(rows for _, rows in parts), columns)
    return ModelObject(name, shape, parameters, component)
