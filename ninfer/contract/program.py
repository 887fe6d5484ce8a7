"""The Program as the Engine sees it: sequences, reservations, units and their one settlement.

open_sequence -> (reserve_units -> launch_* -> complete -> commit | abort)* -> close_sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ninfer.contract.arrays import Float32Array
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity, RowOutput


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSpec:
    """What the Program must know of a request. Fields as in GenerationRequest."""

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    min_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceHandle:
    """Names one open sequence; `generation` makes a stale handle an InvariantError."""

    lane: int
    generation: int


class UnitKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A launched unit with frozen membership. `outputs` is filled by `Program.complete`.

    Consumed exactly once, whole, by commit or abort; a second settlement is an InvariantError.
    """

    kind: UnitKind
    handles: tuple[SequenceHandle, ...]
    num_inputs: tuple[int, ...]
    outputs: tuple[RowOutput, ...] | None = field(default=None)
    is_settled: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Physical counts right now; all of `*_used` are zero when nothing is open."""

    lanes_used: int
    pages_used: int
    pages_total: int
    slots_used: int
    slots_total: int


class Program(Protocol):
    """The only physical authority. Used by the worker task alone; no method but `complete` and
    `score` waits."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def vocab_size(self) -> int: ...

    def open_sequence(self, spec: SequenceSpec) -> SequenceHandle:
        """Bind a free lane; InvariantError when there is none."""

    def close_sequence(self, handle: SequenceHandle) -> None:
        """Return lane, pages and slots. InvariantError while a unit of it is pending."""

    def frontier(self, handle: SequenceHandle) -> int:
        """Tokens whose State and KV are committed."""

    def pages_needed(self, num_tokens: int) -> int:
        """Pages a sequence of so many tokens occupies."""

    def reserve_units(self, handle: SequenceHandle, num_tokens: int) -> bool:
        """Map pages and a new StateImage slot for the next `num_tokens` inputs, all or nothing.

        False when pages are short; nothing has changed then. Idempotent for a reservation that
        already covers them.
        """

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` prompt inputs; the last prompt input also samples."""

    def launch_decode(
        self, handles: Sequence[SequenceHandle], *, goes_on: bool = False
    ) -> PendingBatch:
        """Start one step for rows whose prompt is done, each with its newest accepted token.

        goes_on   the next unit is likely to be a step of these rows or some of them, so that it may
                  be started before it is asked for, and the pages it needs are reserved if they are
                  to be had. Such a unit is committed once it was completed, never aborted: the
                  states its rows had before it may be gone.
        """

    async def complete(self, batch: PendingBatch) -> None:
        """Wait until the unit has run and fill `outputs`. Raises DeviceError."""

    def commit(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Settle: advance the rows.

        accepted[i] is the number of produced tokens row i takes: 0 for a cancelled or failed row
        (its state stays as it was; it can only be closed) and, for rows that produced nothing
        (an inner prefill chunk), 0 as well, which does commit the chunk.
        """

    def abort(self, batch: PendingBatch) -> None:
        """Settle: everything as before the launch; reservations stay. InvariantError for a
        completed unit that was launched to go on."""

    async def score(self, handle: SequenceHandle, num_tokens: int) -> Float32Array:
        """Run and commit the next prompt inputs (at most a prefill chunk) of a scoring sequence
        and return their logits [num_tokens, V]. Pages must be reserved."""

    def occupancy(self) -> Occupancy: ...

    def check(self) -> None:
        """Verify all internal counts; InvariantError says which one is off."""

    def close(self) -> None: ...
