from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.contract.sampling import SamplingParams
from ninfer.ops import dflash_selector, philox
from ninfer.ops.device_sampling import MAX_TOP, ROW
from ninfer.ops.dflash_selector import Codebooks, DeviceCodebooks, SelectorInputs
from tests.helpers.arrays import normal
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes

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


def vector(*shape: int) -> ShapeOnly:
    return ShapeOnly(shape, "int32")


def selector_inputs(rows: int, columns: int, rank: int) -> SelectorInputs:
    total = rows * columns
    return SelectorInputs(
        vector(total, MAX_TOP), ShapeOnly((total, MAX_TOP), "float32"), vector(total),
        ShapeOnly((total, rank)), vector(total), vector(total),
        ShapeOnly((rows * ROW.itemsize,), "uint8"),
    )  # fmt: skip


def device_books(rank: int, top_k: int = 16) -> DeviceCodebooks:
    return DeviceCodebooks(ShapeOnly((99, rank)), ShapeOnly((99, rank), address=4096), top_k)


@pytest.mark.parametrize(
    ("rank", "vectors"), [(8, 1), (256, 1), (264, 2), (512, 2), (520, 4), (1024, 4)]
)
def test_a_walk_is_a_thread_block_a_row_and_a_warp_a_candidate(rank: int, vectors: int) -> None:
    kernels = RecordingLibrary()
    gates = ShapeOnly((128, rank), strides=(4096, 2))
    inputs = replace(selector_inputs(8, 16, rank), gates=gates)
    dflash_selector.launch(
        kernels.library, inputs, device_books(rank), vector(8, 31), stream=0, is_chained=True
    )
    launch = kernels.only()
    assert (launch.grid, launch.block) == ((8, 1, 1), (512, 1, 1))
    assert launch.entry == f"dflash_selector_{vectors}"
    assert 256 * vectors >= rank
    assert launch.arguments.dtype.itemsize == struct_bytes("dflash_selector", "SelectorParams")
    assert ROW.itemsize == struct_bytes("dflash_selector", "SampleRow")
    assert launch.options["programmatic"]
    assert (launch["columns"], launch["candidates"], launch["num_proposals"]) == (16, 16, 31)
    assert (launch["rank"], launch["gate_stride"], launch["num_ids"]) == (rank, 2048, 99)
    assert launch["successors"] == 4096


@pytest.mark.parametrize(
    ("columns", "change", "books", "proposals"),
    [
        (1, {}, {}, vector(2, 7)),
        (65, {}, {}, vector(2, 7)),
        (8, {}, {"top_k": 0}, vector(2, 7)),
        (8, {}, {"top_k": MAX_TOP + 1}, vector(2, 7)),
        (8, {}, {}, vector(3, 7)),
        (8, {}, {}, vector(2, 0)),
        (8, {}, {}, vector(0, 7)),
        (8, {}, {"successors": ShapeOnly((98, 64))}, vector(2, 7)),
        (8, {}, {"predecessors": ShapeOnly((99, 60))}, vector(2, 7)),
        (8, {}, {"predecessors": ShapeOnly((99, 1032))}, vector(2, 7)),
        (8, {}, {"predecessors": ShapeOnly((0, 64))}, vector(2, 7)),
        (8, {}, {"successors": ShapeOnly((99, 64), address=8)}, vector(2, 7)),
        (8, {"top_ids": vector(16, MAX_TOP - 1)}, {}, vector(2, 7)),
        (8, {"top_logprobs": vector(16, MAX_TOP)}, {}, vector(2, 7)),
        (8, {"is_finite": vector(15)}, {}, vector(2, 7)),
        (8, {"gates": ShapeOnly((16, 72))}, {}, vector(2, 7)),
        (8, {"gates": ShapeOnly((16, 64), strides=(136, 2))}, {}, vector(2, 7)),
        (8, {"token_ids": ShapeOnly((16,), "int64")}, {}, vector(2, 7)),
        (8, {"ordinals": vector(17)}, {}, vector(2, 7)),
        (8, {"rows": ShapeOnly((191,), "uint8")}, {}, vector(2, 7)),
    ],
)
def test_a_launch_refuses(
    columns: int, change: dict[str, Any], books: dict[str, Any], proposals: ShapeOnly
) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="dflash_selector"):
        dflash_selector.launch(
            kernels.library, replace(selector_inputs(2, columns, 64), **change),
            replace(device_books(64), **books), proposals, stream=0,
        )  # fmt: skip
    assert not kernels.launches
