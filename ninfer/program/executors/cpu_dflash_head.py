"""DflashHead: what the rows behind a DFlash model's final norm guess.

    DFlash     each place by its own logits
    DFlash2    the walk of `dflash_selector` along the block

Tokens are drawn with the row's parameters and the noise that its own choices will have. The head is
the target's, or one of its own with a row for some tokens only. Rows that stand for no token of the
tokenizer are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, FloatArray
from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import dflash_logits, dflash_selector, linear, sampling
from ninfer.ops.dflash_selector import Codebooks
from ninfer.program.executors.cpu_draft import DraftTarget, ProposalRow


class DflashHead:
    """`token_ids` [Vd]: the tokens of the rows of its own head; None: rows are tokens."""

    def __init__(
        self,
        config: DflashConfig,
        weights: Mapping[str, Float32Array],
        token_ids: NDArray[np.int64] | None,
        num_token_ids: int,
        target: DraftTarget,
    ) -> None:
        self._config = config
        self._target = target
        every = np.arange(config.head_vocab_size) if token_ids is None else token_ids
        self._rows = every < num_token_ids
        self._token_ids = every[self._rows]
        self._lm_head = weights.get("lm_head")
        self._codebooks: Codebooks | None = None
        if config.selector is not None:
            self._codebooks = Codebooks(
                weights["selector.predecessors"],
                weights["selector.successors"],
                min(config.selector.top_k, self._token_ids.size),
            )
            self._gate = weights["selector.hidden"]

    def guess(
        self, hidden: FloatArray, asked: Sequence[tuple[ProposalRow, int]]
    ) -> list[tuple[int, ...]]:
        """Of each sequence and its number of guesses; `hidden` [N, C] holds their rows one behind
        another. A sequence's guesses end before a place whose numbers are not finite."""
        logits = self._logits(hidden)
        if self._codebooks is None:
            return [tuple(self._by_place(part, row)) for part, row in _parted(logits, asked)]
        gates = linear.tiled(hidden, self._gate)
        return [
            dflash_selector.reference(
                part,
                self._token_ids,
                part_gates,
                self._codebooks,
                row.token_id,
                row.params,
                row.ordinal,
            )
            for (part, row), (part_gates, _) in zip(
                _parted(logits, asked), _parted(gates, asked), strict=True
            )
        ]

    def _logits(self, hidden: FloatArray) -> FloatArray:
        """[N, rows that stand for tokens]"""
        if self._lm_head is None:
            logits = self._target.head(hidden, linear.tiled)
        else:
            logits = linear.tiled(hidden, self._lm_head)
        return dflash_logits.reference(
            logits[:, self._rows], scale=self._config.logit_scale, cap=self._config.logit_softcap
        )

    def _by_place(self, logits: FloatArray, row: ProposalRow) -> Iterator[int]:
        for place, scores in enumerate(logits, start=1):
            if not np.isfinite(scores).all():
                return
            yield sampling.among(scores, self._token_ids, row.params, row.ordinal + place)


def _parted(
    rows: FloatArray, asked: Sequence[tuple[ProposalRow, int]]
) -> Iterator[tuple[FloatArray, ProposalRow]]:
    first = 0
    for row, size in asked:
        yield rows[first : first + size], row
        first += size
