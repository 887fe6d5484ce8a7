"""CpuMemory: the paged KV pool, the StateImages and the host tier of the CPU executor.

    host block   keys then values of one page, [2, attention layers, PAGE_TOKENS, Hk, D] float32
    StateImage   windows then states of one slot, cut into blocks; the last may be filled in part

All of it is allocated once. On this executor the host tier is ordinary memory like the pool: it
holds checkpoints that the pool has no room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity, Move


@dataclass(frozen=True, slots=True, eq=False)
class CpuMemory:
    """Everything that outlives a unit, float32.

    k_pages, v_pages   [attention layers, pages, PAGE_TOKENS, Hk, D]
    windows            [slots, GDN layers, conv_dim, conv_width - 1] oldest input first
    states             [slots, GDN layers, Hv, dk, dv]
    host_blocks        [blocks, page_bytes] uint8

    Slot ROOT_SLOT stays zero for ever. Models without GDN layers have empty StateImages.
    """

    k_pages: Float32Array
    v_pages: Float32Array
    windows: Float32Array
    states: Float32Array
    host_blocks: ByteArray

    @property
    def slot_bytes(self) -> int:
        return int(self.windows.nbytes + self.states.nbytes) // len(self.windows)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer."""
        self.k_pages[:, target] = self.k_pages[:, source]
        self.v_pages[:, target] = self.v_pages[:, source]

    def save(self, move: Move) -> None:
        """Copy pages and the StateImage to their blocks."""
        for page, block in move.pages:
            keys, values = self._block(block)
            keys[:] = self.k_pages[:, page]
            values[:] = self.v_pages[:, page]
        for part, place in self._state_parts(move):
            place[:] = part

    def load(self, move: Move) -> None:
        """Copy blocks to pages and the StateImage."""
        for page, block in move.pages:
            keys, values = self._block(block)
            self.k_pages[:, page] = keys
            self.v_pages[:, page] = values
        for part, place in self._state_parts(move):
            part[:] = place

    def _block(self, block: int) -> tuple[Float32Array, Float32Array]:
        """Views of the keys and values [attention layers, PAGE_TOKENS, Hk, D] in a block."""
        layers, _, *page = self.k_pages.shape
        both = self.host_blocks[block].view(np.float32).reshape(2, layers, *page)
        return both[0], both[1]

    def _state_parts(self, move: Move) -> Iterator[tuple[ByteArray, ByteArray]]:
        """(bytes of the StateImage, their place in a block), in order."""
        if move.slot is None:
            return
        place = 0
        page_bytes = self.host_blocks.shape[1]
        for array in (self.windows[move.slot], self.states[move.slot]):
            data: ByteArray = array.reshape(-1).view(np.uint8)
            first = 0
            while first < data.size:
                block, offset = divmod(place, page_bytes)
                size = min(page_bytes - offset, data.size - first)
                stretch = self.host_blocks[move.state_blocks[block], offset : offset + size]
                yield data[first : first + size], stretch
                first, place = first + size, place + size


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
    page_bytes = 8 * config.num_attention_layers * PAGE_TOKENS * att.num_kv_heads * att.head_dim
    return CpuMemory(
        np.zeros(page_shape, np.float32),
        np.zeros(page_shape, np.float32),
        np.zeros((*slots, *window), np.float32),
        np.zeros((*slots, *state), np.float32),
        np.zeros((capacity.num_host_blocks, page_bytes), np.uint8),
    )
