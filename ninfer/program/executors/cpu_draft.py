"""CpuDraft: a draft model beside the target of the CPU executor.

    a unit:   target runs -> choices -> absorb(inputs, what the target made of them, how many right)
              -> propose(rows that ask for it)

It keeps what it knows of a sequence where the target does: keys and values of its layers lie in the
same KV pages (`CpuMemory.draft_k_pages`), and what has no positions is a plane of the StateImage
(`CpuMemory.hidden`). So sharing, copies, pauses and the tiers below carry it along. What it writes
behind a frontier is read by nobody before it was written anew, as with the target's own keys.

A draft is a guess and can change no output. Still a row's proposal does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import SampleRow
from ninfer.ops import linear, sampling
from ninfer.program.executors.cpu_batch import TokenBatch
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.draft_shape import DraftShape

_NO_IDS: Final[IntArray] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ProposalRow:
    """What one row's guesses start from.

    token_id     its newest token, which no unit has fed yet
    ordinal      cache ordinal of that token
    positions    [3] int32 rotary position of that token; those behind it follow by ones
    hidden       [C] the target's output, behind its final norm, at the token before
    page_table   [p] int32; the guesses' keys may go to ordinals below p * PAGE_TOKENS
    params       how the row chooses
    num_tokens   most guesses; at least 1, ordinal + num_tokens <= p * PAGE_TOKENS
    """

    token_id: int
    ordinal: int
    positions: IntArray
    hidden: FloatArray
    page_table: IntArray
    params: SamplingParams
    num_tokens: int


class CpuDraft(Protocol):
    """Follows every unit of one executor, in its thread."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target whose residual stream (behind the layer) it wants, ascending."""

    def absorb(
        self,
        batch: TokenBatch,
        hidden: FloatArray,
        taps: FloatArray,
        num_right: Sequence[int],
    ) -> None:
        """Take in a batch that the target has run.

        hidden     [N, C] behind the target's final norm
        taps       [N, len(tap_layers) * C], side by side in the order of `tap_layers`
        num_right  [B] how many of each row's inputs, at least 1, belong to its sequence: keys of
                   the others may be anything, and a StateImage is that of the last right one
        """

    def propose(self, rows: Sequence[ProposalRow]) -> list[tuple[int, ...]]:
        """Guesses of each row, at most its `num_tokens`; fewer where it knows none. Each is drawn
        as `choose` does. All tokens before a row's newest one were absorbed."""


class DraftTarget(Protocol):
    """What a draft model shares with the target."""

    def embed(self, token_ids: IntArray) -> FloatArray:
        """[N, C]"""

    def head(self, hidden: FloatArray, project: linear.Projection) -> FloatArray:
        """Logits [N, V] of what is behind a final norm."""


class DraftModel(Protocol):
    """A draft model that has its weights and not yet its memory."""

    @property
    def shape(self) -> DraftShape: ...

    def build(self, target: DraftTarget, memory: CpuMemory) -> CpuDraft:
        """`memory` was allocated with `shape`."""


def choose(logits: FloatArray, params: SamplingParams, position: int) -> int | None:
    """The guess for cache ordinal `position` from logits [V]: drawn with the row's parameters and
    the noise that its own choice there will have, but by these logits alone. None when they are not
    finite or allow nothing."""
    bare = replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        top_logprobs=None,
    )
    token = sampling.reference(logits, SampleRow(bare, position, _NO_IDS, _NO_IDS, _NO_IDS))
    return None if token is None else token.token_id
