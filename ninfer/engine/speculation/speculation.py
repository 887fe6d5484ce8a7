"""Speculation: the drafts of a decode batch.

A draft is cut where the session says that a token may not come or would end the answer, to the
budget, and to the pages that are to be had without pressure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.contract.errors import NInferError
from ninfer.contract.program import NO_DRAFT, Draft, Program
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.request_record import RequestRecord
from ninfer.engine.settlement import call_session
from ninfer.engine.speculation.drafter import MakeDrafter


class Speculation:
    """The Program's capacity says how many tokens a row may draft."""

    def __init__(self, program: Program, make_drafter: MakeDrafter) -> None:
        self._program = program
        self._make_drafter = make_drafter
        self._max_tokens = program.capacity.max_draft_tokens

    def drafts(
        self, records: Sequence[RequestRecord], is_sampled: Sequence[bool]
    ) -> tuple[Draft, ...]:
        """One for each row, which has its permit for one input; empty for those that draw nothing.
        With the draft, its inputs are reserved."""
        return tuple(
            self._draft(record, len(records)) if draws else NO_DRAFT
            for record, draws in zip(records, is_sampled, strict=True)
        )

    def _draft(self, record: RequestRecord, num_rows: int) -> Draft:
        drafter = record.drafter
        if drafter is None:
            drafter = record.drafter = self._make_drafter(record.request, self._max_tokens)
        room = record.budget.num_tokens - record.completion_tokens - 1
        token_ids = drafter.draft(record.accepted, num_rows, min(room, self._max_tokens))
        if not token_ids:
            return NO_DRAFT
        session = record.request.session
        try:
            masks = tuple(call_session(record, lambda: session.masks_behind(token_ids)))
        except NInferError as error:
            record.failure = error
            return NO_DRAFT
        num_tokens = self._reserve(record, len(masks))
        return Draft(token_ids[:num_tokens], masks[:num_tokens])

    def _reserve(self, record: RequestRecord, num_tokens: int) -> int:
        """How many of so many drafted tokens have room behind the row's next input."""
        handle = record.resident
        if num_tokens and not self._program.reserve_units(handle, 1 + num_tokens):
            return min(num_tokens, PAGE_TOKENS - 1 - self._program.frontier(handle) % PAGE_TOKENS)
        return num_tokens
