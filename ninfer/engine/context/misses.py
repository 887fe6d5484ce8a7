"""Why tokens that could have been reused were not: `MissReason`, decided from facts alone."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.cache import MissReason


@dataclass(frozen=True, slots=True)
class ClosestHistory:
    """What is known of the history that is closest to a prompt.

    common       tokens they begin with alike
    num_tokens   of the history
    answers      where generated tokens are in it
    is_same      the prompt belongs to the same session
    """

    common: int
    num_tokens: int
    answers: tuple[tuple[int, int], ...]
    is_same: bool


@dataclass(frozen=True, slots=True)
class Reuse:
    """The facts of one choice.

    num_tokens       of the prompt
    num_used         tokens that the source saves
    least            fewest tokens a checkpoint is kept for
    granule          sources save multiples of so many tokens of a history
    has_unrestored   a deeper checkpoint is, or was when the request came, in a tier that it could
                     not be brought up from
    has_evicted      a deeper checkpoint was given up
    most             tokens that the request may reuse, when its scores want the others computed
    """

    num_tokens: int
    num_used: int
    least: int
    granule: int
    closest: ClosestHistory | None
    has_unrestored: bool = False
    has_evicted: bool = False
    most: int | None = None


def first_difference(reuse: Reuse) -> int | None:
    """Position of the first token that differs from the closest history; None when one of the two
    begins with the other."""
    closest = reuse.closest
    if closest is None or closest.common >= min(reuse.num_tokens, closest.num_tokens):
        return None
    return closest.common


def miss_reason(reuse: Reuse) -> MissReason | None:
    """Why not more was reused; None when nothing more is known of the prompt."""
    limit = reuse.num_tokens - 1
    if reuse.num_used >= limit > 0:
        return None
    if limit < reuse.least:
        return MissReason.TOO_SHORT
    if reuse.most is not None and reuse.num_used >= reuse.most:
        return MissReason.PROMPT_LOGPROBS
    if reuse.has_unrestored:
        return MissReason.NOT_RESTORED
    if reuse.has_evicted:
        return MissReason.EVICTED
    return _difference_reason(reuse)


def _difference_reason(reuse: Reuse) -> MissReason | None:
    closest = reuse.closest
    if closest is None or (closest.common < reuse.least and not closest.is_same):
        return None if reuse.num_used > 0 else MissReason.NO_ENTRY
    position = first_difference(reuse)
    if closest.is_same and position is not None:
        if any(start <= position < stop for start, stop in closest.answers):
            return MissReason.TEMPLATE_REWROTE_HISTORY
        return MissReason.HISTORY_EDITED
    common = min(closest.common, reuse.num_tokens - 1)
    usable = common - common % reuse.granule
    if usable - reuse.num_used >= reuse.least:
        return MissReason.NO_STATE_AT_FRONTIER
    return None
