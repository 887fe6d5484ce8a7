"""Forced tokens: those that a request's mask leaves no choice about are accepted without a draw.

They go into session, ledger and budget at once, and are fed to the model several in a unit, as is
what was fed before a pause. A row
keeps at least one token of its budget to be drawn, so that only drawn tokens end an answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ninfer.contract.generation import OutputPreview
from ninfer.contract.program import Program
from ninfer.contract.sampling import GeneratedToken
from ninfer.engine.request_record import RequestRecord
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.settlement import adopt, call_session

_FEWEST_IN_A_UNIT: Final = 2
"""One input alone goes with the next decode step of all."""


class Forced(NamedTuple):
    token_ids: tuple[int, ...]
    preview: OutputPreview


def adopt_forced(record: RequestRecord) -> Forced | None:
    """What must come next in a row that goes on, adopted by its session; None for nothing. Raises
    NInferError when the session fails."""
    request = record.request
    mask, room = request.mask, record.budget.num_tokens - record.completion_tokens - 1
    # Log probabilities of a token come from logits behind the one before it.
    if mask is None or room < 1 or request.sampling.top_logprobs is not None:
        return None
    token_ids = mask.forced()[:room]
    if not token_ids:
        return None
    tokens = [GeneratedToken(token_id) for token_id in token_ids]
    preview = call_session(record, lambda: request.session.preview(tokens, None))
    if preview.finish is not None or preview.accepted != len(tokens):
        return None
    adopt(record, preview)
    return Forced(token_ids, preview)


def accept_forced(
    record: RequestRecord, forced: Forced, program: Program, scheduler: Scheduler
) -> None:
    """Put adopted tokens into the ledgers, to be fed before the next draw."""
    program.force(record.resident, forced.token_ids)
    record.accepted.extend(forced.token_ids)
    plan_inputs(record, program, scheduler)


def plan_inputs(record: RequestRecord, program: Program, scheduler: Scheduler) -> None:
    """Tell the scheduler what a ready row is to be fed before its next draw: forced tokens, or
    what was fed before a pause."""
    num_inputs = program.num_replay_left(record.resident)
    scheduler.note_forced(record.ticket, num_inputs if num_inputs >= _FEWEST_IN_A_UNIT else 0)
