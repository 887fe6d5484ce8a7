"""The Program as the Engine sees it: sequences, reservations, units, checkpoints and transfers.

    open_sequence -> (reserve_units -> launch_* -> complete -> [rewind] -> commit | abort)*
      -> close_sequence
    pause -> PausedSequence -> resume
    capture -> CheckpointId -> open_sequence(source) | transfers between tiers -> release

The rules behind it stand in docs/context-cache.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from ninfer.contract.arrays import Float32Array
from ninfer.contract.cache import CheckpointId
from ninfer.contract.drafting import DraftCosts
from ninfer.contract.masks import TokenMask
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import PromptScoring, SamplingParams
from ninfer.contract.units import Capacity, RowOutput


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSpec:
    """What the Program must know of a request. Fields as in GenerationRequest."""

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    min_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()
    scoring: PromptScoring | None = None
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that are guessed to follow a row's newest token.

    masks   what restricts the choice behind each of them, None for nothing; none at all: nothing
    """

    token_ids: tuple[int, ...] = ()
    masks: tuple[TokenMask | None, ...] = ()


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class SequenceHandle:
    """Names one open sequence; `generation` makes a stale handle an InvariantError."""

    lane: int
    generation: int


@dataclass(frozen=True, slots=True)
class Source:
    """What a sequence starts from.

    num_tokens   the checkpoint's frontier; for models of attention alone any number up to it
    consumes     the checkpoint is released in the same call (move)
    """

    checkpoint: CheckpointId
    num_tokens: int
    consumes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PausedSequence:
    """A request without a lane.

    accepted     tokens chosen so far, in order
    frontier     tokens that were committed when it was paused
    checkpoint   its Snapshot, or None: everything is to be fed again (Replay)
    """

    spec: SequenceSpec
    accepted: tuple[int, ...]
    frontier: int
    checkpoint: CheckpointId | None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """`is_leased`: a transfer names it, so it can be neither released nor dropped from a tier.

    One whose only copy was lost (a damaged or evicted file) is in no tier and can only be released.
    """

    frontier: int
    is_on_device: bool
    is_on_host: bool
    is_on_disk: bool
    is_leased: bool


@dataclass(frozen=True, slots=True)
class Amounts:
    """Counts of physical things. Host blocks and disk bytes include shares of StateImages."""

    pages: int = 0
    slots: int = 0
    host_blocks: int = 0
    disk_bytes: int = 0


class TransferKind(Enum):
    DEMOTE = "demote"
    """device -> host; the device keeps its copy until `drop_device`"""
    RESTORE = "restore"
    """host -> device; the host keeps its copy until `drop_host`"""
    STORE = "store"
    """host or device -> disk"""
    FETCH = "fetch"
    """disk -> host"""


class Transfer(Protocol):
    """The one open transfer. `Program.settle_transfer` ends it."""

    @property
    def kind(self) -> TransferKind: ...

    @property
    def checkpoint(self) -> CheckpointId: ...

    @property
    def is_done(self) -> bool:
        """The copies have ended, well or not."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Called on the loop once the copies have ended; at the next turn when they have."""


class UnitKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    REPLAY = "replay"
    """Tokens of one row that were chosen before, several at once; draws nothing"""


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
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    disk_bytes_used: int = 0
    num_checkpoints: int = 0


class Program(Protocol):
    """The only physical authority. Used by the worker task alone, and before it by whoever starts
    it; no method but `complete`, `score` and `measure_drafts` waits."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def vocab_size(self) -> int: ...

    async def measure_drafts(self) -> DraftCosts:
        """What steps with drafts and proposals cost here, found out by a few of them: before the
        first sequence is opened, in a fraction of a second. Raises DeviceError."""

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        """Bind a free lane, at the frontier of `source` or at 0.

        InvariantError without a free lane, and for a source that is not on the device, is longer
        than the prompt less one token, or is leased and to be consumed. Needs no memory; the first
        `reserve_units` reserves the copy of a shared partial page as well.
        """

    def close_sequence(self, handle: SequenceHandle) -> None:
        """Return lane, pages and slots. InvariantError while a unit of it is pending."""

    def frontier(self, handle: SequenceHandle) -> int:
        """Tokens whose State and KV are committed."""

    def pages_needed(self, num_tokens: int) -> int:
        """Pages a sequence of so many tokens occupies."""

    def reserve_units(self, handle: SequenceHandle, num_tokens: int) -> bool:
        """Map pages and a new StateImage slot for the next `num_tokens` inputs, all or nothing.

        False when pages or slots are short; nothing has changed then. Idempotent for a reservation
        that already covers them.
        """

    def needs_copy(self, handle: SequenceHandle) -> bool:
        """Whether the next reservation takes a page for a copy of the last one, which somebody else
        holds as well."""

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` prompt inputs; the last prompt input also samples. With
        `SequenceSpec.scoring` the output has the scores of the asked tokens behind the inputs,
        those of a prompt that is fed again included, unless tokens were accepted."""

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        """Start one step for rows whose prompt is done, each with its next accepted token.

        drafts   one a row, or none at all. A row's reservation covers its draft, and a row that is
                 being replayed has an empty one.
        num_proposed   one a row, or none at all: most tokens that the draft model is to guess
                 behind the row's newest token. Those come whose input was reserved, behind the
                 draft's; needs Capacity.has_draft_model

        A row that is being replayed produces nothing (its output has no token); like an inner
        prefill chunk it is committed with a count of 0.

        goes_on   the next unit is likely to be a step of these rows or some of them, so that it may
                  be started before it is asked for, and the pages it needs are reserved if they are
                  to be had. Without effect when somebody else holds a StateImage of the rows. Such
                  a unit is committed once it was completed, never aborted: the states its rows had
                  before it may be gone.
        """

    def force(self, handle: SequenceHandle, token_ids: Sequence[int]) -> None:
        """Accept tokens that nobody draws, behind the newest accepted one; between units. They are
        inputs of the row as if they had been drawn: `num_replay_left` counts them."""

    def launch_replay(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` of `num_replay_left` inputs, at most REPLAY_TOKENS, of a row
        whose prompt is done. To the bit what as many decode steps would leave."""

    async def complete(self, batch: PendingBatch) -> None:
        """Wait until the unit has run and fill `outputs`. Raises DeviceError."""

    async def rewind(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Before `commit`, when a row takes some of its produced tokens and not all: go back to the
        state behind those. Without effect when there is no such row. Raises DeviceError."""

    def commit(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Settle: advance the rows.

        accepted[i] is the number of produced tokens row i takes: 0 for a cancelled or failed row
        (its state stays as it was; it can only be closed) and, for rows that produced nothing
        (an inner prefill chunk), 0 as well, which does commit the chunk. Some and not all only
        behind `rewind` with the same counts; the row is where as many decode steps had brought it.
        """

    def abort(self, batch: PendingBatch) -> None:
        """Settle: everything as before the launch; reservations stay. InvariantError for a
        completed unit that was launched to go on."""

    async def score(self, handle: SequenceHandle, num_tokens: int) -> Float32Array:
        """Run and commit the next prompt inputs (at most a prefill chunk) of a scoring sequence
        and return their logits [num_tokens, V]. Pages must be reserved."""

    def num_replay_left(self, handle: SequenceHandle) -> int:
        """Inputs behind the frontier that were fed before: all but the newest accepted token, or,
        when nothing was accepted, 0. While it is above 0 units of this row produce nothing."""

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        """End residence between units. With `keeps_state` the committed pages and StateImage become
        a checkpoint (a Snapshot, owned by the caller), without they are given back. InvariantError
        while a unit of it is pending and when it has ended."""

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        """Bind a lane again, from `source` (its Snapshot or any checkpoint of its history, up to
        its old frontier) or from 0. Same errors as open_sequence."""

    def capture(self, handle: SequenceHandle) -> CheckpointId | None:
        """Freeze the committed frontier. None, with nothing changed, at frontier 0 and when no
        StateImage slot is free for the row's next unit. InvariantError while a unit is pending.
        A sequence that is not to go on needs no slot: `pause` makes its checkpoint."""

    def checkpoint(self, checkpoint: CheckpointId) -> CheckpointFacts:
        """InvariantError for one that was released."""

    def release(self, checkpoint: CheckpointId) -> None:
        """Forget it in memory and on disk. InvariantError while it is leased."""

    def drop_device(self, checkpoint: CheckpointId) -> None:
        """Forget the device copy. InvariantError when it is leased or is nowhere else."""

    def drop_host(self, checkpoint: CheckpointId) -> None:
        """Forget the host copy. InvariantError when it is leased or is nowhere else."""

    def reclaimable(self, checkpoints: Collection[CheckpointId]) -> Amounts:
        """What would be free if all of these were released together, now."""

    def free(self) -> Amounts:
        """Free pages, slots and host blocks; disk bytes below the bound."""

    def missing(self, handle: SequenceHandle, num_tokens: int) -> Amounts:
        """What `reserve_units` with the same arguments lacks now; all 0 when it would succeed."""

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        """Reserve the destination, lease the checkpoint and start the copies. None when the
        destination has no room, for STORE from the device also when too few host blocks are free
        to pass through. `note` is kept with a checkpoint on disk (JSON). InvariantError when
        another transfer is open, or the checkpoint is not where the kind starts or is already
        where it ends. STORE may put out files that were used least recently."""

    def settle_transfer(self, transfer: Transfer) -> bool:
        """Publish the copy and end the lease. False when the copies failed verification or input
        and output did: nothing is published, and what was damaged is forgotten in that tier.
        InvariantError while the copies run. Raises DeviceError."""

    def disk_notes(self) -> Mapping[CheckpointId, Mapping[str, object]]:
        """The usable checkpoints that were found on disk at start, with their notes."""

    def occupancy(self) -> Occupancy: ...

    def check(self) -> None:
        """Verify all internal counts; InvariantError says which one is off."""

    def close(self) -> None: ...
