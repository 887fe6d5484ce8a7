"""Configurations of released DFlash draft models, for runs on made-up weights of their real shapes.

Sizes are those of the published config files (z-lab: Qwen3.8-27B-DFlash2, Qwen3.6-35B-A3B-DFlash).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ninfer.contract.model import AttentionConfig, RopeConfig
from ninfer.models.dflash_config import (
    BlockConvConfig,
    DflashConfig,
    DflashLayer,
    SelectorConfig,
)

_VOCABULARY: Final = 248_320
NUM_TOKEN_IDS: Final = 248_077
"""Of their tokenizer."""
_ATTENTION: Final = AttentionConfig(32, 8, 128, False, RopeConfig(theta=1e7, rotary_dim=128))


def _draft(
    *,
    architecture: str,
    hidden: int,
    inner: int,
    layers: tuple[DflashLayer, ...],
    taps: tuple[int, ...],
    num_target_layers: int,
    mask_token_id: int,
    block_size: int,
    is_second: bool,
) -> DflashConfig:
    return DflashConfig(
        architecture=architecture,
        vocab_size=_VOCABULARY,
        head_vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        attention=_ATTENTION,
        rms_norm_eps=1e-6,
        tap_layers=taps,
        num_target_layers=num_target_layers,
        mask_token_id=mask_token_id,
        block_size=block_size,
        value_scale=1.0,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=None,
        conv=BlockConvConfig(2, 16) if is_second else None,
        selector=SelectorConfig(256, 16) if is_second else None,
    )


SYNTHETIC_DRAFTS: Final[Mapping[str, DflashConfig]] = MappingProxyType(
    {
        "qwen3.5-27b": _draft(
            architecture="DFlash2DraftModel",
            hidden=5120,
            inner=17_408,
            layers=(DflashLayer(2048, True),) * 5,
            taps=(5, 19, 33, 47, 61),
            num_target_layers=64,
            mask_token_id=248_070,
            block_size=8,
            is_second=True,
        ),
        "qwen3.5-35b-a3b": _draft(
            architecture="DFlashDraftModel",
            hidden=2048,
            inner=6144,
            layers=(*(DflashLayer(4096, False),) * 5, DflashLayer(None, False)),
            taps=(1, 6, 11, 16, 22, 27, 32, 37),
            num_target_layers=40,
            mask_token_id=248_077,
            block_size=16,
            is_second=False,
        ),
    }
)
"""By the names of SYNTHETIC_MODELS that they were made for, or whose sizes those have."""
