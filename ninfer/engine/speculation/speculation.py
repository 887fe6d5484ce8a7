"""Speculation: the drafts of a decode batch, and what is asked of the draft model for the next one.

    guesses of all rows -> how much of each is worth its time -> cut by the session, to the budget
    -> proposals for the round after -> memory

A draft is cut where the session says that a token may not come or would end the answer. Drafts and
proposals get the pages that are to be had without pressure. What the draft model proposes for a row
is of use while nothing else was accepted since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ninfer.contract.drafting import DraftCosts, DraftCounts, DraftSource
from ninfer.contract.errors import NInferError
from ninfer.contract.program import NO_DRAFT, Draft, Program
from ninfer.contract.units import PAGE_TOKENS, RowOutput
from ninfer.engine.metrics import DraftMetrics
from ninfer.engine.request_record import RequestRecord
from ninfer.engine.settlement import call_session
from ninfer.engine.speculation.drafter import NO_GUESS, Drafter, Guess, Hope, MakeDrafter, Proposal
from ninfer.engine.speculation.lengths import choose_lengths, proposal_length

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One item a row in each; empty where no row has any.

    drafts         what is checked
    sources        who drafted it
    num_proposed   most tokens that the draft model is to propose for the round after
    """

    drafts: tuple[Draft, ...] = ()
    sources: tuple[DraftSource, ...] = ()
    num_proposed: tuple[int, ...] = ()


NO_ROUNDS: Final = RoundPlan()


class Speculation:
    """The Program's capacity says how many tokens a row may draft, and whether there is a draft
    model."""

    def __init__(
        self,
        program: Program,
        make_drafter: MakeDrafter,
        costs: DraftCosts,
        metrics: DraftMetrics,
    ) -> None:
        self._program = program
        self._make_drafter = make_drafter
        self._costs = costs
        self._metrics = metrics
        self._max_tokens = program.capacity.max_draft_tokens
        self._max_context = program.capacity.max_context
        self._has_model = program.capacity.has_draft_model

    def plan(self, records: Sequence[RequestRecord], is_sampled: Sequence[bool]) -> RoundPlan:
        """For rows that have their permit for one input each; those that draw nothing have no draft
        and no proposal. All inputs of the plan are reserved."""
        num_drawing = sum(is_sampled)
        guesses = [
            self._guess(record) if draws else NO_GUESS
            for record, draws in zip(records, is_sampled, strict=True)
        ]
        lengths = choose_lengths([guess.worths for guess in guesses], num_drawing, self._costs)
        drafts = [
            self._checked(record, guess.token_ids[:length]) if length else NO_DRAFT
            for record, guess, length in zip(records, guesses, lengths, strict=True)
        ]
        wanted = self._wanted_proposals(records, is_sampled, num_drawing)
        pairs = [
            self._reserve(*row) for row in zip(records, drafts, wanted, is_sampled, strict=True)
        ]
        return RoundPlan(
            _if_any(tuple(draft for draft, _ in pairs), lambda draft: bool(draft.token_ids)),
            tuple(guess.source for guess in guesses),
            _if_any(tuple(count for _, count in pairs), bool),
        )

    def note(
        self,
        records: Sequence[RequestRecord],
        plan: RoundPlan,
        outputs: Sequence[RowOutput],
        num_accepted: Sequence[int],
    ) -> None:
        """A unit was committed; its rows' records do not have the tokens yet."""
        for record, draft, source, output, count in zip(
            records,
            plan.drafts or (NO_DRAFT,) * len(records),
            plan.sources,
            outputs,
            num_accepted,
            strict=True,
        ):
            if draft.token_ids:
                num_right = min(len(output.drafts), count)
                record.draft_counts += DraftCounts.of_round(source, len(draft.token_ids), num_right)
                self._metrics.note(source, len(draft.token_ids), num_right)
            if output.proposal and count == len(output.tokens):
                record.proposal = Proposal(record.completion_tokens + count, output.proposal)

    def _drafter_of(self, record: RequestRecord) -> Drafter:
        if record.drafter is None:
            record.drafter = self._make_drafter(record.request, self._max_tokens)
        return record.drafter

    def _guess(self, record: RequestRecord) -> Guess:
        proposal = record.proposal
        is_new = proposal is not None and proposal.num_accepted == record.completion_tokens
        token_ids = proposal.token_ids if proposal is not None and is_new else ()
        return self._drafter_of(record).guess(record.accepted, token_ids, self._room(record))

    def _room(self, record: RequestRecord, num_taken: int = 0) -> int:
        """Most tokens of a draft when `num_taken` more were accepted: behind the last of them
        another one is produced."""
        room = record.budget.num_tokens - record.completion_tokens - num_taken - 1
        return max(0, min(room, self._max_tokens))

    def _checked(self, record: RequestRecord, token_ids: tuple[int, ...]) -> Draft:
        """As far as the session goes with it."""
        session = record.request.session
        try:
            masks = tuple(call_session(record, lambda: session.masks_behind(token_ids)))
        except NInferError as error:
            record.failure = error
            return NO_DRAFT
        return Draft(token_ids[: len(masks)], masks)

    def _wanted_proposals(
        self, records: Sequence[RequestRecord], is_sampled: Sequence[bool], num_drawing: int
    ) -> list[int]:
        if not self._has_model or not num_drawing:
            return [0] * len(records)
        hopes = [
            # This round takes a token at least.
            self._drafter_of(record).hope(self._room(record, 1)) if draws else Hope()
            for record, draws in zip(records, is_sampled, strict=True)
        ]
        length = proposal_length([hope.worths for hope in hopes], num_drawing, self._costs)
        return [min(max(length, int(hope.is_probe)), len(hope.worths)) for hope in hopes]

    def _reserve(
        self, record: RequestRecord, draft: Draft, num_proposed: int, draws: bool
    ) -> tuple[Draft, int]:
        """As much of draft and proposals as has room behind the row's next input."""
        num_drafted = len(draft.token_ids)
        if not draws or not num_drafted + num_proposed:
            return draft, 0
        handle = record.resident
        frontier = self._program.frontier(handle)
        num_proposed = min(num_proposed, self._max_context - frontier - 1 - num_drafted)
        if not self._program.reserve_units(handle, 1 + num_drafted + num_proposed):
            room = PAGE_TOKENS - 1 - frontier % PAGE_TOKENS
            num_drafted = min(num_drafted, room)
            num_proposed = min(num_proposed, room - num_drafted)
        return Draft(draft.token_ids[:num_drafted], draft.masks[:num_drafted]), num_proposed


def _if_any(items: tuple[T, ...], counts: Callable[[T], bool]) -> tuple[T, ...]:
    """All of them, or none when none counts."""
    return items if any(map(counts, items)) else ()
