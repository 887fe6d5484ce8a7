"""CpuDflash: a DFlash or DFlash2 draft model as the CPU executor's CpuDraft.

    absorb    taps -> fc -> norm -> keys and values of every layer, at the tokens' own ordinals
    propose   one pass of [newest token, MASK, .. MASK] at ordinals E, E+1, .. E+k over the context;
              row i of the final norm guesses the token at E+i

Keys of ordinal p follow from the taps of p alone, so nothing has to be rolled back or kept beside
the pages. Sliding layers keep all ordinals, too: a window is a mask. Positions are cache ordinals;
sequences with pictures, where the target's are not, get no guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import embedding, linear, rms_norm, rotary
from ninfer.program.executors.cpu_batch import TokenBatch
from ninfer.program.executors.cpu_dflash_head import DflashHead
from ninfer.program.executors.cpu_dflash_layers import Blocks, DflashLayerModel, Weights
from ninfer.program.executors.cpu_draft import CpuDraft, DraftTarget, ProposalRow
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.draft_shape import DraftShape, dflash_shape


class DflashModel:
    """Implements DraftModel.

    `weights` are keyed by ModelObject.name, float32, and are not copied. `token_ids` [Vd] are the
    tokens of the rows of its own head, if they are not all; ids from `num_token_ids` on are no
    tokens and never guessed.
    """

    def __init__(
        self,
        config: DflashConfig,
        weights: Weights,
        token_ids: NDArray[np.int64] | None,
        num_token_ids: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._token_ids = token_ids
        self._num_token_ids = num_token_ids

    @property
    def shape(self) -> DraftShape:
        return dflash_shape(self._config)

    def build(self, target: DraftTarget, memory: CpuMemory) -> CpuDraft:
        head = DflashHead(self._config, self._weights, self._token_ids, self._num_token_ids, target)
        return CpuDflash(self._config, self._weights, head, target, memory)


class CpuDflash:
    """Implements CpuDraft."""

    def __init__(
        self,
        config: DflashConfig,
        weights: Weights,
        head: DflashHead,
        target: DraftTarget,
        memory: CpuMemory,
    ) -> None:
        self._config = config
        self._target = target
        self._head = head
        self._embed_tokens = weights.get("embed_tokens")
        self._fc = weights["fc"]
        self._hidden_norm = weights["hidden_norm"]
        self._norm = weights["norm"]
        self._frequencies = rotary.frequencies(config.attention.rope)
        self._layers = tuple(
            DflashLayerModel(config, layer, f"layers.{index}", weights, *pages)
            for index, (layer, pages) in enumerate(
                zip(
                    config.layers,
                    zip(memory.draft_k_pages, memory.draft_v_pages, strict=True),
                    strict=True,
                )
            )
        )

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._config.tap_layers

    def absorb(
        self,
        batch: TokenBatch,
        hidden: FloatArray,
        taps: FloatArray,
        num_right: Sequence[int],
    ) -> None:
        context = rms_norm.reference(
            linear.tiled(taps, self._fc), self._hidden_norm, eps=self._config.rms_norm_eps
        )
        cos, sin = self._angles(
            np.concatenate(
                [
                    np.arange(segment.start, segment.start + segment.last - segment.first)
                    for segment in batch.segments
                ]
            )
        )
        for layer in self._layers:
            layer.absorb(context, cos, sin, batch.slot_mapping)

    def propose(self, rows: Sequence[ProposalRow]) -> list[tuple[int, ...]]:
        sizes = [self._num_guesses(row) for row in rows]
        asked = [(row, size) for row, size in zip(rows, sizes, strict=True) if size]
        if not asked:
            return [()] * len(rows)
        guesses = iter(self._guess(asked))
        return [next(guesses) if size else () for size in sizes]

    def _num_guesses(self, row: ProposalRow) -> int:
        if (row.positions != row.ordinal).any():
            return 0
        return min(row.num_tokens, self._config.block_size - 1)

    def _guess(self, asked: Sequence[tuple[ProposalRow, int]]) -> list[tuple[int, ...]]:
        blocks = self._blocks(asked)
        hidden = self._embed(np.concatenate([self._inputs(row, size) for row, size in asked]))
        for layer in self._layers:
            layer.run(hidden, blocks)
        hidden = rms_norm.reference(hidden, self._norm, eps=self._config.rms_norm_eps)
        return self._head.guess(hidden[blocks.columns > 0], asked)

    def _inputs(self, row: ProposalRow, size: int) -> NDArray[np.int64]:
        return np.array([row.token_id, *[self._config.mask_token_id] * size])

    def _blocks(self, asked: Sequence[tuple[ProposalRow, int]]) -> Blocks:
        spans, first = [], 0
        for row, size in asked:
            spans.append((first, first + size + 1, row.ordinal, row.page_table))
            first += size + 1
        columns = np.concatenate([np.arange(size + 1) for _, size in asked])
        starts = np.concatenate([np.full(size + 1, row.ordinal) for row, size in asked])
        return Blocks(tuple(spans), columns, *self._angles(starts + columns))

    def _embed(self, token_ids: NDArray[np.int64]) -> FloatArray:
        if self._embed_tokens is None:
            hidden = self._target.embed(token_ids.astype(np.int32))
        else:
            hidden = embedding.reference(token_ids, self._embed_tokens)
        hidden *= np.float32(self._config.embedding_scale)
        return hidden

    def _angles(self, ordinals: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        positions = np.broadcast_to(ordinals, (3, ordinals.size))
        return rotary.angles(positions, self._frequencies)
