"""ContextPolicy: what the worker asks of the context cache, and when.

    arrive -> choose -> (bound | unpin) -> (reached)* -> finished? -> left    per request
    relieve, next_transfer, transferred                  under pressure; when transfers idle

All calls come from the worker, on the loop, between units; none of them waits. The policy owns
the checkpoints it captured, and nobody else releases them. Snapshots of paused requests are the
worker's; a request that lost its Snapshot is chosen for, and bound, once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ninfer.contract.cache import CacheUse, CheckpointId
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import Amounts, SequenceHandle, Source, Transfer, TransferKind


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """Where a request starts.

    source    a checkpoint on the device, or None: the empty state (unless `move` comes first)
    move      the checkpoint must come up a tier before it can be a source: begin this transfer,
              call `transferred`, then `choose` again
    use       what the request's usage says once it starts from here
    """

    source: Source | None
    use: CacheUse
    move: TransferPlan | None = None


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Arguments of Program.begin_transfer."""

    kind: TransferKind
    checkpoint: CheckpointId
    note: Mapping[str, object] | None = None


class ContextPolicy(Protocol):
    def arrive(self, ticket: int, request: GenerationRequest) -> None:
        """A request entered the queue. Its identity is worked out here."""

    def choose(self, ticket: int) -> SourceChoice:
        """The best source now. It is pinned (never released or dropped from the device) until
        `bound`, `unpin` or `left`; a second call replaces the first pin. With a `move` the pin
        also holds the copy that is to be moved."""

    def unpin(self, ticket: int) -> None:
        """The choice is not used now; the request goes on waiting. Without effect when there is no
        pin."""

    def bound(self, ticket: int, choice: SourceChoice) -> None:
        """The sequence was opened from the choice."""

    def stops(self, ticket: int) -> tuple[int, ...]:
        """Frontiers behind the source, ascending, where a prefill unit is to end for a capture."""

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        """A prefill unit was committed that ends at one of `stops`."""

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        """The request ended well; its sequence is still open. `accepted` are its output tokens,
        `frontier` of prompt and output are in State and KV. True when the policy has ended the
        residence itself (`Program.pause`, whose Snapshot it keeps); else the worker closes it."""

    def left(self, ticket: int) -> None:
        """The request is over, in whatever way; always called once, also after `finished`."""

    def relieve(self, need: Amounts) -> bool:
        """Free memory of optional checkpoints towards `need` (pages, slots, host blocks). False
        when nothing more can be freed; else call again until it is enough."""

    def clear_device(self) -> bool:
        """Give up every copy on the device that may go, also those that free nothing: a row has to
        copy the last page it shares with one. False when there is none."""

    def reclaimable(self) -> Amounts:
        """What `relieve` could free in all, now; asked only when free memory is short."""

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        """Background work for the free transfer slot; `is_idle`: no request is in the engine."""

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        """How a plan ended; `transfer` is None when it could not begin."""

    def note_rates(
        self, *, prefill_tokens_s: float | None = None, move_tokens_s: float | None = None
    ) -> None:
        """Measured rates for the cost model, from time to time: prompt tokens computed, and tokens
        of checkpoints (pages and StateImage) moved between device and host, a second."""

    def flush(self) -> None:
        """Release all that is not in use."""
