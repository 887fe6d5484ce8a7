"""DflashBuffers: what a DFlash draft model computes in between, carved once for the largest unit.

A round's blocks are R rows of W columns. N = columns of the largest unit, S = R times the most
columns of a row. Of each flat buffer a unit takes the first elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.units import Capacity
from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import device_sampling, rotary
from ninfer.ops.attention_prepare import RotaryTables
from ninfer.ops.device_sampling import MAX_TOP, SamplingOutputs
from ninfer.ops.dflash_block import BlockColumns
from ninfer.program.executors.cuda_buffers import carve_logits
from ninfer.program.executors.cuda_dflash_weights import layer_kinds
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_sampler import results_of
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.dflash_setup import DflashSetup


@dataclass(frozen=True, slots=True)
class SecondBuffers:
    """Of a DFlash2, bf16: convolved and output [S, C], dynamic [S, 2 * taps * groups], gates
    [S, rank]."""

    convolved: DeviceTensor
    output: DeviceTensor
    dynamic: DeviceTensor
    gates: DeviceTensor


@dataclass(frozen=True, slots=True)
class DflashBuffers:
    """bf16 unless said.

    taps        [N, taps * C] residual streams of the target behind its tapped layers
    columns     int32 and bytes, flat: BlockColumns
    normed      [S, C] behind the final norm
    results     int32, flat: what the sampler leaves of S columns
    proposals   int32, flat: [R, K]
    rope_inverse, rope_axes   f32 and int32 [half]
    head_logits f32 [S, Vd] of a head that has a row for some tokens only
    logits      f32 [S, V] of the draft's own choice; None: those of the target serve
    token_ids   int32 [Vd] tokens of the rows of such a head
    second      of a DFlash2
    """

    taps: DeviceTensor
    columns: tuple[DeviceTensor, ...]
    normed: DeviceTensor
    results: DeviceTensor
    proposals: DeviceTensor
    rope_inverse: DeviceTensor
    rope_axes: DeviceTensor
    head_logits: DeviceTensor | None
    logits: DeviceTensor | None
    token_ids: DeviceTensor | None
    second: SecondBuffers | None
    num_kinds: int
    max_proposals: int

    def block(self, num_rows: int, num_columns: int) -> BlockColumns[DeviceTensor]:
        """The inputs of blocks of these sizes."""
        count, kinds = num_rows * num_columns, self.num_kinds
        tokens, ordinals, positions, column_rows, starts, firsts, lasts, rows = self.columns
        return BlockColumns(
            token_ids=tokens.as_shape(count),
            ordinals=ordinals.as_shape(count),
            rope_positions=positions.as_shape(3, count),
            column_rows=column_rows.as_shape(count),
            row_starts=starts.as_shape(num_rows + 1),
            firsts=firsts.as_shape(kinds, count),
            lasts=lasts.as_shape(kinds, count),
            rows=rows.as_shape(count * device_sampling.ROW.itemsize),
        )

    def sampling_outputs(self, num_columns: int) -> SamplingOutputs:
        return results_of(self.results.address, num_columns)

    def proposed(self, num_rows: int) -> DeviceTensor:
        """int32 [R, K]"""
        return self.proposals.as_shape(num_rows, self.max_proposals)

    def upload_rotary(self, driver: CudaDriver, config: DflashConfig) -> RotaryTables:
        """Queue the frequencies of the draft's positions; blocks until they are there."""
        frequencies = rotary.frequencies(config.attention.rope)
        driver.upload(self.rope_inverse.address, frequencies.inverse)
        driver.upload(self.rope_axes.address, frequencies.axes)
        driver.synchronize()
        return RotaryTables(self.rope_inverse, self.rope_axes, frequencies.scale)


def carve_dflash(
    arena: Arena, setup: DflashSetup, capacity: Capacity, *, max_tokens: int, has_draft_head: bool
) -> DflashBuffers:
    """InvariantError when the arena is too small."""
    config = setup.config
    lanes, hidden = capacity.max_concurrency, config.hidden_size
    columns = lanes * (1 + capacity.max_draft_tokens)
    half = config.attention.rope.rotary_dim // 2
    is_partial = setup.token_ids is not None
    rows = config.head_vocab_size
    return DflashBuffers(
        taps=arena.take((max_tokens, len(config.tap_layers) * hidden), "uint16"),
        columns=_carve_columns(arena, lanes, columns, len(layer_kinds(config))),
        normed=arena.take((columns, hidden), "uint16"),
        results=arena.take((columns * (3 + 2 * MAX_TOP),), "int32"),
        proposals=arena.take((lanes * capacity.max_draft_tokens,), "int32"),
        rope_inverse=arena.take((half,), "float32"),
        rope_axes=arena.take((half,), "int32"),
        head_logits=carve_logits(arena, columns, rows) if is_partial else None,
        logits=carve_logits(arena, columns, config.vocab_size)
        if is_partial or has_draft_head
        else None,
        token_ids=arena.take((rows,), "int32") if is_partial else None,
        second=_carve_second(arena, config, columns),
        num_kinds=len(layer_kinds(config)),
        max_proposals=capacity.max_draft_tokens,
    )


def _carve_columns(
    arena: Arena, lanes: int, columns: int, num_kinds: int
) -> tuple[DeviceTensor, ...]:
    """In the order of BlockColumns."""
    sizes = (
        columns, columns, 3 * columns, columns, lanes + 1, num_kinds * columns, num_kinds * columns,
    )  # fmt: skip
    integers = (arena.take((size,), "int32") for size in sizes)
    return (*integers, arena.take((columns * device_sampling.ROW.itemsize,), "uint8"))


def _carve_second(arena: Arena, config: DflashConfig, columns: int) -> SecondBuffers | None:
    conv, selector = config.conv, config.selector
    if conv is None or selector is None:
        return None
    dynamic = 2 * conv.num_taps * (config.hidden_size // conv.group_size)
    return SecondBuffers(
        convolved=arena.take((columns, config.hidden_size), "uint16"),
        output=arena.take((columns, config.hidden_size), "uint16"),
        dynamic=arena.take((columns, dynamic), "uint16"),
        gates=arena.take((columns, selector.rank), "uint16"),
    )
