"""dflash_block and dflash_proposals: what they say, which arguments they refuse."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import dflash_block, dflash_proposals
from ninfer.ops.device_sampling import ROW
from ninfer.ops.dflash_block import BlockColumns, BlockInputs, BlockRules, LayerKind
from ninfer.ops.draft_step import DraftChain
from tests.helpers.dflash_cases import random_block
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes

ints = np.int32
MASK = 99
KINDS: tuple[LayerKind, ...] = ((None, False), (3, True), (2, False), (None, True))
RULES = BlockRules(MASK, KINDS)


def row_of_one(**changes: Any) -> BlockInputs[NDArray[Any]]:
    """A row whose newest token 5 stands at ordinal 10, asked for three guesses."""
    rows = np.zeros(1, ROW)
    rows["seed"], rows["position"], rows["temperature"], rows["top_k"] = 5, 11, 0.5, 7
    rows["has_mask"], rows["repetition"], rows["presence"], rows["bias_count"] = 1, 1.5, 1.0, 4
    inputs: BlockInputs[NDArray[Any]] = BlockInputs(
        chain=DraftChain(np.array([10], ints), np.full((3, 1), 10, ints), rows.view(np.uint8)),
        token_ids=np.array([8, 5, -1], ints),
        last_columns=np.array([1], ints),
        proposed=np.array([3], ints),
        limits=np.array([100], ints),
    )
    return replace(inputs, **changes)


def with_chain(**changes: Any) -> BlockInputs[NDArray[Any]]:
    inputs = row_of_one()
    return replace(inputs, chain=replace(inputs.chain, **changes))


def test_a_block_is_the_newest_token_and_masks() -> None:
    block = dflash_block.reference(row_of_one(), RULES, columns=5)
    assert block.token_ids.tolist() == [5, MASK, MASK, MASK, 5]
    assert block.ordinals.tolist() == [10, 11, 12, 13, -1]
    assert block.rope_positions.tolist() == [[10, 11, 12, 13, 14]] * 3
    assert block.column_rows.tolist() == [0] * 5
    assert block.row_starts.tolist() == [0, 5]


def test_columns_see_keys_by_the_kind_of_the_layer() -> None:
    block = dflash_block.reference(row_of_one(), RULES, columns=5)
    spans = np.stack((block.firsts, block.lasts), axis=-1).tolist()
    assert spans[0] == [[0, 13], [0, 13], [0, 13], [0, 13], [0, -1]]
    assert spans[1] == [[8, 10], [9, 11], [10, 12], [11, 13], [0, -1]]
    assert spans[2] == [[9, 11], [10, 12], [11, 13], [12, 13], [0, -1]]
    assert spans[3] == [[0, 10], [0, 11], [0, 12], [0, 13], [0, -1]]


def test_a_window_does_not_reach_below_the_first_key() -> None:
    inputs = with_chain(ordinals=np.array([1], ints), rope_positions=np.ones((3, 1), ints))
    block = dflash_block.reference(inputs, BlockRules(MASK, ((4, False),)), columns=3)
    assert block.firsts.tolist() == [[0, 0, 0]]
    assert block.lasts.tolist() == [[3, 3, 3]]


@pytest.mark.parametrize("num_candidates", [0, 16])
def test_columns_are_chosen_as_the_chain_says(num_candidates: int) -> None:
    rules = replace(RULES, num_candidates=num_candidates)
    rows = dflash_block.reference(row_of_one(), rules, columns=4).rows.view(ROW)
    assert rows["position"].tolist() == [10, 11, 12, 13]
    for name, value in (
        ("seed", 5), ("temperature", 0.5), ("top_k", 7), ("has_mask", 0), ("repetition", 1.0),
        ("presence", 0.0), ("bias_count", 0), ("is_greedy", int(num_candidates > 0)),
        ("num_top", num_candidates or -1),
    ):  # fmt: skip
        assert (rows[name] == value).all(), name


@pytest.mark.parametrize(
    ("inputs", "guesses"),
    [
        (row_of_one(proposed=np.array([2], ints)), 2),
        (row_of_one(proposed=np.array([9], ints)), 4),
        (row_of_one(limits=np.array([12], ints)), 1),
        (row_of_one(limits=np.array([11], ints)), 0),
        (row_of_one(limits=np.array([3], ints)), 0),
        (row_of_one(proposed=np.array([0], ints)), 0),
        (row_of_one(proposed=np.array([-2], ints)), 0),
        (with_chain(ordinals=np.array([-1], ints)), 0),
        (with_chain(ordinals=np.array([-1], ints), rope_positions=np.full((3, 1), -1, ints)), 0),
        (with_chain(rope_positions=np.array([[10], [10], [9]], ints)), 0),
    ],
)
def test_guesses_are_as_many_as_are_asked_for_and_fit(
    inputs: BlockInputs[NDArray[Any]], guesses: int
) -> None:
    block = dflash_block.reference(inputs, RULES, columns=5)
    is_real = block.ordinals >= 0
    assert is_real.sum() == (guesses + 1 if guesses else 0)
    assert (block.token_ids == MASK).sum() == guesses
    assert (block.lasts[:, ~is_real] == -1).all()
    assert (block.rope_positions >= 0).all()


def test_no_token_is_token_0() -> None:
    block = dflash_block.reference(row_of_one(last_columns=np.array([2], ints)), RULES, columns=5)
    assert block.token_ids.tolist() == [0, MASK, MASK, MASK, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 7))
def test_a_row_is_what_it_is_alone(seed: int, num_rows: int, columns: int) -> None:
    inputs = random_block(np.random.default_rng(seed), num_rows, columns)
    together = dflash_block.reference(inputs, RULES, columns=columns)
    for row in range(num_rows):
        alone = dflash_block.reference(only_row(inputs, row), RULES, columns=columns)
        part = slice(row * columns, (row + 1) * columns)
        for name in ("token_ids", "ordinals", "rope_positions", "firsts", "lasts"):
            got, want = getattr(together, name), getattr(alone, name)
            assert (got[..., part] == want).all(), name
        assert (together.column_rows[part] == row).all()
        assert together.row_starts[row] == part.start
        assert (together.rows.view(ROW)[part] == alone.rows.view(ROW)).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 7))
def test_keys_lie_in_the_window_and_in_pages(seed: int, num_rows: int, columns: int) -> None:
    inputs = random_block(np.random.default_rng(seed), num_rows, columns)
    block = dflash_block.reference(inputs, RULES, columns=columns)
    for at in np.flatnonzero(block.ordinals >= 0):
        ordinal, row = block.ordinals[at], block.column_rows[at]
        written = block.ordinals[block.column_rows == row].max()
        assert written < inputs.limits[row]
        for index, (window, is_causal) in enumerate(KINDS):
            seen = {
                key
                for key in range(written + 1)
                if (window is None or abs(key - ordinal) < window)
                and (not is_causal or key <= ordinal)
            }
            first, last = block.firsts[index, at], block.lasts[index, at]
            assert seen == set(range(first, last + 1))


def only_row(inputs: BlockInputs[NDArray[Any]], row: int) -> BlockInputs[NDArray[Any]]:
    part, chain = slice(row, row + 1), inputs.chain
    return BlockInputs(
        chain=DraftChain(
            chain.ordinals[part],
            chain.rope_positions[:, part],
            chain.rows.view(ROW)[part].view(np.uint8),
        ),
        token_ids=inputs.token_ids,
        last_columns=inputs.last_columns[part],
        proposed=inputs.proposed[part],
        limits=inputs.limits[part],
    )


def test_proposals_are_the_choices_of_real_columns() -> None:
    chosen = np.array([9, 5, -1, 7, 9, 5, 6, 7], ints)
    ordinals = np.array([3, 4, 5, 6, 3, 4, -1, -1], ints)
    for num_proposals, want in (
        (3, [[5, -1, 7], [5, -1, -1]]),
        (5, [[5, -1, 7, -1, -1], [5, -1, -1, -1, -1]]),
        (2, [[5, -1], [5, -1]]),
    ):
        proposals = np.full((2, num_proposals), -7, ints)
        dflash_proposals.reference(chosen, ordinals, proposals)
        assert proposals.tolist() == want


def vector(*shape: int, address: int = 1 << 20) -> ShapeOnly:
    return ShapeOnly(shape, "int32", address)


def sampler_rows(count: int) -> ShapeOnly:
    return ShapeOnly((count * ROW.itemsize,), "uint8")


def block_arrays(
    rows: int, columns: int, kinds: int
) -> tuple[BlockInputs[ShapeOnly], BlockColumns[ShapeOnly]]:
    total = rows * columns
    inputs = BlockInputs(
        DraftChain(vector(rows), vector(3, rows), sampler_rows(rows)),
        vector(3 * rows), vector(rows), vector(rows), vector(rows),
    )  # fmt: skip
    outputs = BlockColumns(
        vector(total), vector(total), vector(3, total), vector(total), vector(rows + 1),
        vector(kinds, total), vector(kinds, total), sampler_rows(total),
    )  # fmt: skip
    return inputs, outputs


def test_a_block_is_a_thread_block_a_row() -> None:
    kernels = RecordingLibrary()
    inputs, outputs = block_arrays(8, 16, 2)
    inputs = replace(inputs, limits=vector(8, address=4096))
    rules = BlockRules(MASK, ((1 << 40, True), (None, False)), 16)
    dflash_block.launch(kernels.library, inputs, outputs, rules, stream=0, is_chained=True)
    launch = kernels.only()
    assert launch.grid == (8, 1, 1)
    assert launch.arguments.dtype.itemsize == struct_bytes("dflash", "BlockParams")
    assert launch.options["programmatic"]
    assert (launch["num_rows"], launch["columns"], launch["limits"]) == (8, 16, 4096)
    assert (launch["num_kinds"], launch["num_candidates"], launch["mask_token_id"]) == (2, 16, MASK)
    assert launch.arguments["windows"].tolist() == [1 << 30, 0, 0, 0]
    assert launch.arguments["is_causal"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", [field.name for field in fields(BlockColumns)])
def test_a_block_refuses_outputs_of_another_shape(name: str) -> None:
    kernels = RecordingLibrary()
    inputs, outputs = block_arrays(2, 4, 4)
    wrong = sampler_rows(7) if name == "rows" else vector(7)
    with pytest.raises(OpContractError, match="dflash_block"):
        dflash_block.launch(
            kernels.library, inputs, replace(outputs, **{name: wrong}), RULES, stream=0
        )
    assert not kernels.launches


@pytest.mark.parametrize(
    ("columns", "rules", "inputs"),
    [
        (1, {}, {}),
        (65, {}, {}),
        (4, {"kinds": ()}, {}),
        (4, {"kinds": ((None, False),) * 5}, {}),
        (4, {"kinds": ((0, False),) * 4}, {}),
        (4, {"mask_token_id": -1}, {}),
        (4, {"num_candidates": 21}, {}),
        (4, {"num_candidates": -1}, {}),
        (4, {}, {"token_ids": vector(0)}),
        (4, {}, {"proposed": vector(3)}),
        (4, {}, {"limits": ShapeOnly((2,), "int64")}),
        (4, {}, {"chain": DraftChain(vector(0), vector(3, 0), sampler_rows(0))}),
        (4, {}, {"chain": DraftChain(vector(2), vector(2), sampler_rows(2))}),
        (4, {}, {"chain": DraftChain(vector(2), vector(3, 2), ShapeOnly((192,), "uint8", 1028))}),
    ],
)
def test_a_block_refuses(columns: int, rules: dict[str, Any], inputs: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    reads, writes = block_arrays(2, columns, 4)
    with pytest.raises(OpContractError, match="dflash_block"):
        dflash_block.launch(
            kernels.library, replace(reads, **inputs), writes, replace(RULES, **rules), stream=0
        )
    assert not kernels.launches


def test_proposals_are_a_thread_each() -> None:
    kernels = RecordingLibrary()
    dflash_proposals.launch(
        kernels.library, vector(40 * 16), vector(40 * 16), vector(40, 15), stream=0,
        is_chained=True,
    )  # fmt: skip
    launch = kernels.only()
    assert launch.grid[0] * launch.block[0] >= 40 * 15
    assert launch.arguments.dtype.itemsize == struct_bytes("dflash", "ProposalsParams")
    assert launch.options["programmatic"]
    assert (launch["num_rows"], launch["columns"], launch["num_proposals"]) == (40, 16, 15)


@pytest.mark.parametrize(
    ("chosen", "ordinals", "proposals"),
    [
        (vector(8), vector(7), vector(2, 3)),
        (vector(7), vector(7), vector(2, 3)),
        (vector(2), vector(2), vector(2, 3)),
        (vector(8), vector(8), vector(2, 0)),
        (vector(0), vector(0), vector(0, 3)),
        (vector(8), vector(8), ShapeOnly((2, 3), "int64")),
        (vector(8), vector(8), ShapeOnly((2, 3), "int32", strides=(16, 4))),
    ],
)
def test_proposals_refuse(chosen: ShapeOnly, ordinals: ShapeOnly, proposals: ShapeOnly) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="dflash_proposals"):
        dflash_proposals.launch(kernels.library, chosen, ordinals, proposals, stream=0)
    assert not kernels.launches
