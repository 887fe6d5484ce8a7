"""Configurations of released models, for runs on made-up weights of their real shapes.

Text parts only. Sizes are those of the published config files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ninfer.contract.model import (
    AttentionConfig,
    GdnConfig,
    LayerConfig,
    MixerKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)

_ATTENTION_INTERVAL: Final = 4
_HYBRID_VOCABULARY: Final = 248_320
_HYBRID_CONTEXT: Final = 262_144
_HYBRID_ROPE: Final = RopeConfig(theta=1e7, rotary_dim=64, mrope_section=(11, 11, 10))
_HEAD_DIM: Final = 256
_GDN_HEAD_DIM: Final = 128
_GDN_KEY_HEADS: Final = 16
_CONV_WIDTH: Final = 4


def _hybrid(
    *,
    hidden: int,
    num_layers: int,
    heads: tuple[int, int],
    inner: int,
    value_heads: int,
    is_tied: bool,
    moe: MoeConfig | None = None,
) -> ModelConfig:
    """A model of the Qwen3.5 family; `heads` are query and KV heads."""
    layers = tuple(_hybrid_layer(index, moe is not None) for index in range(num_layers))
    return ModelConfig(
        architecture="Qwen3_5ForCausalLM" if moe is None else "Qwen3_5MoeForCausalLM",
        vocab_size=_HYBRID_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        attention=AttentionConfig(*heads, _HEAD_DIM, True, _HYBRID_ROPE),
        gdn=GdnConfig(_GDN_KEY_HEADS, value_heads, _GDN_HEAD_DIM, _GDN_HEAD_DIM, _CONV_WIDTH),
        moe=moe,
        rms_norm_eps=1e-6,
        norm_offset=1.0,
        tie_word_embeddings=is_tied,
        max_position_embeddings=_HYBRID_CONTEXT,
        num_mtp_layers=1,
        eos_token_ids=(),
    )


def _hybrid_layer(index: int, has_moe: bool) -> LayerConfig:
    """Three GDN layers, then one of attention."""
    groups, place = divmod(index, _ATTENTION_INTERVAL)
    mlp = MlpKind.MOE if has_moe else MlpKind.DENSE
    if place == _ATTENTION_INTERVAL - 1:
        return LayerConfig(index, MixerKind.ATTENTION, mlp, groups)
    return LayerConfig(index, MixerKind.GDN, mlp, index - groups)


def _qwen3_8b() -> ModelConfig:
    layers = tuple(
        LayerConfig(index, MixerKind.ATTENTION, MlpKind.DENSE, index) for index in range(36)
    )
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        layers=layers,
        attention=AttentionConfig(32, 8, 128, False, RopeConfig(theta=1e6, rotary_dim=128)),
        gdn=None,
        moe=None,
        rms_norm_eps=1e-6,
        norm_offset=0.0,
        tie_word_embeddings=False,
        max_position_embeddings=40_960,
        num_mtp_layers=0,
        eos_token_ids=(),
    )


SYNTHETIC_MODELS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "qwen3.5-0.8b": _hybrid(
            hidden=1024, num_layers=24, heads=(8, 2), inner=3584, value_heads=16, is_tied=True
        ),
        "qwen3.5-2b": _hybrid(
            hidden=2048, num_layers=24, heads=(8, 2), inner=6144, value_heads=16, is_tied=True
        ),
        "qwen3.5-4b": _hybrid(
            hidden=2560, num_layers=32, heads=(16, 4), inner=9216, value_heads=32, is_tied=True
        ),
        "qwen3.5-9b": _hybrid(
            hidden=4096, num_layers=32, heads=(16, 4), inner=12_288, value_heads=32, is_tied=False
        ),
        "qwen3.5-27b": _hybrid(
            hidden=5120, num_layers=64, heads=(24, 4), inner=17_408, value_heads=48, is_tied=False
        ),
        "qwen3.5-35b-a3b": _hybrid(
            hidden=2048,
            num_layers=40,
            heads=(16, 2),
            inner=0,
            value_heads=32,
            is_tied=False,
            moe=MoeConfig(256, 8, 512, 512, True),
        ),
        "qwen3-8b": _qwen3_8b(),
    }
)
"""By the names of `bench --synthetic`."""
