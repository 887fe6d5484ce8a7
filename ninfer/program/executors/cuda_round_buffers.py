"""RoundBuffers: what rounds of drafts compute in between, carved once for the largest unit.

R rows of T columns, S = R * T; the draft model reads R rows of T + 1 columns. Of each flat buffer a
unit takes the first elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.ops import device_sampling
from ninfer.ops.device_sampling import MAX_TOP, SamplingOutputs
from ninfer.ops.draft_match import MatchOutputs, PairColumns
from ninfer.ops.draft_step import DraftChain, StepOutputs
from ninfer.ops.gdn_device import projection_width
from ninfer.ops.gdn_fold import LAYER
from ninfer.program.executors.cuda_buffers import UnitSizes, carve_logits
from ninfer.program.executors.cuda_dflash_buffers import DflashBuffers, carve_dflash
from ninfer.program.executors.cuda_sampler import results_of
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import WeightPlan
from ninfer.program.executors.cuda_window import WindowBlock, carve_window


@dataclass(frozen=True, slots=True)
class MatchBuffers:
    """int32, flat; `rows` bytes. What draft_match leaves."""

    rows: DeviceTensor
    accepted: DeviceTensor
    row_ends: DeviceTensor
    kept_columns: DeviceTensor
    token_ids: DeviceTensor
    sources: DeviceTensor
    ordinals: DeviceTensor
    rope_positions: DeviceTensor
    column_rows: DeviceTensor
    row_starts: DeviceTensor
    last_columns: DeviceTensor
    chain_ordinals: DeviceTensor
    chain_positions: DeviceTensor

    def outputs(self, num_rows: int, num_columns: int) -> MatchOutputs[DeviceTensor]:
        """Of a unit of these sizes."""
        pairs = num_rows * (num_columns + 1)
        return MatchOutputs(
            self.accepted.as_shape(num_rows),
            self.row_ends.as_shape(num_rows),
            self.kept_columns.as_shape(num_rows),
            PairColumns(
                self.token_ids.as_shape(pairs),
                self.sources.as_shape(pairs),
                self.ordinals.as_shape(pairs),
                self.rope_positions.as_shape(3, pairs),
                self.column_rows.as_shape(pairs),
                self.row_starts.as_shape(num_rows + 1),
                self.last_columns.as_shape(num_rows),
            ),
            DraftChain(
                self.chain_ordinals.as_shape(num_rows),
                self.chain_positions.as_shape(3, num_rows),
                self.rows.as_shape(num_rows * device_sampling.ROW.itemsize),
            ),
        )


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """bf16 unless said.

    output      [S, C] the target's output behind its final norm
    joined      flat: [N, 2 C] pairs of a token and the output before it
    last, normed   [R, C] of each row: the draft model's stream, and what it hands on
    token_ids, sources   int32 [R] the next pair of a chain
    proposals   int32, flat: [R, K]
    row_starts  int32 [R + 1] 0, 1, 2 ..: rows of one column
    results     int32, flat: what the sampler leaves of a draft
    logits      f32 [R, V] of a draft head; None without one
    """

    output: DeviceTensor
    joined: DeviceTensor
    last: DeviceTensor
    normed: DeviceTensor
    token_ids: DeviceTensor
    sources: DeviceTensor
    proposals: DeviceTensor
    row_starts: DeviceTensor
    results: DeviceTensor
    logits: DeviceTensor | None
    max_proposals: int

    def step_outputs(self, num_rows: int) -> StepOutputs[DeviceTensor]:
        return StepOutputs(
            self.token_ids.rows(0, num_rows),
            self.sources.rows(0, num_rows),
            self.proposals.as_shape(num_rows, self.max_proposals),
        )

    def sampling_outputs(self, num_rows: int) -> SamplingOutputs:
        return results_of(self.results.address, num_rows)


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """records bf16 [GDN layers, S, width] of their projections; fold_layers bytes: the table of
    gdn_fold; both None without GDN layers. draft is for an MTP module, dflash for a DFlash
    model."""

    window: WindowBlock
    records: DeviceTensor | None
    fold_layers: DeviceTensor | None
    match: MatchBuffers
    draft: DraftBuffers | None
    dflash: DflashBuffers | None


def carve_rounds(
    arena: Arena, config: ModelConfig, capacity: Capacity, weights: WeightPlan, sizes: UnitSizes
) -> RoundBuffers | None:
    """None when nothing is drafted."""
    if capacity.max_draft_tokens == 0:
        return None
    lanes, columns = capacity.max_concurrency, 1 + capacity.max_draft_tokens
    records, fold_layers = None, None
    if config.gdn is not None and config.num_gdn_layers > 0:
        num_layers, width = config.num_gdn_layers, projection_width(config.gdn)
        records = arena.take((num_layers, lanes * columns, width), "uint16")
        fold_layers = arena.take((num_layers * LAYER.itemsize,), "uint8")
    max_pages = -(-capacity.max_context // PAGE_TOKENS)
    has_draft_head = bool(weights.draft_head)
    draft, dflash = None, None
    if weights.dflash is not None:
        dflash = carve_dflash(
            arena,
            weights.dflash,
            capacity,
            max_tokens=sizes.max_tokens,
            has_draft_head=has_draft_head,
        )
    elif capacity.has_draft_model:
        draft = _carve_draft(arena, config, capacity, has_draft_head=has_draft_head)
    return RoundBuffers(
        window=carve_window(arena, max_rows=lanes, max_columns=columns, max_pages=max_pages),
        records=records,
        fold_layers=fold_layers,
        match=_carve_match(arena, lanes, columns),
        draft=draft,
        dflash=dflash,
    )


def _carve_match(arena: Arena, lanes: int, columns: int) -> MatchBuffers:
    pairs = lanes * (columns + 1)
    sizes = (
        lanes, lanes, lanes, pairs, pairs, pairs, 3 * pairs, pairs, lanes + 1, lanes, lanes,
        3 * lanes,
    )  # fmt: skip
    rows = arena.take((lanes * device_sampling.ROW.itemsize,), "uint8")
    return MatchBuffers(rows, *(arena.take((size,), "int32") for size in sizes))


def _carve_draft(
    arena: Arena, config: ModelConfig, capacity: Capacity, *, has_draft_head: bool
) -> DraftBuffers:
    lanes, hidden = capacity.max_concurrency, config.hidden_size
    columns, proposals = 1 + capacity.max_draft_tokens, capacity.max_draft_tokens
    joined = max(lanes * (columns + 1), capacity.prefill_chunk)
    return DraftBuffers(
        output=arena.take((lanes * columns, hidden), "uint16"),
        joined=arena.take((joined * 2 * hidden,), "uint16"),
        last=arena.take((lanes, hidden), "uint16"),
        normed=arena.take((lanes, hidden), "uint16"),
        token_ids=arena.take((lanes,), "int32"),
        sources=arena.take((lanes,), "int32"),
        proposals=arena.take((lanes * proposals,), "int32"),
        row_starts=arena.take((lanes + 1,), "int32"),
        results=arena.take((lanes * (3 + 2 * MAX_TOP),), "int32"),
        logits=carve_logits(arena, lanes, config.vocab_size) if has_draft_head else None,
        max_proposals=proposals,
    )
