"""Model units: what the Program asks an executor to run, and what it gives back.

A unit reads StateImages and KV pages of its rows and writes the pages behind the frontier and one
*new* StateImage slot a row (never the one it reads): until the Program commits, nothing that was
there before has changed, so abort is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ninfer.contract.arrays import ByteArray, Float32Array, IntArray
from ninfer.contract.masks import TokenMask
from ninfer.contract.sampling import (
    DrawPurpose,
    GeneratedToken,
    PromptScores,
    SamplingParams,
)

PAGE_TOKENS: Final = 64
"""Tokens a KV page holds."""
REPLAY_TOKENS: Final = 16
"""Most inputs of a row that is replayed in one unit."""
ROOT_SLOT: Final = 0
"""The StateImage slot of the empty sequence: all zeros, never written."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """How to choose the token at one position.

    position           cache ordinal of the token to be chosen (keys the random numbers)
    generated_ids, generated_counts   [m] int32 distinct generated tokens and how often, ascending
    prompt_ids         [p] int32 distinct prompt tokens, ascending (for the repetition penalty)
    suppressed_ids     tokens that may not be drawn at this position
    mask               which tokens may be drawn at this position, None for all
    The arrays are empty when `params.counts_tokens` is false.
    """

    params: SamplingParams
    position: int
    generated_ids: IntArray
    generated_counts: IntArray
    prompt_ids: IntArray
    suppressed_ids: tuple[int, ...] = ()
    purpose: DrawPurpose = DrawPurpose.TARGET
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """Which inputs of a prompt unit are to say how likely the token behind them was.

    first     the first of these inputs, counted from the unit's start
    targets   [n] int32, n >= 1: the tokens behind inputs [first, first + n)
    num_top   how many of the best tokens each score lists
    """

    first: int
    targets: IntArray
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class UnitRow:
    """One sequence's part of a unit: T inputs at cache ordinals [start, start + T).

    token_ids    [T] int32
    positions    [3, T] int32 rotary positions, or None: the cache ordinals on all axes
    page_table   [p] int32 page ids, p * PAGE_TOKENS >= start + T
    read_slot    StateImage before the inputs (ROOT_SLOT at start 0)
    write_slot   StateImage after the inputs; differs from read_slot
                 (models without GDN layers and draft model have no StateImages: both are ROOT_SLOT)
    sample       how to choose the token after the last input, or None: no logits are needed
    checks       of a `verify` row, how to choose the tokens after the inputs before the last: T - 1
                 of them. Inputs from the second on are drafts; see docs/speculation.md
    score        which inputs are scored, of a prefill unit; None: none of them
    copies       (source, target) pages copied whole before anything is read: a shared partial page
    residence    (lane, generation) of the sequence: a step started ahead serves no other
    is_replayed  of a prefill unit: its tokens were chosen before; at most REPLAY_TOKENS of them,
                 with the bits of as many decode steps. No sample, no score.
    num_proposed of a `verify` row that is sampled: most tokens that the draft model is to guess
                 behind its newest token; it stops where the page table ends
    """

    token_ids: IntArray
    start: int
    page_table: IntArray
    read_slot: int
    write_slot: int
    positions: IntArray | None = None
    sample: SampleRow | None = None
    score: ScoreRow | None = None
    copies: tuple[tuple[int, int], ...] = ()
    residence: tuple[int, int] = (0, 0)
    is_replayed: bool = False
    checks: tuple[SampleRow, ...] = ()
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row produced. `token` and `scores` are None when none were asked for or logits were
    not finite; `scores` counts the tokens of the sequence. `is_dead_end`: there is no token because
    none may be drawn. `drafts`: drafts that were what would have been chosen, as tokens before
    `token`. `proposal`: what the draft model guesses to follow `token`."""

    token: GeneratedToken | None
    is_finite: bool = True
    scores: PromptScores | None = None
    is_dead_end: bool = False
    drafts: tuple[GeneratedToken, ...] = ()
    proposal: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """All that were produced, in order."""
        return self.drafts if self.token is None else (*self.drafts, self.token)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Solved once at start by the planner; all of it is allocated before the first request.

    max_concurrency   lanes
    max_context       most tokens of one sequence
    num_pages         KV pages
    num_slots         StateImage slots, ROOT_SLOT included: two a lane, the rest for checkpoints
    prefill_chunk     most tokens of a prefill unit
    num_host_blocks   blocks of page_bytes of host memory for the host tier
    max_draft_tokens  most drafted tokens of a row; 0: no speculative decoding
    has_draft_model   a draft model is loaded: its keys and values are part of every page, what it
                      continues from is part of every StateImage, and all decode units are `verify`
    """

    max_concurrency: int
    max_context: int
    num_pages: int
    num_slots: int
    prefill_chunk: int
    num_host_blocks: int = 0
    max_draft_tokens: int = 0
    has_draft_model: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes behind a Capacity, for `info` and the log.

    host_bytes   the host tier; on the host in any case, so neither in the budget nor in the total
    """

    capacity: Capacity
    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    budget_bytes: int
    host_bytes: int = 0
    detail: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """Whole pages and at most one StateImage between the device and host blocks.

    pages   (page id, block) pairs
    slot    StateImage slot, or None
    state_blocks   the blocks of the StateImage, in order: ceil(slot_bytes / page_bytes) of them
    """

    pages: tuple[tuple[int, int], ...]
    slot: int | None = None
    state_blocks: tuple[int, ...] = ()


class Executor(Protocol):
    """Runs units one at a time over memory it allocated at start, and moves memory beside them."""

    @property
    def name(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def device_name(self) -> str:
        """What it runs on, for people."""

    async def prefill(self, row: UnitRow) -> RowOutput:
        """Run one sequence's next inputs (T >= 1). Raises DeviceError."""

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        """Run one input of each row (T == 1 each). A row's result never depends on its mates.

        goes_on   every row will take its token or end, and the step with these tokens is likely to
                  be next: it may be started at once, each row writing the slot that it read now
        """

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a row of `verify`; 0: this executor has no `verify`."""

    @property
    def has_draft_model(self) -> bool:
        """Whether rows of `verify` may ask for proposals. The draft model follows every unit: it
        absorbs the inputs of prefill, verify and score units alike, and `decode` is not used."""

    @property
    def pads_rows(self) -> bool:
        """Whether all rows of `verify` take the time of the one with the most inputs."""

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        """Decode rows of which some have drafts behind their first input (len(checks) == T - 1;
        those without may have no `sample`). A row's tokens are those that so many `decode` steps
        would give, and `write_slot` is the StateImage behind as many inputs, bit for bit. A choice
        that fails behind an accepted draft ends the row before that draft. Raises DeviceError."""

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        """Right behind `verify` of these rows: let each `write_slot` be the StateImage behind the
        row's first counts[i] inputs, at least one and at most as many as were right. Raises
        DeviceError."""

    async def score(self, row: UnitRow) -> Float32Array:
        """Like prefill, but returns the logits of every input: [T, V] float32."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers: the size of a host block."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a StateImage; 0 for a model without GDN layers that nothing drafts for."""

    @property
    def host_blocks(self) -> ByteArray:
        """[num_host_blocks, page_bytes] uint8, page-locked where that matters. A block is read and
        written by others only while no save or load names it."""

    async def save(self, move: Move) -> None:
        """Device to host. May run beside units and reads only what no unit writes (bytes behind a
        checkpoint's frontier may be torn). Raises DeviceError."""

    async def load(self, move: Move) -> None:
        """Host to device, to pages and a slot that no unit uses. May run beside units."""

    def close(self) -> None:
        """Release everything; idempotent. No call may be in flight."""
