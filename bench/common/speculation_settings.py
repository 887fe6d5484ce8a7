"""The settings in which answers with drafts are compared with the plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tests.helpers.speculation_matrix import KINDS, LEAST_PAGES, Setting, small_pool

LENGTHS: Final = (1, 2, 3, 4, 5, 7)
MOST_ROWS: Final = 8
FULL_LENGTHS: Final = (3, 7, 15, 1, 2, 4, 5)
FULL_ROWS: Final = (1, 8, 4, 2, 3, 5, 6, 7)
"""The most important first: time may be over before all were checked."""
HOST_BLOCKS: Final = 64
"""Of the settings whose paused requests leave Snapshots; those of others are replayed."""


def sample_settings(number: int) -> Iterator[Setting]:
    """All draft lengths and batch sizes, in one pass of those that ask a few prompts a setting."""
    for place, length in enumerate(LENGTHS):
        for lanes in range(1, MOST_ROWS + 1):
            turn = number + place + lanes
            is_short = turn % 2 == 0
            yield Setting(
                length,
                lanes,
                shift=2 * number,
                has_draft_model=(number + place) % 3 > 0,
                num_pages=small_pool(lanes) if is_short else 8 * lanes,
                host_blocks=HOST_BLOCKS if turn % 4 == 0 else 0,
                num_cancelled=int(turn % 3 == 0),
            )


def full_settings(
    lengths: Sequence[int] = FULL_LENGTHS, row_counts: Sequence[int] = FULL_ROWS
) -> Iterator[Setting]:
    """Each draft length with each batch size once, for all prompts; of both only those given. Those
    of one length that have the draft model, two of three, follow one another, and so do those
    without."""
    for place, length in enumerate(FULL_LENGTHS):
        if length not in lengths:
            continue
        turns = [
            (place + index, lanes) for index, lanes in enumerate(FULL_ROWS) if lanes in row_counts
        ]
        for turn, lanes in sorted(turns, key=lambda item: not _has_draft_model(item[0])):
            yield Setting(
                length,
                lanes,
                shift=turn,
                has_draft_model=_has_draft_model(turn),
                num_pages=LEAST_PAGES if turn % 2 == 0 else 8 * lanes,
                host_blocks=HOST_BLOCKS if turn % 4 == 0 else 0,
                num_cancelled=len(KINDS),
            )


def _has_draft_model(turn: int) -> bool:
    return turn % 3 < 2
