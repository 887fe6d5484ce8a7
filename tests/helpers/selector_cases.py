"""Blocks whose walks are exact: factors and log probabilities of few bits, so that f32 sums are the
same in every order, with many ties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.sampling import SamplingParams
from ninfer.ops import dflash_selector
from ninfer.ops.device_sampling import MAX_TOP, ROW
from ninfer.ops.dflash_selector import Codebooks

NUM_IDS = 300
_UNLISTED = -1e6


@dataclass(frozen=True, slots=True, eq=False)
class WalkCase:
    """What a launch reads, with the factors in float64: a block of R rows of W columns."""

    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    is_finite: NDArray[np.int32]
    gates: NDArray[np.float64]
    predecessors: NDArray[np.float64]
    successors: NDArray[np.float64]
    token_ids: NDArray[np.int32]
    ordinals: NDArray[np.int32]
    rows: NDArray[np.void]
    top_k: int

    @property
    def columns(self) -> int:
        return self.token_ids.size // self.rows.size

    def only_row(self, row: int) -> WalkCase:
        part = slice(row * self.columns, (row + 1) * self.columns)
        per_column: dict[str, Any] = {
            name: getattr(self, name)[part]
            for name in ("top_ids", "top_logprobs", "is_finite", "gates", "token_ids", "ordinals")
        }
        return replace(self, rows=self.rows[row : row + 1], **per_column)

    def proposals(self, num_proposals: int) -> NDArray[np.int32]:
        """By the reference."""
        proposals = np.full((self.rows.size, num_proposals), -1, np.int32)
        for row in range(self.rows.size):
            tokens = self.only_row(row).walk()[:num_proposals]
            proposals[row, : len(tokens)] = tokens
        return proposals

    def walk(self) -> tuple[int, ...]:
        """Of a single row."""
        is_over = (self.ordinals[1:] < 0) | (self.is_finite[1:] == 0)
        num_places = int(np.append(is_over, True).argmax())
        if num_places == 0:
            return ()
        logits = np.full((num_places, NUM_IDS), _UNLISTED)
        places = slice(1, num_places + 1)
        np.put_along_axis(
            logits, self.top_ids[places, : self.top_k], self.top_logprobs[places, : self.top_k], 1
        )
        with np.errstate(invalid="ignore"):
            return dflash_selector.reference(
                logits, np.arange(NUM_IDS), self.gates[places],
                Codebooks(self.predecessors, self.successors, self.top_k),
                int(self.token_ids[0]), params_of(self.rows[0]), int(self.rows["position"][0]) - 1,
            )  # fmt: skip


def params_of(row: NDArray[np.void]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if row["is_greedy"] else float(row["temperature"]),
        top_k=int(row["top_k"]),
        top_p=float(row["top_p"]),
        min_p=float(row["min_p"]),
        seed=int(row["seed"]),
    )


def exact_case(
    rng: np.random.Generator,
    num_rows: int,
    columns: int,
    *,
    rank: int,
    top_k: int,
    failures: float = 0.03,
) -> WalkCase:
    """Rows end early by padding, or not at all; of `failures` of the columns the logits are not
    finite, of as many the gates."""
    total = num_rows * columns
    top_ids = np.full((total, MAX_TOP), -7, np.int32)
    top_logprobs = np.full((total, MAX_TOP), np.nan, np.float32)
    for column in range(total):
        ids = rng.permutation(NUM_IDS)[:top_k]
        values = -rng.integers(1, 24, top_k) / 8.0
        order = np.lexsort((ids, -values))
        top_ids[column, :top_k], top_logprobs[column, :top_k] = ids[order], values[order]
    unit = 1.0 if rank < 32 else 0.125
    successors = rng.integers(-1, 2, (NUM_IDS, rank)).astype(np.float64)
    gates = rng.integers(-1, 2, (total, rank)).astype(np.float64)
    gates[rng.random(total) < failures] = np.inf
    guesses = np.where(rng.random(num_rows) < 0.5, columns - 1, rng.integers(0, columns, num_rows))
    places = np.arange(columns)
    ordinals = np.where((places <= guesses[:, None]) & (guesses[:, None] > 0), 50 + places, -1)
    return WalkCase(
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        is_finite=(rng.random(total) >= failures).astype(np.int32),
        gates=gates,
        predecessors=rng.integers(-1, 2, (NUM_IDS, rank)).astype(np.float64),
        successors=successors * unit,
        token_ids=rng.integers(0, NUM_IDS, total).astype(np.int32),
        ordinals=ordinals.reshape(-1).astype(np.int32),
        rows=random_rows(rng, num_rows),
        top_k=top_k,
    )


def random_rows(rng: np.random.Generator, num_rows: int) -> NDArray[np.void]:
    rows = np.zeros(num_rows, ROW)
    rows["seed"] = rng.integers(0, 2**63, num_rows)
    rows["temperature"] = rng.choice([0.01, 0.7, 1.0, 3.0], num_rows)
    rows["top_p"] = rng.choice([1e-6, 0.3, 0.9, 1.0, 1.0], num_rows)
    rows["min_p"] = rng.choice([0.0, 0.0, 0.05, 0.3, 1.0], num_rows)
    rows["top_k"] = rng.choice([0, 0, 1, 3, 7, 100], num_rows)
    rows["is_greedy"] = rng.random(num_rows) < 0.3
    rows["position"] = rng.integers(1, 1 << 20, num_rows)
    rows["num_top"] = -1
    return rows
