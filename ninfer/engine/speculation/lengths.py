"""How much is worth drafting: the most expected tokens for the time of a step.

A drafted token is worth what it probably adds to the answer, and costs an input in a step that all
rows wait for. So the rows of a batch are looked at together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ninfer.contract.drafting import DraftCosts

LEAST_GAIN: Final = 1.03
"""Times as many tokens for the time as without drafts: what is less is noise."""


def choose_lengths(
    worths: Sequence[Sequence[float]], num_drawing: int, costs: DraftCosts
) -> list[int]:
    """How much of its guess each row drafts.

    worths        of each row's guess, never rising; empty for rows without
    num_drawing   rows that get a token in any case
    """
    num_rows = len(worths)
    order = sorted(
        (-worth, place, row)
        for row, guess in enumerate(worths)
        for place, worth in enumerate(guess)
    )
    lengths = [0] * num_rows
    if not order:
        return lengths
    value, best = float(num_drawing), LEAST_GAIN * num_drawing / costs.step(num_rows, num_rows, 1)
    num_drafted, width = 0, 1
    for count, (loss, place, _) in enumerate(order, 1):
        value, width = value - loss, max(width, place + 2)
        rate = value / costs.step(num_rows, num_rows + count, width)
        if rate > best:
            best, num_drafted = rate, count
    for _, _, row in order[:num_drafted]:
        lengths[row] += 1
    return lengths


def proposal_length(hopes: Sequence[Sequence[float]], num_drawing: int, costs: DraftCosts) -> int:
    """How many tokens the draft model is to propose for each row: it makes them for all rows at
    once, one behind another. `hopes` are worths as above, one item a row."""
    num_rows = len(hopes)
    value, num_columns, length = float(num_drawing), num_rows, 0
    best = LEAST_GAIN * num_drawing / costs.step(num_rows, num_rows, 1)
    for place in range(max(map(len, hopes), default=0)):
        added = [hope[place] for hope in hopes if len(hope) > place]
        value, num_columns = value + sum(added), num_columns + len(added)
        time = costs.step(num_rows, num_columns, place + 2) + costs.proposals(num_rows, place + 1)
        if value / time > best:
            best, length = value / time, place + 1
    return length
