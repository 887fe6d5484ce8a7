"""Workspace: all device memory of the executor but the weights, carved from one allocation.

    KV pages and StateImages, what a unit computes in between, the inputs of decode and of prefill
    units, the sampler's lists and results

Measuring and carving are the same code, so a plan is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.kernels.library import DeviceLimits
from ninfer.ops import rotary
from ninfer.ops.attention_prepare import RotaryTables
from ninfer.program.executors import cuda_inputs
from ninfer.program.executors.cuda_buffers import (
    SMALL_TOKENS,
    UnitBuffers,
    UnitSizes,
    carve_buffers,
)
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitInputs
from ninfer.program.executors.cuda_memory import CudaMemory, carve_memory
from ninfer.program.executors.cuda_round_buffers import RoundBuffers, carve_rounds
from ninfer.program.executors.cuda_sampler import CudaSampler, SamplerTensors, carve_sampler
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import WeightPlan
from ninfer.program.executors.cuda_window import WindowBlock, carve_window

_ALL_BITS = 0xFF


@dataclass(frozen=True, slots=True)
class WorkspaceTensors:
    """`persistent_bytes` of the arena hold `memory`; the rest is the workspace of a plan."""

    memory: CudaMemory
    persistent_bytes: int
    buffers: UnitBuffers
    sampler: SamplerTensors
    decode_block: DeviceTensor
    prefill_block: DeviceTensor
    page_tables: DeviceTensor
    rope_inverse: DeviceTensor
    rope_axes: DeviceTensor
    small_window: WindowBlock
    rounds: RoundBuffers | None


def carve_workspace(
    arena: Arena,
    config: ModelConfig,
    weights: WeightPlan,
    capacity: Capacity,
    limits: DeviceLimits,
    *,
    kv_dtype: str,
) -> WorkspaceTensors:
    """InvariantError when the arena is too small."""
    memory = carve_memory(arena, config, capacity, kv_dtype, weights.draft_shape)
    persistent_bytes = arena.used_bytes
    lanes = capacity.max_concurrency
    max_pages = -(-capacity.max_context // PAGE_TOKENS)
    sizes = UnitSizes.of(capacity)
    return WorkspaceTensors(
        memory=memory,
        persistent_bytes=persistent_bytes,
        buffers=carve_buffers(arena, config, weights, sizes, limits, max_pages=max_pages),
        sampler=carve_sampler(
            arena,
            max_rows=lanes * (1 + capacity.max_draft_tokens),
            max_lists=lanes,
            vocab_size=config.vocab_size,
            max_context=capacity.max_context,
        ),
        decode_block=arena.take((cuda_inputs.block_bytes(lanes, lanes),), "uint8"),
        prefill_block=arena.take((cuda_inputs.block_bytes(1, capacity.prefill_chunk),), "uint8"),
        # The last row is the prefill unit's.
        page_tables=arena.take((lanes + 1, max_pages), "int32"),
        rope_inverse=arena.take((config.attention.rope.rotary_dim // 2,), "float32"),
        rope_axes=arena.take((config.attention.rope.rotary_dim // 2,), "int32"),
        small_window=carve_window(arena, max_rows=1, max_columns=SMALL_TOKENS, max_pages=max_pages),
        rounds=carve_rounds(arena, config, capacity, weights, sizes),
    )


class Workspace:
    """The carved tensors with the inputs and the sampler over them."""

    def __init__(self, driver: CudaDriver, tensors: WorkspaceTensors, config: ModelConfig) -> None:
        """Queues the bytes that Ops want to find: slots of zeros, and their scratch at rest."""
        tables, lanes = tensors.page_tables, tensors.page_tables.shape[0] - 1
        self.memory = tensors.memory
        self.buffers = tensors.buffers
        self.rounds = tensors.rounds
        self.small_window = tensors.small_window
        self.prefill_inputs = UnitInputs(
            driver, tensors.prefill_block, tables.rows(lanes, lanes + 1)
        )
        self.sampler = CudaSampler(driver, tensors.sampler, vocab_size=config.vocab_size)
        self.decode_inputs = UnitInputs(
            driver, tensors.decode_block, tables.rows(0, lanes), self.sampler.token_ids
        )
        self._driver = driver
        pinned = driver.allocate_pinned(_scored_bytes(tensors.buffers.logits))
        self._scores: Float32Array = pinned.view(np.float32)
        for state in (self.memory.conv, self.memory.recurrent, self.memory.hidden):
            if state is not None:
                driver.fill(state.address, 0, state.num_bytes)
        frequencies = rotary.frequencies(config.attention.rope)
        self.rope = RotaryTables(tensors.rope_inverse, tensors.rope_axes, frequencies.scale)
        driver.upload(tensors.rope_inverse.address, frequencies.inverse)
        driver.upload(tensors.rope_axes.address, frequencies.axes)
        driver.synchronize()
        partials = self.buffers.partials
        driver.fill(partials.address, _ALL_BITS, partials.num_bytes)

    def logits(self, num_rows: int) -> DeviceTensor:
        """Where the logits f32 [num_rows, V] of a unit go."""
        return self.buffers.logits.rows(0, num_rows)

    def queue_scores(self, logits: DeviceTensor) -> None:
        """Queue the copy of logits to the host."""
        rows, row_stride = logits.shape[0], logits.row_stride
        self._driver.download(self._scores[: rows * row_stride], logits.address)

    def read_scores(self, num_rows: int) -> Float32Array:
        """[num_rows, V], valid until the next copy."""
        vocab_size, row_stride = self.buffers.logits.shape[1], self.buffers.logits.row_stride
        rows = self._scores[: num_rows * row_stride].reshape(num_rows, row_stride)
        return rows[:, :vocab_size]


def _scored_bytes(logits: DeviceTensor) -> int:
    return logits.shape[0] * logits.row_stride * logits.itemsize
