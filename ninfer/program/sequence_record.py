"""One open sequence: what of it is committed, and the unit rows that extend it.

    tokens     prompt[0] .. prompt[n - 1], accepted[0], accepted[1], ..
    frontier   how many of them are in State and KV; the newest accepted token never is, the next
               decode step feeds it

The record decides nothing and frees nothing; `program.py` writes it.
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import SequenceHandle, SequenceSpec
from ninfer.contract.units import ROOT_SLOT, SampleRow, UnitRow
from ninfer.program.token_counts import TokenCounts


class SequenceRecord:
    """State of one lane's sequence.

    page_table         [max pages] int32; entries from the reserved extent on are meaningless
    accepted           tokens chosen so far, in order
    slot               StateImage of the frontier
    provisional_slot   where the next unit writes its StateImage, once reserved
    is_pending         a launched unit has this row
    has_ended          a unit's result was refused; the sequence can only be closed
    """

    __slots__ = (
        "_counts",
        "_mapped",
        "_prompt_ids",
        "accepted",
        "frontier",
        "handle",
        "has_ended",
        "is_pending",
        "page_table",
        "provisional_slot",
        "slot",
        "spec",
    )

    def __init__(self, handle: SequenceHandle, spec: SequenceSpec, max_pages: int) -> None:
        self.handle = handle
        self.spec = spec
        self.page_table: IntArray = np.zeros(max_pages, dtype=np.int32)
        self.accepted: list[int] = []
        self.frontier = 0
        self.slot = ROOT_SLOT
        self.provisional_slot: int | None = None
        self.is_pending = False
        self.has_ended = False
        self._mapped = self.page_table[:0]
        self._counts: TokenCounts | None = None
        self._prompt_ids: IntArray = np.empty(0, dtype=np.int32)
        if spec.sampling.counts_tokens:
            self._counts = TokenCounts()
            self._prompt_ids = np.unique(spec.prompt.token_ids).astype(np.int32)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens behind the frontier."""
        return max(0, self.spec.prompt.num_tokens - self.frontier)

    def accept(self, token_id: int) -> None:
        """Append to the ledger."""
        self.accepted.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)

    def prompt_row(self, num_tokens: int, num_pages: int, *, samples: bool) -> UnitRow:
        """The next `num_tokens` prompt inputs; `samples` at the prompt's last token only."""
        prompt, start = self.spec.prompt, self.frontier
        stop = start + num_tokens
        positions = None if prompt.positions is None else prompt.positions[:, start:stop]
        sample = self._sample_row(stop) if samples and stop == prompt.num_tokens else None
        return self._unit_row(prompt.token_ids[start:stop], num_pages, positions, sample)

    def decode_row(self, num_pages: int) -> UnitRow:
        """The newest accepted token as the input at the frontier."""
        delta = self.spec.prompt.rope_delta
        positions = None
        if delta != 0:
            positions = np.full((3, 1), self.frontier + delta, dtype=np.int32)
        token_ids = np.array([self.accepted[-1]], dtype=np.int32)
        return self._unit_row(token_ids, num_pages, positions, self._sample_row(self.frontier + 1))

    def _unit_row(
        self,
        token_ids: IntArray,
        num_pages: int,
        positions: IntArray | None,
        sample: SampleRow | None,
    ) -> UnitRow:
        if self.provisional_slot is None:
            raise InvariantError(f"{self.spec.request_id}: a unit without a StateImage slot")
        if self._mapped.size != num_pages:
            # Reserved entries never change, so units may share what they see of them.
            self._mapped = self.page_table[:num_pages]
            self._mapped.flags.writeable = False
        return UnitRow(
            token_ids=token_ids,
            start=self.frontier,
            page_table=self._mapped,
            read_slot=self.slot,
            write_slot=self.provisional_slot,
            positions=positions,
            sample=sample,
        )

    def _sample_row(self, position: int) -> SampleRow:
        counts, nothing = self._counts, self._prompt_ids
        is_suppressed = len(self.accepted) < self.spec.min_tokens
        return SampleRow(
            params=self.spec.sampling,
            position=position,
            generated_ids=nothing if counts is None else counts.token_ids,
            generated_counts=nothing if counts is None else counts.counts,
            prompt_ids=self._prompt_ids,
            suppressed_ids=self.spec.suppressed_ids if is_suppressed else (),
        )
