"""Small model configurations for tests that need sizes but no weights."""

from __future__ import annotations

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


def hybrid_config(
    *,
    mixers: str = "GGGA",
    vocab_size: int = 97,
    hidden_size: int = 64,
    max_position_embeddings: int = 4096,
    moe: MoeConfig | None = None,
) -> ModelConfig:
    """`mixers` spells the layers: G for GDN, A for attention."""
    layers = tuple(
        LayerConfig(
            index=index,
            mixer=MixerKind.GDN if letter == "G" else MixerKind.ATTENTION,
            mlp=MlpKind.DENSE if moe is None else MlpKind.MOE,
            kind_index=mixers[:index].count(letter),
        )
        for index, letter in enumerate(mixers)
    )
    return ModelConfig(
        architecture="Qwen3_5ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        layers=layers,
        attention=AttentionConfig(4, 2, 16, True, RopeConfig(theta=10_000.0, rotary_dim=4)),
        gdn=GdnConfig(2, 4, 16, 16, 4) if "G" in mixers else None,
        moe=moe,
        rms_norm_eps=1e-6,
        norm_offset=1.0,
        tie_word_embeddings=True,
        max_position_embeddings=max_position_embeddings,
        num_mtp_layers=0,
        eos_token_ids=(vocab_size - 1,),
    )
