"""What a draft model keeps of every sequence beside its target, on either executor.

Keys and values of its layers lie in the KV pages of the target; what has no positions is one more
plane of the StateImage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.models.dflash_config import DflashConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys of one layer: [PAGE_TOKENS, num_kv_heads, head_dim] a page, and values like them."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft model keeps of a sequence.

    layers       its layers' part of every KV page
    hidden_size  numbers in its plane of every StateImage; 0: it has none
    """

    layers: tuple[KvShape, ...] = ()
    hidden_size: int = 0


NO_DRAFT_SHAPE: Final = DraftShape()


def mtp_shape(config: ModelConfig) -> DraftShape:
    """What an MTP module keeps. InvariantError unless it has one layer."""
    if config.num_mtp_layers != 1:
        raise InvariantError(f"an MTP module of {config.num_mtp_layers} layers")
    att = config.attention
    return DraftShape((KvShape(att.num_kv_heads, att.head_dim),), config.hidden_size)


def dflash_shape(config: DflashConfig) -> DraftShape:
    """What a DFlash model keeps: nothing but keys and values."""
    att = config.attention
    return DraftShape((KvShape(att.num_kv_heads, att.head_dim),) * len(config.layers))
