"""One open sequence: what of it is committed, and the unit rows that extend it.

    tokens     prompt[0] .. prompt[n - 1], accepted[0], accepted[1], ..
    frontier   how many of them are in State and KV; the newest accepted token never is, the next
               decode step feeds it

After a resume the frontier may lie further back. What was fed before is fed again then, and draws
nothing: prompt inputs as prefill units, accepted tokens as decode rows.

The record decides nothing and frees nothing; `program.py` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.masks import TokenMask
from ninfer.contract.program import NO_DRAFT, Draft, SequenceHandle, SequenceSpec
from ninfer.contract.units import ROOT_SLOT, SampleRow, ScoreRow, UnitRow
from ninfer.program.token_counts import TokenCounts


class SequenceRecord:
    """State of one lane's sequence.

    num_prompt         tokens of the prompt
    page_table         [max pages] int32; entries from num_reserved on are meaningless
    num_reserved       pages set aside for it
    accepted           tokens chosen so far, in order
    slot               StateImage of the frontier
    provisional_slot   where the next unit writes its StateImage, once reserved
    last_slot          where the one before `slot` was: the next to be asked for
    owns_tail          the page that the frontier lies in may be written behind it: nobody else does
    copies             (original, copy) of that page, which the next unit makes first
    is_pending         a launched unit has this row
    has_ended          a unit's result was refused; the sequence can only be closed
    """

    __slots__ = (
        "_counts",
        "_mapped",
        "_prompt_ids",
        "_residence",
        "accepted",
        "copies",
        "frontier",
        "handle",
        "has_ended",
        "is_pending",
        "last_slot",
        "num_prompt",
        "num_reserved",
        "owns_tail",
        "page_table",
        "provisional_slot",
        "slot",
        "spec",
    )

    def __init__(self, handle: SequenceHandle, spec: SequenceSpec, max_pages: int) -> None:
        self.handle = handle
        self.spec = spec
        self.page_table: IntArray = np.zeros(max_pages, dtype=np.int32)
        self.num_prompt = spec.prompt.num_tokens
        self.num_reserved = 0
        self.accepted: list[int] = []
        self.frontier = 0
        self.slot = ROOT_SLOT
        self.provisional_slot: int | None = None
        self.last_slot = ROOT_SLOT
        self._residence = (handle.lane, handle.generation)
        self.owns_tail = True
        self.copies: tuple[tuple[int, int], ...] = ()
        self.is_pending = False
        self.has_ended = False
        self._mapped = self.page_table[:0]
        self._counts = TokenCounts()
        self._prompt_ids: IntArray = np.empty(0, dtype=np.int32)
        if spec.sampling.counts_tokens:
            self._prompt_ids = np.unique(spec.prompt.token_ids).astype(np.int32)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens behind the frontier."""
        return max(0, self.num_prompt - self.frontier)

    @property
    def num_replay_left(self) -> int:
        """Inputs behind the frontier that were fed before; 0 when nothing was accepted."""
        if not self.accepted:
            return 0
        return self.num_prompt + len(self.accepted) - 1 - self.frontier

    def accept(self, token_id: int) -> None:
        """Append to the ledger."""
        self.accepted.append(token_id)
        if self.spec.sampling.counts_tokens:
            self._counts.add(token_id)

    def restore(self, token_ids: Sequence[int]) -> None:
        """The ledger of a request that was paused."""
        self.accepted = list(token_ids)
        if self.spec.sampling.counts_tokens:
            self._counts = TokenCounts.of(token_ids)

    def prompt_row(self, num_tokens: int, num_pages: int, *, samples: bool) -> UnitRow:
        """The next `num_tokens` prompt inputs; `samples` at the prompt's last token only, and not
        when that token was drawn before."""
        prompt, start = self.spec.prompt, self.frontier
        stop = start + num_tokens
        positions = None if prompt.positions is None else prompt.positions[:, start:stop]
        is_drawn = samples and stop == self.num_prompt and not self.accepted
        sample = self._sample_row(stop) if is_drawn else None
        score = self._score_row(start, stop)
        return self._unit_row(prompt.token_ids[start:stop], num_pages, positions, sample, score)

    def decode_row(self, num_pages: int, draft: Draft = NO_DRAFT, num_proposed: int = 0) -> UnitRow:
        """The accepted token that belongs to the frontier; only the newest one draws another, and
        only behind that one there can be a draft and proposals."""
        index = self.frontier - self.num_prompt
        token_ids = np.array([self.accepted[index], *draft.token_ids], dtype=np.int32)
        positions = self._positions_ahead(token_ids.size)
        if index != len(self.accepted) - 1:
            return self._unit_row(token_ids, num_pages, positions, None)
        *checks, last = (self._sample_row(self.frontier + 1), *self._samples_ahead(draft))
        row = self._unit_row(token_ids, num_pages, positions, last, checks=tuple(checks))
        return replace(row, num_proposed=num_proposed) if num_proposed else row

    def replay_row(self, num_tokens: int, num_pages: int) -> UnitRow:
        """The next `num_tokens` accepted tokens, none of them the newest."""
        first = self.frontier - self.num_prompt
        positions = self._positions_ahead(num_tokens)
        token_ids = np.array(self.accepted[first : first + num_tokens], dtype=np.int32)
        row = self._unit_row(token_ids, num_pages, positions, None)
        return replace(row, is_replayed=True)

    def _unit_row(
        self,
        token_ids: IntArray,
        num_pages: int,
        positions: IntArray | None,
        sample: SampleRow | None,
        score: ScoreRow | None = None,
        checks: tuple[SampleRow, ...] = (),
    ) -> UnitRow:
        if self._mapped.size != num_pages:
            # A view: units share what they see of it, and reserved entries never change under one.
            self._mapped = self.page_table[:num_pages]
            self._mapped.flags.writeable = False
        return UnitRow(
            token_ids=token_ids,
            start=self.frontier,
            page_table=self._mapped,
            read_slot=self.slot,
            write_slot=ROOT_SLOT if self.provisional_slot is None else self.provisional_slot,
            positions=positions,
            sample=sample,
            score=score,
            copies=self.copies,
            residence=self._residence,
            checks=checks,
        )

    def _score_row(self, start: int, stop: int) -> ScoreRow | None:
        """Of the prompt inputs [start, stop): the asked tokens behind them."""
        scoring, token_ids = self.spec.scoring, self.spec.prompt.token_ids
        if scoring is None or self.accepted:
            return None
        first, last = max(scoring.first, start + 1), min(stop + 1, self.num_prompt)
        if first >= last:
            return None
        return ScoreRow(first - start - 1, token_ids[first:last], scoring.num_top)

    def _positions_ahead(self, num_tokens: int) -> IntArray | None:
        """Rotary positions [3, n] of the next tokens of the answer, None when they are ordinals."""
        delta = self.spec.prompt.rope_delta
        if delta == 0:
            return None
        ordinals = np.arange(self.frontier, self.frontier + num_tokens, dtype=np.int32)
        return np.tile(ordinals + delta, (3, 1))

    def _samples_ahead(self, draft: Draft) -> Iterator[SampleRow]:
        """Behind each drafted token, as if it and those before it were accepted."""
        counts = self._counts.copy() if self.spec.sampling.counts_tokens else self._counts
        masks = draft.masks or (None,) * len(draft.token_ids)
        for ahead, (token_id, mask) in enumerate(zip(draft.token_ids, masks, strict=True), 1):
            if self.spec.sampling.counts_tokens:
                counts.add(token_id)
            yield self._sample_row(self.frontier + 1 + ahead, ahead, counts, mask)

    def _sample_row(
        self,
        position: int,
        num_ahead: int = 0,
        counts: TokenCounts | None = None,
        mask: TokenMask | None = None,
    ) -> SampleRow:
        """`num_ahead` drafted tokens come before it; `counts` and `mask` are then those behind
        them."""
        is_suppressed = len(self.accepted) + num_ahead < self.spec.min_tokens
        if num_ahead == 0:
            mask = self.spec.mask
        counts = counts or self._counts
        return SampleRow(
            params=self.spec.sampling,
            position=position,
            generated_ids=counts.token_ids,
            generated_counts=counts.counts,
            prompt_ids=self._prompt_ids,
            suppressed_ids=self.spec.suppressed_ids if is_suppressed else (),
            mask=mask if mask is not None and mask.is_active else None,
        )
