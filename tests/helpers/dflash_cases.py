"""Blocks of guesses: rows with and without room, with pages that end early, and pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.device_sampling import ROW
from ninfer.ops.dflash_block import BlockInputs
from ninfer.ops.draft_step import DraftChain

Inputs = BlockInputs[NDArray[Any]]


def random_block(rng: np.random.Generator, num_rows: int, columns: int) -> Inputs:
    """About half of the rows have guesses, in all numbers."""
    ordinals = rng.integers(0, 200, num_rows)
    ordinals[rng.random(num_rows) < 0.1] = -1
    positions = np.tile(ordinals, (3, 1))
    positions[rng.integers(3), rng.random(num_rows) < 0.1] += 7
    rows = np.zeros(num_rows, ROW)
    rows.view(np.uint8)[:] = rng.integers(0, 100, num_rows * ROW.itemsize)
    num_tokens = 3 * num_rows
    return BlockInputs(
        chain=DraftChain(
            ordinals.astype(np.int32), positions.astype(np.int32), rows.view(np.uint8)
        ),
        token_ids=rng.integers(-1, 90, num_tokens).astype(np.int32),
        last_columns=rng.integers(0, num_tokens, num_rows).astype(np.int32),
        proposed=rng.integers(0, columns + 3, num_rows).astype(np.int32),
        limits=(ordinals + rng.integers(0, columns + 3, num_rows)).astype(np.int32),
    )
