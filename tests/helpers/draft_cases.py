"""Units that check drafts: random rows of which some drafts are right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.device_sampling import ROW
from ninfer.ops.draft_match import MatchInputs

Inputs = MatchInputs[NDArray[Any]]


def random_unit(
    rng: np.random.Generator, num_rows: int, columns: int, *, failures: float = 0.1
) -> Inputs:
    """Few token ids, so that runs of right drafts come in all lengths; `failures` of the columns
    have no choice, some rows no pages behind their frontier."""
    total = num_rows * columns
    counts = rng.integers(1, columns + 1, num_rows).astype(np.int32)
    token_ids = rng.integers(0, 2, total).astype(np.int32)
    chosen = np.roll(token_ids, -1)
    is_wrong = rng.random(total) < rng.choice([0.0, 0.2, 0.7])
    chosen = np.where(is_wrong, 1 - chosen, chosen).astype(np.int32)
    is_finite = (rng.random(total) >= failures / 2).astype(np.int32)
    chosen[(is_finite == 0) | (rng.random(total) < failures / 2)] = -1
    starts = rng.integers(0, 200, num_rows)
    ordinals = starts[:, None] + np.arange(columns)
    ordinals[np.arange(columns) >= counts[:, None]] = -1
    rope = rng.integers(0, 500, (3, num_rows, 1)) + np.arange(columns)
    rows = np.zeros(total, ROW)
    rows.view(np.uint8)[:] = rng.integers(0, 100, total * ROW.itemsize)
    return MatchInputs(
        token_ids=token_ids,
        counts=counts,
        ordinals=ordinals.astype(np.int32).reshape(-1),
        rope_positions=rope.astype(np.int32).reshape(3, -1),
        read_slots=rng.permutation(num_rows).astype(np.int32),
        limits=(starts + rng.integers(1, columns + 4, num_rows)).astype(np.int32),
        rows=rows.view(np.uint8),
        chosen=chosen,
        is_finite=is_finite,
    )
