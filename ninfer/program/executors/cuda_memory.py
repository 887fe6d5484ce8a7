"""CudaMemory: KV pages and StateImages on the device, and their sizes in bytes.

    KV of a layer   bf16  [pages][2: K, V][Hk][64][D]
                    fp8   e4m3 codes in that shape, then f32 scales [pages][2][Hk][64]
                    int8  codes in that shape, then f16 scales [pages][2][Hk][64][D / 64]
    StateImages     conv bf16 [slots][L][conv_dim][W - 1], oldest input first
                    recurrent f32 [slots][L][Hv][dv][dk]
                    hidden bf16 [slots][C], with an MTP module: what it continues from

Layers of a draft model are more layers of KV, the last.

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
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE, DraftShape, KvShape

INT8_GROUP: Final = 64
"""Values of a head that share a scale in int8 pages."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Pages of one attention layer; `scales` is None for bf16."""

    pages: DeviceTensor
    scales: DeviceTensor | None


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """What outlives a unit; conv and recurrent are None without GDN layers, hidden without an MTP
    module."""

    kv: tuple[KvLayer, ...]
    conv: DeviceTensor | None
    recurrent: DeviceTensor | None
    hidden: DeviceTensor | None


def carve_memory(
    arena: Arena,
    config: ModelConfig,
    capacity: Capacity,
    kv_dtype: str,
    draft: DraftShape = NO_DRAFT_SHAPE,
) -> CudaMemory:
    """`kv_dtype` is bf16, fp8 or int8."""
    kv = tuple(
        _kv_layer(arena, shape, capacity.num_pages, kv_dtype) for shape in _kv_shapes(config, draft)
    )
    conv, recurrent, hidden = None, None, None
    gdn = config.gdn
    if gdn is not None:
        slots = (capacity.num_slots, config.num_gdn_layers)
        state = (gdn.num_value_heads, gdn.value_head_dim, gdn.key_head_dim)
        conv = arena.take((*slots, gdn.conv_dim, gdn.conv_width - 1), "uint16")
        recurrent = arena.take((*slots, *state), "float32")
    if draft.hidden_size:
        hidden = arena.take((capacity.num_slots, draft.hidden_size), "uint16")
    return CudaMemory(kv, conv, recurrent, hidden)


def page_bytes(config: ModelConfig, kv_dtype: str, draft: DraftShape = NO_DRAFT_SHAPE) -> int:
    """One page in every layer that has KV."""
    return sum(_page_bytes(shape, kv_dtype) for shape in _kv_shapes(config, draft))


def slot_bytes(config: ModelConfig, draft: DraftShape = NO_DRAFT_SHAPE) -> int:
    """One StateImage; 0 for a model without GDN layers and MTP module."""
    hidden = 2 * draft.hidden_size
    gdn = config.gdn
    if gdn is None:
        return hidden
    window = gdn.conv_dim * (gdn.conv_width - 1) * 2
    recurrent = gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim * 4
    return config.num_gdn_layers * (window + recurrent) + hidden


def _kv_shapes(config: ModelConfig, draft: DraftShape) -> tuple[KvShape, ...]:
    att = config.attention
    own = KvShape(att.num_kv_heads, att.head_dim)
    return (own,) * config.num_attention_layers + draft.layers


def _page_bytes(shape: KvShape, kv_dtype: str) -> int:
    layer = _kv_layer(Arena(), shape, 1, kv_dtype)
    return layer.pages.num_bytes + (0 if layer.scales is None else layer.scales.num_bytes)


def _kv_layer(arena: Arena, layer: KvShape, num_pages: int, kv_dtype: str) -> KvLayer:
    heads = (num_pages, 2, layer.num_kv_heads, PAGE_TOKENS)
    shape = (*heads, stored_dim(layer.head_dim))
    if kv_dtype == "bf16":
        return KvLayer(arena.take(shape, "uint16"), None)
    if kv_dtype == "fp8":
        return KvLayer(arena.take(shape, "uint8"), arena.take(heads, "float32"))
    groups = (*heads, shape[-1] // INT8_GROUP)
    return KvLayer(arena.take(shape, "int8"), arena.take(groups, "float16"))
