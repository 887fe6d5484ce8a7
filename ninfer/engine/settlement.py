"""Settlement: what the outcome of a unit means for one row, judged before anything is committed.

The output session is the request's own code path; whatever it raises ends that request only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ninfer.contract.errors import InvariantError, NInferError, NonFiniteLogits
from ninfer.contract.generation import Finish, FinishReason, OutputPreview, OutputSession
from ninfer.contract.sampling import GeneratedToken
from ninfer.contract.units import RowOutput
from ninfer.engine.request_record import Phase, RequestRecord

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """At most one of token, preview, finish and error is set; none for a row that was to produce
    nothing (an inner prefill chunk, replay) or was cancelled.

    token     to accept; the request surely goes on, what the token shows can be asked for later
    preview   tokens to accept and what they show
    token_ids   of these tokens
    finish    the request ends without having produced output
    error     the request ends; its tokens are not accepted
    """

    token: GeneratedToken | None = None
    preview: OutputPreview | None = None
    finish: Finish | None = None
    error: NInferError | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        if self.token is not None:
            return 1
        return 0 if self.preview is None else self.preview.accepted


def judge_row(record: RequestRecord, output: RowOutput, *, is_sampled: bool) -> RowVerdict:
    """Pure but for the log. `is_sampled`: the unit was to produce a token for this row."""
    if record.failure is not None:
        return RowVerdict(error=record.failure)
    if not output.is_finite:
        place = f"after {record.completion_tokens} tokens of the answer"
        return RowVerdict(error=NonFiniteLogits(place))
    if record.is_cancelled or not is_sampled:
        return RowVerdict()
    if record.budget.num_tokens == 0:
        return RowVerdict(finish=Finish(record.budget.reason))
    if output.is_dead_end:
        return RowVerdict(error=_dead_end(record))
    if output.token is None:
        raise InvariantError(f"no token was produced for request {record.request_id}")
    try:
        return _judge_tokens(record, output.tokens)
    except NInferError as error:
        return RowVerdict(error=error)


def preview_accepted(record: RequestRecord, token: GeneratedToken) -> OutputPreview:
    """What the accepted `token` of a verdict shows. Raises NInferError."""
    session = record.request.session
    preview = call_session(record, lambda: session.preview((token,), None))
    if preview.accepted != 1 or preview.finish is not None:
        raise _broken_contract(record)
    return preview


def _judge_tokens(record: RequestRecord, tokens: tuple[GeneratedToken, ...]) -> RowVerdict:
    is_last = record.completion_tokens + len(tokens) >= record.budget.num_tokens
    limit: FinishReason | None = record.budget.reason if is_last else None
    session = record.request.session
    if not is_last and len(tokens) == 1 and _surely_goes_on(record, tokens[0]):
        return RowVerdict(token=tokens[0], token_ids=(tokens[0].token_id,))
    preview = call_session(record, lambda: session.preview(tokens, limit))
    is_cut = preview.accepted < len(tokens)
    if not 1 <= preview.accepted <= len(tokens) or ((is_last or is_cut) and preview.finish is None):
        raise _broken_contract(record)
    token_ids = tuple(token.token_id for token in tokens[: preview.accepted])
    return RowVerdict(preview=preview, token_ids=token_ids)


def _surely_goes_on(record: RequestRecord, token: GeneratedToken) -> bool:
    """Whether its session need not see the token before the next unit. Drafts of a request with a
    mask are cut by the session, which must know all that came before."""
    if record.phase is not Phase.DECODE_READY:
        return False
    if record.drafter is not None and record.request.mask is not None:
        return False
    session = record.request.session
    return call_session(record, lambda: session.goes_on_after(token))


def _dead_end(record: RequestRecord) -> NInferError:
    mask = record.request.mask
    if mask is None:
        return InvariantError(f"no token may come next in {record.request_id}")
    return mask.failure()


def _broken_contract(record: RequestRecord) -> InvariantError:
    return InvariantError(f"the output session of {record.request_id} broke its contract")


def call_session(record: RequestRecord, call: Callable[[], T]) -> T:
    """Run one OutputSession call. Whatever it raises comes out as an NInferError."""
    try:
        return call()
    except NInferError:
        raise
    except Exception as error:
        _logger.exception("request %s: the output session failed", record.request_id)
        raise InvariantError("the output could not be processed") from error


def adopt(record: RequestRecord, preview: OutputPreview) -> None:
    """Make `preview` the session's state. Raises NInferError when the session fails."""
    session = record.request.session
    record.reasoning_tokens, record.broken_calls = call_session(
        record, lambda: _commit_session(session, preview)
    )


def _commit_session(session: OutputSession, preview: OutputPreview) -> tuple[int, int]:
    """Adopt `preview`; returns the reasoning tokens and the broken calls so far."""
    session.commit(preview)
    return session.reasoning_tokens, session.broken_calls
