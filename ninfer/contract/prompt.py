"""PreparedPrompt: what the model is fed, independent of any protocol."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.arrays import IntArray
from ninfer.contract.cache import CheckpointKind


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder tokens [start, stop) of a prompt that stand for one media item."""

    start: int
    stop: int
    digest: bytes
    """SHA-256 of the decoded media and its preprocessing; part of the prompt's identity."""
    grid: tuple[int, int, int]
    """(time, height, width) in patches."""


@dataclass(frozen=True, slots=True)
class PromptFrontier:
    """A place in a prompt, in tokens from its start, where a checkpoint would be of use.

    is_explicit   the client marked it
    """

    num_tokens: int
    kind: CheckpointKind
    is_explicit: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """Token ids and all that decides their meaning.

    token_ids    [n] int32, n >= 1
    positions    [3, n] int32 rotary positions (time, height, width), or None: 0..n-1 on all axes
    rope_delta   rotary position minus cache ordinal for every token after the prompt
    media        spans in ascending order
    opens_in_reasoning   the prompt ends inside an open thought: output starts as reasoning
    frontiers    places for checkpoints, ascending, each in 1..n-1
    param        the field of the request it came in, for errors
    """

    token_ids: IntArray
    positions: IntArray | None = None
    rope_delta: int = 0
    media: tuple[MediaSpan, ...] = ()
    opens_in_reasoning: bool = False
    frontiers: tuple[PromptFrontier, ...] = ()
    param: str = "prompt"

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
