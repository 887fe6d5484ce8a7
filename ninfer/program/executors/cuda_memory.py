"""CudaMemory: KV pages and StateImages on the device, and their sizes in bytes.

    KV of a layer   bf16  [pages][2: K, V][Hk][64][D]
                    fp8   e4m3 codes in that shape, then f32 scales [pages][2][Hk][64]
                    int8  codes in that shape, then f16 scales [pages][2][Hk][64][D / 64]
    StateImages     conv bf16 [slots][L][conv_dim][W - 1], oldest input first
                    recurrent f32 [slots][L][Hv][dv][dk]
                    hidden bf16 [slots][C], with a draft model: what it continues from

The draft model's layer is one more layer of KV, the last.

D is kv_pages.stored_dim of a head. K is stored normed and rotated. Slot ROOT_SLOT is zeroed and
never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.ops.kv_pages import stored_dim
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor

INT8_GROUP: Final = 64
"""Values of a head that share a scale in int8 pages."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Pages of one attention layer; `scales` is None for bf16."""

    pages: DeviceTensor
    scales: DeviceTensor | None


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """What outlives a unit; conv and recurrent are None without GDN layers, hidden without a draft
    model."""

    kv: tuple[KvLayer, ...]
    conv: DeviceTensor | None
    recurrent: DeviceTensor | None
    hidden: DeviceTensor | None


def carve_memory(
    arena: Arena, config: ModelConfig, capacity: Capacity, kv_dtype: str
) -> CudaMemory:
    """`kv_dtype` is bf16, fp8 or int8."""
    kv = tuple(
        _kv_layer(arena, config, capacity.num_pages, kv_dtype)
        for _ in range(_num_kv_layers(config, capacity.has_draft_model))
    )
    conv, recurrent, hidden = None, None, None
    gdn = config.gdn
    if gdn is not None:
        slots = (capacity.num_slots, config.num_gdn_layers)
        state = (gdn.num_value_heads, gdn.value_head_dim, gdn.key_head_dim)
        conv = arena.take((*slots, gdn.conv_dim, gdn.conv_width - 1), "uint16")
        recurrent = arena.take((*slots, *state), "float32")
    if capacity.has_draft_model:
        hidden = arena.take((capacity.num_slots, config.hidden_size), "uint16")
    return CudaMemory(kv, conv, recurrent, hidden)


def page_bytes(config: ModelConfig, kv_dtype: str, *, has_draft_model: bool = False) -> int:
    """One page in every layer that has KV."""
    layer = _kv_layer(Arena(), config, 1, kv_dtype)
    size = layer.pages.num_bytes + (0 if layer.scales is None else layer.scales.num_bytes)
    return size * _num_kv_layers(config, has_draft_model)


def slot_bytes(config: ModelConfig, *, has_draft_model: bool = False) -> int:
    """One StateImage; 0 for a model without GDN layers and draft model."""
    hidden = 2 * config.hidden_size if has_draft_model else 0
    gdn = config.gdn
    if gdn is None:
        return hidden
    window = gdn.conv_dim * (gdn.conv_width - 1) * 2
    recurrent = gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim * 4
    return config.num_gdn_layers * (window + recurrent) + hidden


def _num_kv_layers(config: ModelConfig, has_draft_model: bool) -> int:
    return config.num_attention_layers + has_draft_model


def _kv_layer(arena: Arena, config: ModelConfig, num_pages: int, kv_dtype: str) -> KvLayer:
    att = config.attention
    heads = (num_pages, 2, att.num_kv_heads, PAGE_TOKENS)
    shape = (*heads, stored_dim(att.head_dim))
    if kv_dtype == "bf16":
        return KvLayer(arena.take(shape, "uint16"), None)
    if kv_dtype == "fp8":
        return KvLayer(arena.take(shape, "uint8"), arena.take(heads, "float32"))
    groups = (*heads, shape[-1] // INT8_GROUP)
    return KvLayer(arena.take(shape, "int8"), arena.take(groups, "float16"))
