from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.contract.sampling import SamplingParams
from ninfer.ops import dflash_selector, philox
from ninfer.ops.dflash_selector import Codebooks
from tests.helpers.arrays import normal

VOCAB, RANK = 20, 3
GREEDY = SamplingParams()
POSITION = 41


class Case:
    """Random inputs of one block."""

    def __init__(self, num_places: int, top_k: int, seed: int, *, num_columns: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        self.logits = normal(rng, num_places, num_columns)
        self.token_ids = rng.permutation(VOCAB)[:num_columns]
        self.gates = normal(rng, num_places, RANK)
        self.books = Codebooks(normal(rng, VOCAB, RANK), normal(rng, VOCAB, RANK), top_k)
        self.anchor = int(rng.integers(VOCAB))

    def run(self, params: SamplingParams = GREEDY) -> tuple[int, ...]:
        return dflash_selector.reference(
            self.logits, self.token_ids, self.gates, self.books, self.anchor, params, POSITION
        )

    def candidates(self, place: int) -> list[int]:
        """Columns, best first."""
        row = self.logits[place]
        return sorted(range(row.size), key=lambda c: (-row[c], c))[: self.books.top_k]

    def score(self, place: int, before: int, column: int) -> float:
        token = self.token_ids[column]
        edge = self.books.predecessors[before] * self.gates[place] * self.books.successors[token]
        return float(self.logits[place, column] + edge.sum())


def noise(seed: int, position: int, token_id: int) -> float:
    uniform = philox.token_uniforms(seed, position, np.array([token_id]), 0)[0]
    return float(-np.log(-np.log(uniform)))


@given(
    num_places=st.integers(1, 3),
    top_k=st.integers(1, 5),
    num_columns=st.sampled_from([5, 12, VOCAB]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_walk_is_greedy_among_all_paths(
    num_places: int, top_k: int, num_columns: int, seed: int
) -> None:
    """Of all paths through the candidates, that whose first score is largest, then the second .."""
    case = Case(num_places, top_k, seed, num_columns=num_columns)
    best: tuple[float, ...] = ()
    wanted: tuple[int, ...] = ()
    for path in product(*map(case.candidates, range(num_places))):
        tokens = [int(case.token_ids[column]) for column in path]
        before = [case.anchor, *tokens]
        scores = tuple(
            case.score(place, before[place], column) for place, column in enumerate(path)
        )
        if scores > best:
            best, wanted = scores, tuple(tokens)
    assert case.run() == wanted


@given(
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([2, 6, VOCAB]),
    seed=st.integers(0, 2**32 - 1),
)
def test_draws_take_the_noise_of_place_and_token(temperature: float, top_k: int, seed: int) -> None:
    case = Case(3, top_k, seed)
    params = SamplingParams(temperature=temperature, seed=seed % 97)
    before, wanted = case.anchor, []
    for place in range(3):
        drawn = {
            column: case.score(place, before, column) / temperature
            + noise(params.seed, POSITION + 1 + place, int(case.token_ids[column]))
            for column in case.candidates(place)
        }
        before = int(case.token_ids[max(drawn, key=lambda column: drawn[column])])
        wanted.append(before)
    assert case.run(params) == tuple(wanted)


def test_cuts_of_the_parameters_are_made_among_the_candidates() -> None:
    for seed in range(20):
        case = Case(3, 8, seed)
        for params in (
            SamplingParams(temperature=1.0, top_k=1, seed=seed),
            SamplingParams(temperature=1.0, top_p=1e-9, seed=seed),
            SamplingParams(temperature=1.0, min_p=1.0, seed=seed),
        ):
            assert case.run(params) == case.run()


def test_ties_go_to_the_better_candidate() -> None:
    case = Case(1, 3, 0)
    case.books.successors[:] = 0.0
    case.logits[0] = -1.0
    case.logits[0, [11, 4, 7]] = 2.0
    assert case.run() == (int(case.token_ids[4]),)
    scores = np.zeros(VOCAB)
    case.books.predecessors[:], case.gates[:] = 1.0, 1.0
    scores[4], scores[7], scores[11] = 2.0, 1.5, 1.0
    case.logits[0] = scores
    case.books.successors[case.token_ids[11], 0] = 1.0
    case.books.successors[case.token_ids[7], 0] = 0.5
    assert case.run() == (int(case.token_ids[4]),)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_it_ends_before_scores_that_are_not_finite(value: float) -> None:
    case = Case(3, 4, 1)
    whole = case.run()
    case.logits[2, 0] = value
    assert case.run() == whole[:2]
    case.gates[1] = value
    with np.errstate(invalid="ignore"):
        assert case.run() == whole[:1]


def damaged(case: Case, **changes: Any) -> Case:
    for name, value in changes.items():
        setattr(case, name, value)
    return case


def test_contract() -> None:
    ids = np.arange(VOCAB)
    books = Codebooks(np.ones((VOCAB, RANK)), np.ones((VOCAB, RANK)), VOCAB + 1)
    for bad in (
        damaged(Case(2, 4, 0), token_ids=ids[:-1]),
        damaged(Case(2, 4, 0), token_ids=ids + 1),
        damaged(Case(2, 4, 0), anchor=VOCAB),
        damaged(Case(2, 4, 0), gates=np.ones((2, RANK + 1))),
        damaged(Case(2, 4, 0), books=books),
    ):
        with pytest.raises(OpContractError, match="dflash_selector"):
            bad.run()
