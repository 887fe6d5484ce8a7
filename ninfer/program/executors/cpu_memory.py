"""CpuMemory: the paged KV pool and the StateImages of the CPU executor, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity


@dataclass(frozen=True, slots=True, eq=False)
class CpuMemory:
    """Everything that outlives a unit, float32.

    k_pages, v_pages   [attention layers, pages, PAGE_TOKENS, Hk, D]
    windows            [slots, GDN layers, conv_dim, conv_width - 1] oldest input first
    states             [slots, GDN layers, Hv, dk, dv]

    Slot ROOT_SLOT stays zero for ever. Models without GDN layers have empty StateImages.
    """

    k_pages: Float32Array
    v_pages: Float32Array
    windows: Float32Array
    states: Float32Array


def allocate(config: ModelConfig, capacity: Capacity) -> CpuMemory:
    """All zeros. Raises MemoryError."""
    att, gdn = config.attention, config.gdn
    page_shape = (
        config.num_attention_layers,
        capacity.num_pages,
        PAGE_TOKENS,
        att.num_kv_heads,
        att.head_dim,
    )
    slots = (capacity.num_slots, config.num_gdn_layers)
    window: tuple[int, ...] = (0, 0)
    state: tuple[int, ...] = (0, 0, 0)
    if gdn is not None:
        window = (gdn.conv_dim, gdn.conv_width - 1)
        state = (gdn.num_value_heads, gdn.key_head_dim, gdn.value_head_dim)
    return CpuMemory(
        np.zeros(page_shape, np.float32),
        np.zeros(page_shape, np.float32),
        np.zeros((*slots, *window), np.float32),
        np.zeros((*slots, *state), np.float32),
    )
