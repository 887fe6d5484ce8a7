"""CpuMemory: the paged KV pool, the StateImages and the host tier of the CPU executor.

    host block   keys then values of one page, [2, attention layers, PAGE_TOKENS, Hk, D] float32;
                 then the same of each layer of the draft model
    StateImage   windows, states, then hidden of one slot, cut into blocks; the last may be filled
                 in part

All of it is allocated once. On this executor the host tier is ordinary memory like the pool: it
holds checkpoints that the pool has no room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity, Move
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE, DraftShape


@dataclass(frozen=True, slots=True, eq=False)
class CpuMemory:
    """Everything that outlives a unit, float32.

    k_pages, v_pages   [attention layers, pages, PAGE_TOKENS, Hk, D]
    windows            [slots, GDN layers, conv_dim, conv_width - 1] oldest input first
    states             [slots, GDN layers, Hv, dk, dv]
    draft_k_pages, draft_v_pages   of each layer of the draft model, [pages, PAGE_TOKENS, Hk, D]
    hidden             [slots, hidden_size] what the draft model continues from
    host_blocks        [blocks, page_bytes] uint8

    Slot ROOT_SLOT stays zero for ever. Models without GDN layers and draft model have empty
    StateImages.
    """

    k_pages: Float32Array
    v_pages: Float32Array
    windows: Float32Array
    states: Float32Array
    draft_k_pages: tuple[Float32Array, ...]
    draft_v_pages: tuple[Float32Array, ...]
    hidden: Float32Array
    host_blocks: ByteArray

    @property
    def slot_bytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes) // len(self.windows)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer."""
        for pool in self._pools:
            pool[:, target] = pool[:, source]

    def save(self, move: Move) -> None:
        """Copy pages and the StateImage to their blocks."""
        for page, block in move.pages:
            for pool, part in zip(self._pools, self._block(block), strict=True):
                part[:] = pool[:, page]
        for data, place in self._state_parts(move):
            place[:] = data

    def load(self, move: Move) -> None:
        """Copy blocks to pages and the StateImage."""
        for page, block in move.pages:
            for pool, part in zip(self._pools, self._block(block), strict=True):
                pool[:, page] = part
        for data, place in self._state_parts(move):
            data[:] = place

    @property
    def _pools(self) -> Iterator[Float32Array]:
        """All that a page is a part of, [layers, pages, PAGE_TOKENS, Hk, D] each."""
        yield from (self.k_pages, self.v_pages)
        for keys, values in zip(self.draft_k_pages, self.draft_v_pages, strict=True):
            yield from (keys[None], values[None])

    @property
    def _planes(self) -> tuple[Float32Array, ...]:
        """All that a StateImage is a part of, slots first."""
        return self.windows, self.states, self.hidden

    def _block(self, block: int) -> Iterator[Float32Array]:
        """Views of the pools' parts [layers, PAGE_TOKENS, Hk, D] in a block."""
        numbers, first = self.host_blocks[block].view(np.float32), 0
        for pool in self._pools:
            layers, _, *page = pool.shape
            size = layers * prod(page)
            yield numbers[first : first + size].reshape(layers, *page)
            first += size

    def _state_parts(self, move: Move) -> Iterator[tuple[ByteArray, ByteArray]]:
        """(bytes of the StateImage, their place in a block), in order."""
        if move.slot is None:
            return
        place = 0
        page_bytes = self.host_blocks.shape[1]
        for plane in self._planes:
            data: ByteArray = plane[move.slot].reshape(-1).view(np.uint8)
            first = 0
            while first < data.size:
                block, offset = divmod(place, page_bytes)
                size = min(page_bytes - offset, data.size - first)
                stretch = self.host_blocks[move.state_blocks[block], offset : offset + size]
                yield data[first : first + size], stretch
                first, place = first + size, place + size


def page_values(config: ModelConfig, draft: DraftShape) -> int:
    """Numbers in one page: keys and values of every layer."""
    att = config.attention
    values = config.num_attention_layers * att.num_kv_heads * att.head_dim
    values += sum(layer.num_kv_heads * layer.head_dim for layer in draft.layers)
    return 2 * PAGE_TOKENS * values


def slot_values(config: ModelConfig, draft: DraftShape) -> int:
    """Numbers in one StateImage."""
    gdn = config.gdn
    if gdn is None:
        return draft.hidden_size
    window = gdn.conv_dim * (gdn.conv_width - 1)
    recurrent = gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim
    return config.num_gdn_layers * (window + recurrent) + draft.hidden_size


def allocate(
    config: ModelConfig, capacity: Capacity, draft: DraftShape = NO_DRAFT_SHAPE
) -> CpuMemory:
    """All zeros. Raises MemoryError."""
    att, gdn = config.attention, config.gdn
    page = (capacity.num_pages, PAGE_TOKENS)
    kv_shape = (config.num_attention_layers, *page, att.num_kv_heads, att.head_dim)
    slots = (capacity.num_slots, config.num_gdn_layers)
    window: tuple[int, ...] = (0, 0)
    state: tuple[int, ...] = (0, 0, 0)
    if gdn is not None:
        window = (gdn.conv_dim, gdn.conv_width - 1)
        state = (gdn.num_value_heads, gdn.key_head_dim, gdn.value_head_dim)
    draft_shapes = [(*page, layer.num_kv_heads, layer.head_dim) for layer in draft.layers]
    return CpuMemory(
        np.zeros(kv_shape, np.float32),
        np.zeros(kv_shape, np.float32),
        np.zeros((*slots, *window), np.float32),
        np.zeros((*slots, *state), np.float32),
        tuple(np.zeros(shape, np.float32) for shape in draft_shapes),
        tuple(np.zeros(shape, np.float32) for shape in draft_shapes),
        np.zeros((capacity.num_slots, draft.hidden_size), np.float32),
        np.zeros((capacity.num_host_blocks, 4 * page_values(config, draft)), np.uint8),
    )
