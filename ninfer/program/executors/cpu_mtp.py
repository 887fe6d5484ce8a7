"""CpuMtp: the multi-token prediction module of the Qwen3.5 family as a draft model.

    u   = fc(concat(norm_embedding(embed(x_p)), norm_hidden(h_(p-1))))    h: target, final norm
    m_p = norm(layer(u))                 one decoder layer, rotated at p; keys in the KV pages
    the target's head on m_p guesses x_(p+1);  then (x_(p+1), m_p) is the next pair, and so on

The pair at cache ordinal p depends on the tokens up to x_p alone, so what was absorbed of ordinals
below a frontier is right for every continuation. The h before the frontier is a plane of the
StateImage; at ordinal 0 it is the zeros of the root. Absorbing takes the layer's keys and values
only. A chain's keys lie behind the frontier; the next unit writes them anew.

Source: DeepSeek-V3 (arXiv:2412.19437) section 2.2; config key mtp_num_hidden_layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.model import MlpKind, ModelConfig
from ninfer.contract.units import ROOT_SLOT, UnitRow
from ninfer.ops import linear, rms_norm, rotary
from ninfer.program.executors.cpu_batch import TokenBatch, decode_batch
from ninfer.program.executors.cpu_draft import CpuDraft, DraftTarget, ProposalRow, choose
from ninfer.program.executors.cpu_layers import (
    AttentionMixer,
    DecoderLayer,
    Weights,
    check_weights,
    mlp_of,
)
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.draft_shape import DraftShape, mtp_shape

_LAYER: Final = "mtp.layers.0"


class MtpModel:
    """Implements DraftModel. `weights` has the objects of component mtp, float32, not copied."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_weights(config, weights, "mtp")
        self._config = config
        self._weights = weights
        self._shape = mtp_shape(config)

    @property
    def shape(self) -> DraftShape:
        return self._shape

    def build(self, target: DraftTarget, memory: CpuMemory) -> CpuDraft:
        return CpuMtp(self._config, self._weights, target, memory)


class CpuMtp:
    """Implements CpuDraft."""

    def __init__(
        self, config: ModelConfig, weights: Weights, target: DraftTarget, memory: CpuMemory
    ) -> None:
        offset = np.float32(config.norm_offset)
        self._eps = config.rms_norm_eps
        self._norm_embedding = weights["mtp.norm_embedding"] + offset
        self._norm_hidden = weights["mtp.norm_hidden"] + offset
        self._fc = weights["mtp.fc"]
        self._norm = weights["mtp.norm"] + offset
        pages = memory.draft_k_pages[0], memory.draft_v_pages[0]
        self._mixer = AttentionMixer(config, _LAYER, weights, *pages)
        kind = MlpKind.DENSE if config.moe is None else MlpKind.MOE
        mlp = mlp_of(config, kind, _LAYER, weights)
        self._layer = DecoderLayer(config, _LAYER, weights, self._mixer, mlp)
        self._hidden = memory.hidden
        self._target = target
        self._frequencies = rotary.frequencies(config.attention.rope)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def absorb(
        self,
        batch: TokenBatch,
        hidden: FloatArray,
        taps: FloatArray,
        num_right: Sequence[int],
    ) -> None:
        first = batch.row_first
        before = np.empty_like(hidden)
        before[1:] = hidden[:-1]
        before[first] = self._hidden[batch.read_slots]
        joined = self._join(batch.token_ids, before, batch.project)
        self._mixer.write_keys(self._layer.mixer_input(joined), batch)
        self._hidden[batch.write_slots] = hidden[first + np.array(num_right) - 1]

    def propose(self, rows: Sequence[ProposalRow]) -> list[tuple[int, ...]]:
        """Step by step, all rows in one product that still go on."""
        proposals = [list[int]() for _ in rows]
        token_ids = [row.token_id for row in rows]
        hidden = [row.hidden for row in rows]
        going = list(range(len(rows)))
        step = 0
        while going := [index for index in going if step < rows[index].num_tokens]:
            inputs = tuple(_step_row(rows[index], token_ids[index], step) for index in going)
            batch = decode_batch(inputs, self._frequencies)
            outputs = self.run(batch, np.stack([hidden[index] for index in going]))
            logits = self._target.head(outputs, batch.project)
            for place, index in enumerate(tuple(going)):
                row = rows[index]
                token_id = choose(logits[place], row.params, row.ordinal + 1 + step)
                if token_id is None:
                    going.remove(index)
                    continue
                proposals[index].append(token_id)
                token_ids[index], hidden[index] = token_id, outputs[place]
            step += 1
        return [tuple(proposal) for proposal in proposals]

    def run(self, batch: TokenBatch, hidden: FloatArray) -> FloatArray:
        """m [N, C] of the pairs of the batch's tokens and `hidden` [N, C]; their keys are
        written."""
        stream = self._join(batch.token_ids, hidden, batch.project)
        self._layer.run(stream, batch)
        return rms_norm.reference(stream, self._norm, eps=self._eps)

    def _join(
        self, token_ids: IntArray, hidden: FloatArray, project: linear.Projection
    ) -> FloatArray:
        embedded = self._target.embed(token_ids)
        pair = (
            rms_norm.reference(embedded, self._norm_embedding, eps=self._eps),
            rms_norm.reference(hidden, self._norm_hidden, eps=self._eps),
        )
        return project(np.concatenate(pair, axis=1), self._fc)


def _step_row(row: ProposalRow, token_id: int, step: int) -> UnitRow:
    """A step of a chain as a decode row; it touches no StateImage."""
    return UnitRow(
        token_ids=np.array([token_id], np.int32),
        start=row.ordinal + step,
        page_table=row.page_table,
        read_slot=ROOT_SLOT,
        write_slot=ROOT_SLOT,
        positions=(row.positions + step)[:, None],
    )
