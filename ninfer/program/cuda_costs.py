"""CudaCosts: what a model costs in bytes on the CUDA executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ninfer.contract.model import ModelConfig
from ninfer.contract.units import Capacity
from ninfer.kernels.library import DeviceLimits
from ninfer.program.executors import cuda_memory
from ninfer.program.executors.cuda_tensor import Arena
from ninfer.program.executors.cuda_weights import WeightPlan
from ninfer.program.executors.cuda_workspace import carve_workspace

RESERVE_BYTES: Final = 1 << 30
"""Left free for the driver, cuBLAS, loaded kernels and graphs."""
_MOST_HOST_BYTES: Final = 8 << 30
_PREFILL_CHUNK: Final = 2048


@dataclass(frozen=True, slots=True)
class CudaCosts:
    """MemoryCosts of the CUDA executor, measured by the code that carves its memory."""

    config: ModelConfig
    weights: WeightPlan
    limits: DeviceLimits
    kv_dtype: str

    @property
    def default_prefill_chunk(self) -> int:
        return _PREFILL_CHUNK

    @property
    def default_budget(self) -> str:
        return "what is free on the device less 1 GiB"

    def default_budget_bytes(self, available_bytes: int) -> int:
        return max(0, available_bytes - RESERVE_BYTES)

    @property
    def default_cache_bytes(self) -> int | None:
        return None

    def default_host_bytes(self, host_bytes: int) -> int:
        return min(host_bytes // 4, _MOST_HOST_BYTES)

    def page_bytes(self) -> int:
        return cuda_memory.page_bytes(self.config, self.kv_dtype, self.weights.draft_shape)

    def slot_bytes(self) -> int:
        return cuda_memory.slot_bytes(self.config, self.weights.draft_shape)

    def workspace_bytes(self, capacity: Capacity) -> Mapping[str, int]:
        """Buffers, inputs and the sampler; what aligning pages and slots costs is among them."""
        arena = Arena()
        carve_workspace(
            arena, self.config, self.weights, capacity, self.limits, kv_dtype=self.kv_dtype
        )
        persistent = capacity.num_pages * self.page_bytes() + capacity.num_slots * self.slot_bytes()
        return {"activation_bytes": arena.used_bytes - persistent}
