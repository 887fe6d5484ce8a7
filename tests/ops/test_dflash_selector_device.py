"""dflash_selector on the device against its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import device_sampling, dflash_selector
from ninfer.ops.device_sampling import MAX_TOP, SamplingInputs, SamplingOutputs
from ninfer.ops.dflash_selector import Codebooks, DeviceCodebooks, SelectorInputs
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.selector_cases import NUM_IDS, WalkCase, exact_case, params_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    return float_to_bf16(values.astype(np.float32))


def rounded(values: NDArray[Any]) -> NDArray[np.float64]:
    """To bf16."""
    return bf16_to_float(bf16(values)).astype(np.float64)


class Walks:
    """A case on the device; gates stand in wider rows."""

    def __init__(self, device: Device, case: WalkCase) -> None:
        cp, self._device = device.cp, device
        gates = cp.asarray(np.pad(bf16(case.gates), ((0, 0), (0, 8))))
        self.books = DeviceCodebooks(
            cp.asarray(bf16(case.predecessors)), cp.asarray(bf16(case.successors)), case.top_k
        )
        self.inputs = SelectorInputs(
            cp.asarray(case.top_ids), cp.asarray(case.top_logprobs), cp.asarray(case.is_finite),
            gates[:, :-8], cp.asarray(case.token_ids), cp.asarray(case.ordinals),
            cp.asarray(case.rows.view(np.uint8)),
        )  # fmt: skip
        self.num_rows = case.rows.size

    def run(self, num_proposals: int, *, is_chained: bool = False) -> NDArray[np.int32]:
        device = self._device
        proposals = Fenced(device.cp, (self.num_rows, num_proposals), "int32")
        dflash_selector.launch(
            device.kernels, self.inputs, self.books, proposals.array, stream=device.stream.ptr,
            is_chained=is_chained,
        )  # fmt: skip
        device.stream.synchronize()
        result: NDArray[np.int32] = proposals.read()
        return result


@pytest.mark.parametrize("top_k", [1, 5, 16, 20])
@pytest.mark.parametrize("rank", [8, 64, 256, 264, 512, 1024])
def test_walks_are_those_of_the_reference(device: Device, rank: int, top_k: int) -> None:
    for seed, columns in enumerate((2, 5, 16)):
        rng = np.random.default_rng([seed, rank, top_k])
        case = exact_case(rng, 12, columns, rank=rank, top_k=top_k)
        got = Walks(device, case).run(15)
        np.testing.assert_array_equal(got, case.proposals(15))


def test_the_longest_block_and_few_proposals(device: Device) -> None:
    rng = np.random.default_rng(0)
    case = exact_case(rng, 4, 64, rank=256, top_k=20, failures=0.0)
    walks = Walks(device, case)
    for num_proposals in (63, 70, 1, 6):
        want = case.proposals(num_proposals)
        np.testing.assert_array_equal(walks.run(num_proposals, is_chained=True), want)


def test_a_row_does_not_depend_on_its_mates(device: Device) -> None:
    case = exact_case(np.random.default_rng(3), 9, 8, rank=64, top_k=16)
    together = Walks(device, case).run(7)
    for row in (0, 4, 8):
        alone = Walks(device, case.only_row(row)).run(7)
        assert (alone[0] == together[row]).all()


def test_a_captured_walk_follows_its_inputs(device: Device) -> None:
    cases = [
        exact_case(np.random.default_rng(seed), 5, 6, rank=64, top_k=16, failures=0.0)
        for seed in range(3)
    ]
    walks, proposals = Walks(device, cases[0]), Fenced(device.cp, (5, 5), "int32")
    stream = device.stream
    dflash_selector.launch(
        device.kernels, walks.inputs, walks.books, proposals.array, stream=stream.ptr
    )
    stream.synchronize()
    stream.begin_capture()
    for _ in range(2):
        dflash_selector.launch(
            device.kernels, walks.inputs, walks.books, proposals.array, stream=stream.ptr,
            is_chained=True,
        )  # fmt: skip
    graph = stream.end_capture()
    for case in cases:
        other = Walks(device, case)
        for name in ("top_ids", "top_logprobs", "gates", "token_ids", "ordinals", "rows"):
            getattr(walks.inputs, name)[...] = getattr(other.inputs, name)
        for name in ("predecessors", "successors"):
            getattr(walks.books, name)[...] = getattr(other.books, name)
        proposals.array[...] = -9
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(proposals.read(), case.proposals(5))


@pytest.mark.parametrize("damage", ["id", "negative id", "anchor", "logit", "factor"])
def test_walks_end_where_there_is_no_choice(device: Device, damage: str) -> None:
    case = exact_case(np.random.default_rng(5), 1, 8, rank=8, top_k=4, failures=0.0)
    case = replace(case, ordinals=np.arange(8, dtype=np.int32))
    want = Walks(device, case).run(7)
    assert (want >= 0).all()
    end = 3
    if damage in ("id", "negative id"):
        case.top_ids[4, 2] = NUM_IDS if damage == "id" else -1
    elif damage == "anchor":
        case.token_ids[0], end = NUM_IDS, 0
    elif damage == "logit":
        case.top_logprobs[4, 3] = np.inf
    else:
        case.successors[case.top_ids[4, 1]] = np.nan
        is_met = np.isin(case.top_ids[1:4, :4], case.top_ids[4, 1]).any()
        assert not is_met
    got = Walks(device, case).run(7)
    assert (got[0, :end] == want[0, :end]).all()
    assert (got[0, end:] == -1).all()


@pytest.mark.parametrize("rank", [256, 1024])
def test_greedy_walks_take_the_best_of_random_scores(device: Device, rank: int) -> None:
    rng = np.random.default_rng(rank)
    case = exact_case(rng, 8, 16, rank=rank, top_k=16, failures=0.0)
    rows = case.rows.copy()
    rows["is_greedy"] = 1
    case = replace(
        case, rows=rows, gates=rounded(rng.standard_normal(case.gates.shape)),
        predecessors=rounded(rng.standard_normal(case.predecessors.shape)),
        successors=rounded(rng.standard_normal(case.successors.shape) * 0.05),
        ordinals=np.tile(np.arange(16, dtype=np.int32), 8),
    )  # fmt: skip
    got = Walks(device, case).run(15)
    for row in range(8):
        before = int(case.token_ids[row * 16])
        for place in range(15):
            at = row * 16 + place + 1
            ids, logits = case.top_ids[at, :16], case.top_logprobs[at, :16].astype(np.float64)
            edges = case.successors[ids] @ (case.predecessors[before] * case.gates[at])
            before = int(got[row, place])
            (chosen,) = np.flatnonzero(ids == before)
            scores = logits + edges
            assert scores[chosen] >= scores.max() - 1e-4


def test_behind_the_sampler_walks_are_those_of_the_logits(device: Device) -> None:
    cp, columns, top_k, rank = device.cp, 8, 16, 64
    rng = np.random.default_rng(9)
    case = exact_case(rng, 6, columns, rank=rank, top_k=top_k, failures=0.0)
    rows = case.rows
    logits = (rng.standard_normal((6 * columns, NUM_IDS)) * 3.0).astype(np.float32)
    outputs = sampled(device, logits, np.repeat(rows, columns), top_k)
    walks = Walks(device, case)
    walks.inputs = replace(
        walks.inputs, top_ids=outputs.top_ids, top_logprobs=outputs.top_logprobs,
        is_finite=outputs.is_finite,
    )  # fmt: skip
    got = walks.run(columns - 1)
    assert cp.asnumpy(outputs.is_finite).all()
    for row in range(6):
        first = row * columns
        guesses = int((case.ordinals[first + 1 : first + columns] >= 0).sum())
        want: tuple[int, ...] = ()
        if guesses:
            places = slice(first + 1, first + 1 + guesses)
            want = dflash_selector.reference(
                logits[places].astype(np.float64), np.arange(NUM_IDS), case.gates[places],
                Codebooks(case.predecessors, case.successors, top_k), int(case.token_ids[first]),
                params_of(rows[row]), int(rows["position"][row]) - 1,
            )  # fmt: skip
        assert got[row].tolist() == [*want, *[-1] * (columns - 1 - guesses)]


def sampled(
    device: Device, logits: NDArray[np.float32], rows: NDArray[np.void], top_k: int
) -> SamplingOutputs:
    """The best tokens of every row of logits."""
    cp, count = device.cp, logits.shape[0]
    rows["is_greedy"], rows["num_top"], rows["repetition"] = 1, top_k, 1.0
    outputs = SamplingOutputs(
        cp.zeros(count, cp.int32), cp.zeros(count, cp.int32), cp.zeros(count, cp.float32),
        cp.zeros((count, MAX_TOP), cp.int32), cp.zeros((count, MAX_TOP), cp.float32),
    )  # fmt: skip
    device_sampling.launch(
        device.kernels, cp.asarray(logits),
        SamplingInputs(cp.asarray(rows.view(np.uint8)), cp.zeros(1, cp.int32),
                       cp.zeros(1, cp.float32)),
        outputs, num_valid_ids=NUM_IDS,
        scratch=cp.zeros(device_sampling.scratch_bytes(count), cp.uint8),
        stream=device.stream.ptr,
    )  # fmt: skip
    return outputs
