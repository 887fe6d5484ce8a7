"""draft_match, draft_step, draft_input, copy_rows: what they say, which arguments they refuse."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import copy_rows, draft_input, draft_match, draft_step, rms_norm
from ninfer.ops.device_sampling import ROW
from ninfer.ops.draft_input import DraftNorms, HiddenRows
from ninfer.ops.draft_match import MatchInputs, MatchOutputs, PairColumns
from ninfer.ops.draft_step import DraftChain, StepOutputs
from tests.helpers.draft_cases import random_unit
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes

ints = np.int32


def unit_of_one(tokens: list[int], chosen: list[int], **changes: Any) -> MatchInputs[NDArray[Any]]:
    """A row that reads slot 7 from ordinal 10 on, rotary positions from 20, 30 and 40."""
    count = len(tokens)
    rows = np.zeros(count, ROW)
    rows["seed"], rows["position"] = 5, np.arange(count) + 11
    rows["num_top"], rows["has_mask"], rows["repetition"], rows["bias_count"] = 3, 1, 1.5, 4
    inputs: MatchInputs[NDArray[Any]] = MatchInputs(
        token_ids=np.array(tokens, ints),
        counts=np.array([count], ints),
        ordinals=np.arange(10, 10 + count, dtype=ints),
        rope_positions=np.array([[20], [30], [40]], ints) + np.arange(count, dtype=ints),
        read_slots=np.array([7], ints),
        limits=np.array([100], ints),
        rows=rows.view(np.uint8),
        chosen=np.array(chosen, ints),
        is_finite=np.ones(count, ints),
    )
    return replace(inputs, **changes)


@pytest.mark.parametrize(
    ("chosen", "accepted"),
    [
        ([5, 6, 7, 8], 3),
        ([5, 6, 0, 8], 2),
        ([5, 0, 7, 8], 1),
        ([0, 6, 7, 8], 0),
        ([-1, 6, 7, 8], 0),
        ([5, -1, 7, 8], 0),
        ([5, 6, -1, 8], 1),
        ([5, 6, 7, -1], 2),
        ([5, 0, 7, -1], 1),
    ],
)
def test_drafts_are_right_up_to_the_first_that_differs(chosen: list[int], accepted: int) -> None:
    outputs = draft_match.reference(unit_of_one([4, 5, 6, 7], chosen))
    assert outputs.accepted.tolist() == [accepted]
    assert outputs.row_ends.tolist() == [accepted + 1]
    assert outputs.kept_columns.tolist() == [accepted]


def test_logits_that_are_not_finite_are_no_choice() -> None:
    inputs = unit_of_one([4, 5, 6], [5, 6, 7], is_finite=np.array([1, 1, 0], ints))
    assert draft_match.reference(inputs).accepted.tolist() == [1]


def test_pairs_shift_tokens_against_outputs_by_one() -> None:
    inputs = unit_of_one([4, 5, 6, 0], [5, 9, 3, 3], counts=np.array([3], ints))
    outputs = draft_match.reference(inputs)
    pairs, chain = outputs.pairs, outputs.chain
    assert pairs.token_ids.tolist() == [4, 5, 9, 0, 0]
    assert pairs.sources.tolist() == [-8, 0, 1, 0, 0]
    assert pairs.ordinals.tolist() == [10, 11, 12, -1, -1]
    assert pairs.rope_positions[1].tolist() == [30, 31, 32, 33, 34]
    assert pairs.last_columns.tolist() == [2]
    assert chain.ordinals.tolist() == [12]
    assert chain.rope_positions.tolist() == [[22], [32], [42]]
    (row,) = chain.rows.view(ROW)
    assert (row["seed"], row["position"], row["num_top"], row["has_mask"]) == (5, 13, -1, 0)
    assert (row["repetition"], row["bias_count"]) == (1.0, 0)


def test_pairs_stop_where_pages_end() -> None:
    inputs = unit_of_one([4, 5], [5, 6], limits=np.array([12], ints))
    outputs = draft_match.reference(inputs)
    assert outputs.accepted.tolist() == [1]
    assert outputs.pairs.ordinals.tolist() == [10, 11, -1]
    assert outputs.chain.ordinals.tolist() == [-1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6))
def test_a_row_is_what_it_is_alone(seed: int, num_rows: int, columns: int) -> None:
    inputs = random_unit(np.random.default_rng(seed), num_rows, columns)
    together = draft_match.reference(inputs)
    assert together.pairs.row_starts.tolist() == [b * (columns + 1) for b in range(num_rows + 1)]
    for row in range(num_rows):
        alone = draft_match.reference(only_row(inputs, row, columns))
        pairs = slice(row * (columns + 1), (row + 1) * (columns + 1))
        assert together.accepted[row] == alone.accepted[0]
        assert together.row_ends[row] == alone.row_ends[0] + row * columns
        assert together.pairs.last_columns[row] == alone.pairs.last_columns[0] + pairs.start
        for name in ("token_ids", "ordinals"):
            got, want = (getattr(item.pairs, name) for item in (together, alone))
            assert (got[pairs] == want).all()
        sources = together.pairs.sources[pairs]
        is_shifted = (sources >= 0) & (together.pairs.ordinals[pairs] >= 0)
        assert (np.where(is_shifted, sources - row * columns, sources) == alone.pairs.sources).all()
        assert (together.pairs.rope_positions[:, pairs] == alone.pairs.rope_positions).all()
        assert together.chain.ordinals[row] == alone.chain.ordinals[0]
        assert (together.chain.rows.view(ROW)[row] == alone.chain.rows.view(ROW)[0]).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6))
def test_an_accepted_run_is_one_of_right_drafts_and_ends_for_a_reason(
    seed: int, num_rows: int, columns: int
) -> None:
    inputs = random_unit(np.random.default_rng(seed), num_rows, columns)
    accepted = draft_match.reference(inputs).accepted
    for row, right in enumerate(accepted.tolist()):
        first, drafts = row * columns, int(inputs.counts[row]) - 1
        has_choice = (inputs.chosen >= 0) & (inputs.is_finite != 0)
        run = slice(first, first + right)
        assert 0 <= right <= drafts
        assert has_choice[run].all()
        assert (inputs.chosen[run] == inputs.token_ids[first + 1 : first + right + 1]).all()
        is_over = (
            right == drafts or inputs.chosen[first + right] != inputs.token_ids[first + right + 1]
        )
        fails_next = not has_choice[first + right] or not has_choice[first + min(right + 1, drafts)]
        assert is_over or fails_next
        assert has_choice[first + right] or right == 0


def only_row(
    inputs: MatchInputs[NDArray[Any]], row: int, columns: int
) -> MatchInputs[NDArray[Any]]:
    part = slice(row * columns, (row + 1) * columns)
    values: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if field.name == "rows":
            values[field.name] = value.view(ROW)[part].view(np.uint8)
        elif field.name == "rope_positions":
            values[field.name] = value[:, part]
        else:
            is_of_row = value.size == inputs.counts.size and field.name in (
                "counts", "read_slots", "limits",
            )  # fmt: skip
            values[field.name] = value[row : row + 1] if is_of_row else value[part]
    return MatchInputs(**values)


def test_a_chain_ends_without_a_choice_and_where_pages_end() -> None:
    chain: DraftChain[NDArray[Any]] = DraftChain(
        ordinals=np.array([12, 12, 12, -1], ints),
        rope_positions=np.tile(np.array([20, 30, 40, 50], ints), (3, 1)),
        rows=np.zeros(4, ROW).view(np.uint8),
    )
    outputs: StepOutputs[NDArray[Any]] = StepOutputs(
        np.full(4, -7, ints), np.full(4, -7, ints), np.full((4, 3), -7, ints)
    )
    limits = np.array([100, 100, 13, 100], ints)
    draft_step.reference(np.array([5, -1, 6, 7], ints), limits, chain, outputs, index=0)
    assert outputs.proposals[:, 0].tolist() == [5, -1, 6, -1]
    assert outputs.token_ids.tolist() == [5, 0, 6, 7]
    assert outputs.sources.tolist() == [0, 1, 2, 3]
    assert chain.ordinals.tolist() == [13, -1, -1, -1]
    assert chain.rope_positions[2].tolist() == [21, 31, 41, 51]
    draft_step.reference(np.array([8, 9, 9, 9], ints), limits, chain, outputs, index=1)
    assert outputs.proposals.tolist() == [[5, 8, -7], [-1, -1, -7], [6, -1, -7], [-1, -1, -7]]
    assert chain.rows.view(ROW)["position"].tolist() == [2] * 4


def test_inputs_are_the_norms_of_both_halves() -> None:
    rng = np.random.default_rng(0)
    table, hidden, kept = (rng.standard_normal((n, 8)) for n in (9, 4, 3))
    gains = rng.standard_normal((2, 8))
    ids, sources = np.array([3, 8, 1, 3], ints), np.array([-1, 0, -3, 3], ints)
    x = draft_input.reference(ids, sources, table, hidden, kept, gains[0], gains[1], eps=1e-6)
    h = np.stack((kept[0], hidden[0], kept[2], hidden[3]))
    for half, (rows, gain) in enumerate(((table[ids], gains[0]), (h, gains[1]))):
        want = rms_norm.reference(rows, gain, eps=1e-6, offset=1.0)
        np.testing.assert_array_equal(x[:, 8 * half : 8 * half + 8], want)


def test_the_pair_of_the_first_token_has_no_output_in_front_of_it() -> None:
    table, kept = np.ones((2, 8)), np.zeros((1, 8))
    gain = np.ones(8)
    sources = draft_input.shifted_sources(1, 0)
    assert sources.tolist() == [-1]
    ids = np.array([1], ints)
    x = draft_input.reference(ids, sources, table, table, kept, gain, gain, eps=1e-6)
    assert (x[0, 8:] == 0.0).all()
    assert draft_input.shifted_sources(3, 5).tolist() == [-6, 0, 1]


def test_rows_are_copied_to_where_they_belong() -> None:
    source, target = np.arange(12).reshape(4, 3), np.zeros((5, 3), int)
    reads, writes = np.array([2, 0], ints), np.array([4, 1], ints)
    copy_rows.reference(source, target, num_rows=2, source_rows=reads, target_rows=writes)
    assert target[4].tolist() == [6, 7, 8]
    assert target[1].tolist() == [0, 1, 2]
    copy_rows.reference(source, target, num_rows=2)
    assert target[:2].tolist() == source[:2].tolist()


def vector(*shape: int, address: int = 1 << 20) -> ShapeOnly:
    return ShapeOnly(shape, "int32", address)


def match_arrays(rows: int, columns: int) -> tuple[MatchInputs[ShapeOnly], MatchOutputs[ShapeOnly]]:
    total, pairs = rows * columns, rows * (columns + 1)
    sampler = ROW.itemsize
    inputs = MatchInputs(
        vector(total), vector(rows), vector(total), vector(3, total), vector(rows), vector(rows),
        ShapeOnly((total * sampler,), "uint8"), vector(total), vector(total),
    )  # fmt: skip
    outputs = MatchOutputs(
        vector(rows), vector(rows), vector(rows),
        PairColumns(vector(pairs), vector(pairs), vector(pairs), vector(3, pairs), vector(pairs),
                    vector(rows + 1), vector(rows)),
        DraftChain(vector(rows), vector(3, rows), ShapeOnly((rows * sampler,), "uint8")),
    )  # fmt: skip
    return inputs, outputs


def test_a_match_is_a_warp_a_row() -> None:
    kernels = RecordingLibrary()
    inputs, outputs = match_arrays(8, 4)
    inputs = replace(inputs, limits=vector(8, address=4096))
    draft_match.launch(kernels.library, inputs, outputs, stream=0, is_chained=True)
    launch = kernels.only()
    assert (launch.grid, launch.block) == ((8, 1, 1), (32, 1, 1))
    assert launch.arguments.dtype.itemsize == struct_bytes("draft_rounds", "MatchParams")
    assert launch.options["programmatic"]
    assert (launch["num_rows"], launch["columns"], launch["limits"]) == (8, 4, 4096)


@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "outputs"),
    [
        (2, 32, {}, {}),
        (2, 4, {"counts": vector(3)}, {}),
        (2, 4, {"counts": vector(0)}, {}),
        (2, 4, {"token_ids": vector(7)}, {}),
        (2, 4, {"rope_positions": vector(8)}, {}),
        (2, 4, {"rows": ShapeOnly((8 * 95,), "uint8")}, {}),
        (2, 4, {"rows": ShapeOnly((8 * 96,), "uint8", 1028)}, {}),
        (2, 4, {"chosen": vector(2)}, {}),
        (2, 4, {}, {"accepted": vector(8)}),
        (2, 4, {}, {"row_ends": ShapeOnly((2,), "int64")}),
    ],
)
def test_a_match_refuses(
    rows: int, columns: int, inputs: dict[str, Any], outputs: dict[str, Any]
) -> None:
    kernels = RecordingLibrary()
    reads, writes = match_arrays(rows, columns)
    with pytest.raises(OpContractError, match="draft_match"):
        draft_match.launch(
            kernels.library, replace(reads, **inputs), replace(writes, **outputs), stream=0
        )
    assert not kernels.launches


def step_arguments(rows: int, proposals: int) -> dict[str, Any]:
    chain = DraftChain(vector(rows), vector(3, rows), ShapeOnly((rows * ROW.itemsize,), "uint8"))
    return {
        "chosen": vector(rows), "limits": vector(rows), "chain": chain,
        "outputs": StepOutputs(vector(rows), vector(rows), vector(rows, proposals)), "index": 0,
        "stream": 0,
    }  # fmt: skip


def test_a_step_is_a_thread_a_row() -> None:
    kernels = RecordingLibrary()
    draft_step.launch(kernels.library, **{**step_arguments(300, 5), "index": 4}, is_chained=True)
    launch = kernels.only()
    assert launch.grid[0] * launch.block[0] >= 300
    assert launch.arguments.dtype.itemsize == struct_bytes("draft_rounds", "StepParams")
    assert (launch["num_proposals"], launch["index"]) == (5, 4)
    assert launch.options["programmatic"]


@pytest.mark.parametrize(
    "change",
    [{"index": 3}, {"index": -1}, {"chosen": vector(3)}, {"limits": ShapeOnly((2,), "uint32")}],
)
def test_a_step_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="draft_step"):
        draft_step.launch(kernels.library, **{**step_arguments(2, 3), **change})
    assert not kernels.launches


def input_arguments(tokens: int, columns: int) -> dict[str, Any]:
    gain = ShapeOnly((columns,))
    return {
        "token_ids": vector(tokens), "table": ShapeOnly((100, columns)),
        "rows": HiddenRows(ShapeOnly((tokens, columns)), ShapeOnly((5, columns))),
        "norms": DraftNorms(gain, gain, 1e-6), "x": ShapeOnly((tokens, 2 * columns)), "stream": 0,
    }  # fmt: skip


@pytest.mark.parametrize("columns", [8, 64, 2560, 5120, 9000, 32768])
def test_an_input_has_the_threads_of_the_norm(columns: int) -> None:
    kernels = RecordingLibrary()
    arguments = input_arguments(3, columns)
    draft_input.launch(kernels.library, **arguments, sources=vector(3), is_chained=True)
    rms_norm.launch(
        kernels.library, ShapeOnly((3, columns)), ShapeOnly((columns,)), ShapeOnly((3, columns)),
        eps=1e-6, offset=1.0, stream=0,
    )  # fmt: skip
    launch, norm = kernels.launches
    assert launch.grid == (3, 2, 1)
    assert launch.block == norm.block
    assert launch.entry.rsplit("_", 1)[1] == norm.entry.rsplit("_", 1)[1]
    assert launch.arguments.dtype.itemsize == struct_bytes("draft_rounds", "InputParams")
    assert launch["x_stride"] == 2 * columns
    assert (launch["sources"], launch["read_slot"]) == (vector(1).address, 0)


def test_a_unit_of_one_row_needs_no_sources() -> None:
    kernels = RecordingLibrary()
    draft_input.launch(kernels.library, **input_arguments(9, 64), read_slot=vector(1))
    launch = kernels.only()
    assert (launch["sources"], launch["read_slot"]) == (0, vector(1).address)


@pytest.mark.parametrize(
    "change",
    [
        {"sources": None},
        {"read_slot": vector(1)},
        {"sources": vector(4)},
        {"sources": None, "read_slot": vector(2)},
        {"sources": None, "read_slot": vector(1),
         "rows": HiddenRows(ShapeOnly((1, 64)), ShapeOnly((5, 64)))},
        {"rows": HiddenRows(ShapeOnly((3, 32)), ShapeOnly((5, 64)))},
        {"rows": HiddenRows(ShapeOnly((3, 64)), ShapeOnly((5, 64), address=8))},
        {"table": ShapeOnly((100, 60))},
        {"table": ShapeOnly((100, 64), strides=(256, 2))},
        {"norms": DraftNorms(ShapeOnly((64,)), ShapeOnly((32,)), 1e-6)},
        {"norms": DraftNorms(ShapeOnly((64,)), ShapeOnly((64,)), 0.0)},
        {"x": ShapeOnly((3, 64))},
    ],
)  # fmt: skip
def test_an_input_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    arguments = {**input_arguments(3, 64), "sources": vector(3), **change}
    with pytest.raises(OpContractError, match="draft_input"):
        draft_input.launch(kernels.library, **arguments)
    assert not kernels.launches


def test_copied_rows_may_have_gaps() -> None:
    kernels = RecordingLibrary()
    copy_rows.launch(
        kernels.library, ShapeOnly((9, 64), strides=(256, 2)), ShapeOnly((5, 64)), num_rows=3,
        target_rows=vector(3), stream=0, is_chained=True,
    )  # fmt: skip
    launch = kernels.only()
    assert (launch["source_stride"], launch["target_stride"], launch["columns"]) == (128, 64, 64)
    assert (launch["source_rows"], launch["target_rows"]) == (0, vector(1).address)
    assert launch.grid == (3, 1, 1)
    assert launch.arguments.dtype.itemsize == struct_bytes("draft_rounds", "CopyRowsParams")


@pytest.mark.parametrize(
    "change",
    [
        {"num_rows": 0},
        {"num_rows": 6},
        {"target": ShapeOnly((5, 32))},
        {"source": ShapeOnly((9, 60)), "target": ShapeOnly((5, 60))},
        {"source": ShapeOnly((9, 64), address=8)},
        {"source_rows": vector(2)},
    ],
)
def test_a_copy_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    arguments: dict[str, Any] = {
        "source": ShapeOnly((9, 64)), "target": ShapeOnly((5, 64)), "num_rows": 3, **change,
    }  # fmt: skip
    with pytest.raises(OpContractError, match="copy_rows"):
        copy_rows.launch(kernels.library, **arguments, stream=0)
    assert not kernels.launches
