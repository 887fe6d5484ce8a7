"""The one launched unit of a Program: its rows, its work and the checks of what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ninfer.contract.errors import InvariantError
from ninfer.contract.program import PendingBatch
from ninfer.contract.units import RowOutput, UnitRow
from ninfer.program.sequence_record import SequenceRecord
from ninfer.program.unit_work import UnitWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Unit(Generic[T]):
    """The launched unit. `batch` is None for a scoring unit, which settles itself. `goes_on`: the
    executor may have gone on with it."""

    sequences: tuple[SequenceRecord, ...]
    rows: tuple[UnitRow, ...]
    work: UnitWork[T]
    batch: PendingBatch | None = None
    goes_on: bool = False


def check_outputs(rows: Sequence[UnitRow], outputs: tuple[RowOutput, ...], vocab_size: int) -> None:
    """Raise InvariantError unless every row has just the answer it asked for."""
    if len(outputs) != len(rows):
        raise InvariantError(f"the executor answered {len(outputs)} of {len(rows)} rows")
    for row, output in zip(rows, outputs, strict=True):
        is_expected = row.sample is not None and output.is_finite and not output.is_dead_end
        if (output.token is not None) != is_expected:
            raise InvariantError("the executor answered a row with more or less than asked")
        if not _has_asked_scores(row, output):
            raise InvariantError("the executor scored more or less than asked")
        if output.token is not None and not 0 <= output.token.token_id < vocab_size:
            raise InvariantError(f"the executor chose token {output.token.token_id}")
        _check_drafts(row, output)
        _check_proposal(row, output, vocab_size)


def _check_drafts(row: UnitRow, output: RowOutput) -> None:
    """What a row says was right is the beginning of its draft."""
    accepted = [token.token_id for token in output.drafts]
    if accepted and (output.token is None or len(accepted) > len(row.checks)):
        raise InvariantError(f"the executor accepts {len(accepted)} of {len(row.checks)} drafts")
    if accepted and accepted != row.token_ids[1 : 1 + len(accepted)].tolist():
        raise InvariantError(f"the executor accepts {accepted}, which were not drafted")


def _check_proposal(row: UnitRow, output: RowOutput, vocab_size: int) -> None:
    """It was asked for, follows a token, and is of tokens."""
    proposal = output.proposal
    if proposal and (output.token is None or len(proposal) > row.num_proposed):
        raise InvariantError(f"the executor proposes {len(proposal)} tokens of {row.num_proposed}")
    if not all(0 <= token_id < vocab_size for token_id in proposal):
        raise InvariantError(f"the executor proposes tokens {proposal}")


def _has_asked_scores(row: UnitRow, output: RowOutput) -> bool:
    if row.score is None or not output.is_finite:
        return output.scores is None
    first = row.start + row.score.first + 1
    scores = output.scores
    return (
        scores is not None
        and scores.first == first
        and scores.stop == first + row.score.targets.shape[0]
    )


def check_accepted(outputs: tuple[RowOutput, ...], accepted: Sequence[int]) -> None:
    if len(accepted) != len(outputs):
        raise InvariantError(f"{len(accepted)} accepted counts for {len(outputs)} rows")
    for index, (output, count) in enumerate(zip(outputs, accepted, strict=True)):
        num_produced = len(output.tokens)
        if not 0 <= count <= num_produced:
            raise InvariantError(f"row {index} accepts {count} of {num_produced} tokens")


def num_taken_inputs(row: UnitRow, num_tokens: int) -> int:
    """Inputs of a row that lie behind it once it has taken so many of its tokens: all but those of
    its draft, and of these one for every token but the newest."""
    return int(row.token_ids.shape[0]) - len(row.checks) + max(num_tokens - 1, 0)
