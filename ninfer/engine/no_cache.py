"""NoCache: the ContextPolicy of an engine, or of a request, without a context cache."""

from __future__ import annotations

from typing import Final

from ninfer.contract.cache import CacheUse, MissReason
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import Amounts, SequenceHandle, Transfer
from ninfer.engine.context_protocol import SourceChoice, TransferPlan

FROM_ROOT: Final = SourceChoice(source=None, use=CacheUse(miss=MissReason.DISABLED))


class NoCache:
    """Owns nothing, offers nothing, frees nothing."""

    def arrive(self, ticket: int, request: GenerationRequest) -> None:
        return None

    def choose(self, ticket: int) -> SourceChoice:
        return FROM_ROOT

    def unpin(self, ticket: int) -> None:
        return None

    def bound(self, ticket: int, choice: SourceChoice) -> None:
        return None

    def stops(self, ticket: int) -> tuple[int, ...]:
        return ()

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        return None

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        return False

    def left(self, ticket: int) -> None:
        return None

    def relieve(self, need: Amounts) -> bool:
        return False

    def clear_device(self) -> bool:
        return False

    def reclaimable(self) -> Amounts:
        return Amounts()

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        return None

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        return None

    def note_rates(
        self, *, prefill_tokens_s: float | None = None, move_tokens_s: float | None = None
    ) -> None:
        return None

    def flush(self) -> None:
        return None
