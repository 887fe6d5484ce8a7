"""HF configurations of the supported architectures -> ModelConfig, strictly.

A wrapper (`...ForConditionalGeneration`) nests the text model in `text_config`; other files are
flat. Both are read for every architecture. Keys that a released configuration may leave out take
the default of its configuration class; everything read is checked for type and range, and settings
that would change the mathematics in a way we do not implement are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ninfer.artifact.json_document import Fields
from ninfer.contract.model import (
    AttentionConfig,
    GdnConfig,
    LayerConfig,
    MixerKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
)
from ninfer.models.rope_config import RopeDefaults, extended_max_position, parse_rope

WRAPPER_SUFFIX: Final = "ForConditionalGeneration"
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_536
MAX_WIDTH: Final = 2**24
"""Largest hidden, intermediate or vocabulary size; far above any model, far below overflow."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the architectures of one family share.

    is_hybrid      gated DeltaNet beside gated attention, zero-centred norms, MTP
    has_moe        mixture-of-experts layers
    head_dim       default; None = hidden_size / num_attention_heads
    """

    is_hybrid: bool
    has_moe: bool
    head_dim: int | None
    rope: RopeDefaults


_PLAIN_ROPE: Final = RopeDefaults(1e4, 1e4, 1.0, False, None)
_VISION_ROPE: Final = RopeDefaults(5e5, 5e5, 1.0, False, (24, 20, 20))
_HYBRID_ROPE: Final = RopeDefaults(1e4, 1e7, 0.25, True, (11, 11, 10))
_QWEN3: Final = Family(False, False, 128, _PLAIN_ROPE)
_QWEN3_MOE: Final = Family(False, True, None, _PLAIN_ROPE)
_QWEN3_VL: Final = Family(False, False, 128, _VISION_ROPE)
_QWEN3_5: Final = Family(True, False, 256, _HYBRID_ROPE)
_QWEN3_5_MOE: Final = Family(True, True, 256, _HYBRID_ROPE)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": _QWEN3_5,
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
        "Qwen3ForCausalLM": _QWEN3,
        "Qwen3MoeForCausalLM": _QWEN3_MOE,
        "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    }
)
"""Supported architectures by class name."""


def parse_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """Read a parsed config.json. Raises ModelFileError(path, key, message)."""
    top = Fields(path, raw)
    architecture = _architecture(top)
    family = FAMILIES[architecture]
    text = _text_fields(top, architecture)
    _refuse_unsupported(top, text, family)
    layers = _layers(text, family)
    max_position = text.integer("max_position_embeddings", 1, default=32_768)
    attention = _attention(text, family, max_position)
    vocab_size = text.integer("vocab_size", 1, MAX_WIDTH)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=_intermediate_size(text, layers),
        layers=layers,
        attention=attention,
        gdn=_gdn(text) if any(layer.mixer is MixerKind.GDN for layer in layers) else None,
        moe=_moe(text, family) if family.has_moe else None,
        rms_norm_eps=text.number("rms_norm_eps", 0.0, 1.0, default=1e-6, above=True),
        norm_offset=1.0 if family.is_hybrid else 0.0,
        tie_word_embeddings=_is_tied(top, text),
        max_position_embeddings=extended_max_position(attention.rope, max_position),
        num_mtp_layers=_num_mtp_layers(text, family),
        eos_token_ids=_eos_token_ids(top, text, vocab_size),
    )


def _text_fields(top: Fields, architecture: str) -> Fields:
    if top.has("text_config"):
        return top.child("text_config")
    if architecture.endswith(WRAPPER_SUFFIX) and not top.has("num_hidden_layers"):
        raise top.error("text_config", "missing")
    return top


def _architecture(top: Fields) -> str:
    names = top.texts("architectures")
    if len(names) != 1 or names[0] not in FAMILIES:
        found = ", ".join(repr(name) for name in names) or "an empty list"
        raise top.error(
            "architectures", f"{found} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return names[0]


def _refuse_unsupported(top: Fields, text: Fields, family: Family) -> None:
    for fields in (text, top):
        _check_dtype(fields)
    for key in ("attention_bias", "use_sliding_window", "mtp_use_dedicated_embeddings"):
        if text.flag(key, False):
            raise text.error(key, "true is not supported")
    _require(text, "hidden_act", ("silu",), "silu")
    if text.flag("attn_output_gate", family.is_hybrid) is not family.is_hybrid:
        raise text.error("attn_output_gate", f"must be {str(family.is_hybrid).lower()} here")
    if family.is_hybrid:
        _require(text, "output_gate_type", ("silu", "swish"), "silu")
        _require(text, "mamba_ssm_dtype", ("float32",), "float32")


def _check_dtype(fields: Fields) -> None:
    """Only the tensors' own dtypes count; the key is checked so that a typing error shows."""
    for key in ("dtype", "torch_dtype"):
        _require(fields, key, ("bfloat16", "float16", "float32", "auto"), "auto")


def _require(fields: Fields, key: str, allowed: tuple[str, ...], default: str) -> None:
    value = fields.text(key, default=default).removeprefix("torch.")
    if value not in allowed:
        raise fields.error(key, f"{value!r} is not supported ({', '.join(allowed)})")


def _layers(text: Fields, family: Family) -> tuple[LayerConfig, ...]:
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    mixers = _mixers(text, family, num_layers)
    mlps = _mlps(text, family, num_layers)
    counts = dict.fromkeys(MixerKind, 0)
    layers = []
    for index, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True)):
        layers.append(LayerConfig(index, mixer, mlp, counts[mixer]))
        counts[mixer] += 1
    return tuple(layers)


def _mixers(text: Fields, family: Family, num_layers: int) -> tuple[MixerKind, ...]:
    if text.has("layer_types"):
        return _listed_mixers(text, family, num_layers)
    if not family.is_hybrid:
        return (MixerKind.ATTENTION,) * num_layers
    interval = text.integer("full_attention_interval", 1, default=4)
    return tuple(
        MixerKind.GDN if (index + 1) % interval else MixerKind.ATTENTION
        for index in range(num_layers)
    )


def _listed_mixers(text: Fields, family: Family, num_layers: int) -> tuple[MixerKind, ...]:
    names = text.texts("layer_types")
    if len(names) != num_layers:
        raise text.error("layer_types", f"{len(names)} entries for {num_layers} layers")
    legal = [kind.value for kind in MixerKind if family.is_hybrid or kind is MixerKind.ATTENTION]
    for index, name in enumerate(names):
        if name not in legal:
            raise text.error(f"layer_types[{index}]", f"{name!r} is not one of {', '.join(legal)}")
    return tuple(MixerKind(name) for name in names)


def _mlps(text: Fields, family: Family, num_layers: int) -> tuple[MlpKind, ...]:
    """Dense layers among experts are a matter of Qwen3-MoE; the hybrids have experts everywhere and
    transformers ignores the keys in their files."""
    if not family.has_moe:
        return (MlpKind.DENSE,) * num_layers
    if family.is_hybrid:
        return (MlpKind.MOE,) * num_layers
    dense = set(text.integers("mlp_only_layers", 0, num_layers - 1, default=()))
    step = text.integer("decoder_sparse_step", 1, default=1)
    return tuple(
        MlpKind.DENSE if index in dense or (index + 1) % step else MlpKind.MOE
        for index in range(num_layers)
    )


def _intermediate_size(text: Fields, layers: tuple[LayerConfig, ...]) -> int:
    """0 when no layer has a dense MLP and the key is left out."""
    if any(layer.mlp is MlpKind.DENSE for layer in layers):
        return text.integer("intermediate_size", 1, MAX_WIDTH)
    return text.integer("intermediate_size", 0, MAX_WIDTH, default=0)


def _attention(text: Fields, family: Family, max_position: int) -> AttentionConfig:
    num_heads = text.integer("num_attention_heads", 1, 65_536)
    num_kv_heads = text.integer("num_key_value_heads", 1, 65_536, default=num_heads)
    if num_heads % num_kv_heads:
        raise text.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    default = family.head_dim or text.integer("hidden_size", 1, MAX_WIDTH) // num_heads
    head_dim = text.integer("head_dim", 1, 65_536, default=default)
    rope = parse_rope(text, family.rope, head_dim, max_position)
    return AttentionConfig(num_heads, num_kv_heads, head_dim, family.is_hybrid, rope)


def _gdn(text: Fields) -> GdnConfig:
    num_key_heads = text.integer("linear_num_key_heads", 1, 65_536, default=16)
    num_value_heads = text.integer("linear_num_value_heads", 1, 65_536, default=32)
    if num_value_heads % num_key_heads:
        raise text.error(
            "linear_num_key_heads",
            f"{num_key_heads} does not divide linear_num_value_heads {num_value_heads}",
        )
    return GdnConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=text.integer("linear_key_head_dim", 1, 65_536, default=128),
        value_head_dim=text.integer("linear_value_head_dim", 1, 65_536, default=128),
        conv_width=text.integer("linear_conv_kernel_dim", 2, 1024, default=4),
    )


def _moe(text: Fields, family: Family) -> MoeConfig:
    # Files written by newer library versions spell the number of experts differently.
    key = "num_experts" if text.has("num_experts") else "num_local_experts"
    if not text.has(key):
        key = "num_experts"
    num_experts = text.integer(key, 1, MAX_EXPERTS)
    shared = None
    if family.is_hybrid:
        shared = text.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default=512)
        if not text.flag("norm_topk_prob", True):
            raise text.error("norm_topk_prob", "must be true for this architecture")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=text.integer("num_experts_per_tok", 1, num_experts, default=8),
        intermediate_size=text.integer("moe_intermediate_size", 1, MAX_WIDTH),
        shared_intermediate_size=shared,
        renormalise=family.is_hybrid or text.flag("norm_topk_prob", False),
    )


def _num_mtp_layers(text: Fields, family: Family) -> int:
    return text.integer("mtp_num_hidden_layers", 0, 16 if family.is_hybrid else 0, default=0)


def _is_tied(top: Fields, text: Fields) -> bool:
    """A wrapper's own key wins over the one of its text part, as in transformers."""
    fields = top if top.has("tie_word_embeddings") else text
    return fields.flag("tie_word_embeddings", False)


def _eos_token_ids(top: Fields, text: Fields, vocab_size: int) -> tuple[int, ...]:
    fields = text if text.has("eos_token_id") else top
    value = fields.values.get("eos_token_id")
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(dict.fromkeys(fields.integers("eos_token_id", 0, vocab_size - 1)))
    return (fields.integer("eos_token_id", 0, vocab_size - 1),)
