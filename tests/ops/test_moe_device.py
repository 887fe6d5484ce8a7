"""The mixture of experts on the device: router, pairs, experts, combination; and their launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import (
    moe_combine,
    moe_experts,
    moe_grouped,
    moe_pairs,
    moe_router,
    swiglu,
)
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.moe_pairs import SortedPairs
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.linear_fragments import product
from tests.helpers.packed_weights import PackedWeight, exact_rows, random_packed
from tests.helpers.recorded_launches import H200, RecordingLibrary, ShapeOnly, struct_bytes
from tests.helpers.tolerance import BF16_REDUCTION, FLOAT32_REDUCTION, assert_close

FORMATS = list(WeightFormat)


def random_bf16(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return float_to_bf16(values.astype(np.float32))


def wide(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    return bf16_to_float(codes).astype(np.float64)


def shape_pairs(num_pairs: int, num_experts: int) -> SortedPairs:
    vector = ShapeOnly((num_pairs,), "int32")
    return SortedPairs(
        vector, vector, ShapeOnly((num_experts + 1,), "int32"),
        ShapeOnly((moe_pairs.max_tiles(num_pairs, num_experts), 2), "int32"),
        ShapeOnly((1,), "int32"),
        ShapeOnly((moe_pairs.num_counts(num_pairs, num_experts),), "int32"),
    )  # fmt: skip


@pytest.mark.parametrize("strips", [1, 2, 4, 8])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_part_of_a_strip_is_where_the_kernel_looks(fmt: WeightFormat, strips: int) -> None:
    """image_part of weight_image.cuh, against the walk of the small-T linear kernel."""
    layout = ImageLayout(fmt, 32 * strips + 48, 272, strips)
    image = random_packed(layout, 0).image
    x = np.random.default_rng(0).standard_normal((1, 272)).astype(np.float32)
    want = product(image, layout, x)
    got = np.zeros_like(want)
    columns = fmt.part_columns
    for strip in range(layout.strips):
        block = strip // strips
        in_block = layout.last_strips if block == layout.row_blocks - 1 else strips
        parts = in_block * layout.slices
        for column in range(-(-layout.columns // columns)):
            start = block * layout.units_per_block * fmt.unit_bytes()
            start += column // layout.slices * fmt.unit_bytes(parts)
            part = column % layout.slices * in_block + strip % strips
            one = ImageLayout(fmt, 32, columns, 1)
            alone = np.zeros(one.image_bytes, np.uint8)
            alone[:2048] = image[start + part * 2048 :][:2048]
            slab = {WeightFormat.NVFP4: 256, WeightFormat.FP8_BLOCK: 8}.get(fmt, 0)
            first = 8 * 2048
            alone[first : first + slab] = image[start + parts * 2048 + part * slab :][:slab]
            run = x[:, column * columns : (column + 1) * columns]
            got[:, strip * 32 : strip * 32 + 32] += product(alone, one, run)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("architecture", "kilobytes"), [("sm_86", 99), ("sm_90a", 227)])
def test_every_tile_has_a_block_and_fits(
    fmt: WeightFormat, architecture: str, kilobytes: int
) -> None:
    limits = dataclasses.replace(
        H200, architecture=architecture, shared_bytes_per_block=kilobytes * 1024
    )
    kernels = RecordingLibrary(limits)
    layout = ImageLayout.of(fmt, 1024, 2048)
    scales = ShapeOnly((256, 1024), "float32") if fmt.has_row_scale else None
    weights = ExpertWeights(layout, ShapeOnly((256, layout.image_bytes), "uint8"), scales)
    moe_grouped.launch(
        kernels.library, weights, shape_pairs(4096, 256), ShapeOnly((512, 2048)),
        ShapeOnly((4096, 512)), is_gated=True, stream=0,
    )  # fmt: skip
    launch = kernels.only()
    assert launch.grid == (4 if architecture == "sm_90a" else 8, 32 + 256, 1)
    assert launch["rows"] != 0
    assert ("wgmma" in launch.family) == (architecture == "sm_90a")
    assert launch.arguments.dtype.itemsize == struct_bytes("moe_grouped", "GroupedParams")


def test_structs_of_router_pairs_and_combination() -> None:
    kernels = RecordingLibrary()
    chosen, weights = ShapeOnly((5, 8), "int32"), ShapeOnly((5, 8), "float32")
    gate = ShapeOnly((5,), "float32")
    moe_router.launch(
        kernels.library, ShapeOnly((5, 256), "float32"), chosen, weights, renormalise=True,
        shared=moe_router.SharedGate(ShapeOnly((5, 64)), ShapeOnly((64,)), gate), stream=0,
    )  # fmt: skip
    moe_pairs.launch(kernels.library, chosen, shape_pairs(40, 256), 256, stream=0)
    moe_combine.launch(
        kernels.library, ShapeOnly((40, 64), "float32"), weights, ShapeOnly((5, 64)),
        ShapeOnly((5, 64)), shared=moe_combine.SharedOutput(ShapeOnly((5, 64), "float32"), gate),
        square_sums=ShapeOnly((5, 2), "float32"), stream=0,
    )  # fmt: skip
    sizes = [launch.arguments.dtype.itemsize for launch in kernels.launches]
    assert sizes == [
        struct_bytes("moe_router", "RouterParams"),
        struct_bytes("moe_pairs", "PairParams"),
        struct_bytes("moe_pairs", "PairParams"),
        struct_bytes("moe_combine", "CombineParams"),
    ]


def test_wrong_arguments_are_refused() -> None:
    kernels = RecordingLibrary()
    layout = ImageLayout.of(WeightFormat.FP8_ROW, 64, 64)
    images = ShapeOnly((4, layout.image_bytes), "uint8")
    weights = ExpertWeights(layout, images, ShapeOnly((4, 64), "float32"))
    odd = ExpertWeights(
        ImageLayout.of(WeightFormat.BF16, 72, 64),
        ShapeOnly((4, ImageLayout.of(WeightFormat.BF16, 72, 64).image_bytes), "uint8"),
    )
    pairs, y = shape_pairs(6, 4), ShapeOnly((6, 64))
    calls: list[tuple[str, ExpertWeights, ShapeOnly, bool]] = [
        ("row scales", ExpertWeights(layout, images), ShapeOnly((6, 64)), False),
        ("x has shape", weights, ShapeOnly((3, 64)), False),
        ("x has shape", weights, ShapeOnly((6, 128)), False),
        ("y has shape", weights, ShapeOnly((3, 64)), True),
        ("multiple of 16", odd, ShapeOnly((3, 64)), True),
    ]
    for message, given_weights, x, is_gated in calls:
        with pytest.raises(OpContractError, match=message):
            moe_grouped.launch(
                kernels.library, given_weights, pairs, x, y, is_gated=is_gated, stream=0
            )
    for logits, count in ((ShapeOnly((5, 520), "float32"), 8), (ShapeOnly((5, 4), "float32"), 5)):
        with pytest.raises(OpContractError, match="moe_router"):
            moe_router.launch(
                kernels.library, logits, ShapeOnly((5, count), "int32"),
                ShapeOnly((5, count), "float32"), renormalise=True, stream=0,
            )  # fmt: skip
    assert not kernels.launches


def test_sorted_pairs_are_stable() -> None:
    ids = np.array([[3, 1], [1, 0], [3, 2]])
    positions, tokens, offsets, tiles = moe_pairs.reference(ids, 5)
    assert positions.tolist() == [4, 1, 2, 0, 5, 3]
    assert tokens.tolist() == [1, 0, 1, 2, 0, 2]
    assert offsets.tolist() == [0, 1, 3, 4, 6, 6]
    assert tiles.tolist() == [[0, 0], [1, 1], [2, 3], [3, 4]]


def test_tiles_end_with_their_expert() -> None:
    ids = np.array([[0], [2]]).repeat([300, 128], axis=0)
    _, _, _, tiles = moe_pairs.reference(ids, 3)
    assert tiles.tolist() == [[0, 0], [0, 128], [0, 256], [2, 300]]
    assert len(tiles) <= moe_pairs.max_tiles(428, 3)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def upload_pairs(device: Device, expert_ids: NDArray[Any], num_experts: int) -> SortedPairs:
    """Sorted on the host; tiles behind the last one are poisoned."""
    cp = device.cp
    positions, tokens, offsets, tiles = moe_pairs.reference(expert_ids, num_experts)
    most = moe_pairs.max_tiles(expert_ids.size, num_experts)
    padded = np.full((most, 2), 0x5A5A5A5A, np.int32)
    padded[: len(tiles)] = tiles
    total, counts = np.array([len(tiles)], np.int32), np.empty(1, np.int32)
    return SortedPairs(*map(cp.asarray, (positions, tokens, offsets, padded, total, counts)))


@pytest.mark.gpu
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "count"), [(4, 4), (60, 4), (256, 8), (512, 16)])
def test_router_chooses_as_the_reference(
    device: Device, num_experts: int, count: int, renormalise: bool
) -> None:
    cp = device.cp
    rng = np.random.default_rng(num_experts)
    logits = (rng.standard_normal((33, num_experts)) * 3).astype(np.float32)
    logits[0] = 1.0
    logits[1, ::3] = logits[1].max()
    x, gate = random_bf16((33, 2048), 1), random_bf16((2048,), 2)
    ids = Fenced(cp, (33, count), "int32")
    weights, shared_gate = Fenced(cp, (33, count), "float32"), Fenced(cp, (33,), "float32")
    moe_router.launch(
        device.kernels, cp.asarray(logits), ids.array, weights.array, renormalise=renormalise,
        shared=moe_router.SharedGate(cp.asarray(x), cp.asarray(gate), shared_gate.array),
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    want_ids, want = moe_router.reference(
        logits.astype(np.float64), experts_per_token=count, renormalise=renormalise
    )
    assert np.array_equal(ids.read(), want_ids)
    assert_close(weights.read(), want, FLOAT32_REDUCTION)
    dots = wide(x) @ wide(gate)
    assert np.abs(shared_gate.read() - 1 / (1 + np.exp(-dots))).max() < 1e-5


@pytest.mark.gpu
def test_router_weights_of_broken_logits_are_nan(device: Device) -> None:
    cp = device.cp
    logits = np.zeros((2, 64), np.float32)
    logits[1, 5] = np.nan
    ids, weights = Fenced(cp, (2, 8), "int32"), Fenced(cp, (2, 8), "float32")
    moe_router.launch(
        device.kernels, cp.asarray(logits), ids.array, weights.array, renormalise=True,
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    assert ids.read().tolist() == [list(range(8))] * 2
    assert np.isnan(weights.read()).tolist() == [[False] * 8, [True] * 8]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "count", "num_experts"),
    [(1, 8, 64), (17, 8, 64), (65, 4, 64), (2048, 8, 256), (8192, 8, 256), (1023, 16, 512),
     (300, 1, 1), (129, 1, 2), (5, 3, 7)],
)  # fmt: skip
@pytest.mark.parametrize("is_lopsided", [False, True])
def test_pairs_are_sorted_as_the_reference(
    device: Device, tokens: int, count: int, num_experts: int, is_lopsided: bool
) -> None:
    cp = device.cp
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, num_experts, (tokens, count)).astype(np.int32)
    if is_lopsided:
        ids[rng.random(ids.shape) < 0.9] = num_experts // 2
    num_pairs = tokens * count
    positions, sorted_tokens = (Fenced(cp, (num_pairs,), "int32") for _ in range(2))
    offsets, total = Fenced(cp, (num_experts + 1,), "int32"), Fenced(cp, (1,), "int32")
    tiles = Fenced(cp, (moe_pairs.max_tiles(num_pairs, num_experts), 2), "int32")
    counts = Fenced(cp, (moe_pairs.num_counts(num_pairs, num_experts),), "int32")
    pairs = SortedPairs(*(
        item.array for item in (positions, sorted_tokens, offsets, tiles, total, counts)
    ))  # fmt: skip
    moe_pairs.launch(device.kernels, cp.asarray(ids), pairs, num_experts, stream=device.stream.ptr)
    device.stream.synchronize()
    counts.read()
    want_positions, want_tokens, want_offsets, want_tiles = moe_pairs.reference(ids, num_experts)
    assert np.array_equal(positions.read(), want_positions)
    assert np.array_equal(sorted_tokens.read(), want_tokens)
    assert np.array_equal(offsets.read(), want_offsets)
    assert total.read().tolist() == [len(want_tiles)]
    assert np.array_equal(tiles.read()[: len(want_tiles)], want_tiles)


def make_experts(layout: ImageLayout, num_experts: int, *, is_gated: bool) -> list[PackedWeight]:
    return [
        random_packed(layout, seed, is_interleaved=is_gated, scale=layout.columns**-0.5)
        for seed in range(num_experts)
    ]


def upload_experts(device: Device, experts: list[PackedWeight]) -> ExpertWeights:
    cp = device.cp
    scales = [item.row_scale for item in experts if item.row_scale is not None]
    return ExpertWeights(
        experts[0].layout,
        cp.asarray(np.stack([item.image for item in experts])),
        cp.asarray(np.stack(scales)) if scales else None,
    )


def decoded(expert: PackedWeight, *, is_gated: bool) -> NDArray[np.float64]:
    """As the grouped products take it: with block scales rounded to bf16, otherwise exact."""
    values = exact_rows(expert, is_interleaved=is_gated)
    if expert.layout.format is not WeightFormat.FP8_BLOCK:
        return values
    return wide(float_to_bf16(values.astype(np.float32)))


def lopsided_ids(tokens: int, num_experts: int, count: int) -> NDArray[np.int32]:
    """Distinct experts a token; one takes every token, one takes none."""
    rng = np.random.default_rng([tokens, num_experts])
    others = max(num_experts - 2, count)
    ids = np.stack([rng.permutation(others)[:count] for _ in range(tokens)]).astype(np.int32)
    ids[:, 0] = num_experts - 1
    return ids


def run_grouped(
    device: Device, weights: tuple[ExpertWeights, ExpertWeights], ids: NDArray[np.int32],
    x: NDArray[np.uint16], *, is_portable: bool,
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:  # fmt: skip
    """Inner values and results by pair; outputs poisoned and fenced."""
    cp, stream = device.cp, device.stream.ptr
    num_experts = weights[0].images.__cuda_array_interface__["shape"][0]
    pairs = upload_pairs(device, ids, num_experts)
    inner = Fenced(cp, (ids.size, weights[1].layout.columns), "uint16")
    y = Fenced(cp, (ids.size, weights[1].layout.rows), "uint16")
    moe_grouped.launch(
        device.kernels, weights[0], pairs, cp.asarray(x), inner.array, is_gated=True,
        stream=stream, is_portable=is_portable,
    )  # fmt: skip
    moe_grouped.launch(
        device.kernels, weights[1], pairs, inner.array, y.array, is_gated=False, stream=stream,
        is_chained=True, is_portable=is_portable,
    )  # fmt: skip
    device.stream.synchronize()
    positions = moe_pairs.reference(ids, num_experts)[0]
    return inner.read()[positions], y.read()[positions]


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "count", "tokens"),
    [(256, 96, 12, 4, 150), (2048, 512, 6, 2, 300), (400, 48, 5, 2, 129), (72, 16, 1, 1, 257),
     (136, 272, 64, 16, 17)],
)  # fmt: skip
def test_grouped_products_match_float64(
    device: Device, fmt: WeightFormat, hidden: int, inner: int, num_experts: int, count: int,
    tokens: int, is_portable: bool,
) -> None:  # fmt: skip
    if fmt is WeightFormat.NVFP4:
        hidden = -(-hidden // 16) * 16
    gate_up = make_experts(ImageLayout.of(fmt, 2 * inner, hidden), num_experts, is_gated=True)
    down = make_experts(ImageLayout.of(fmt, hidden, inner), num_experts, is_gated=False)
    ids = lopsided_ids(tokens, num_experts, count)
    x = random_bf16((tokens, hidden), 3)
    x[7] = float_to_bf16((bf16_to_float(x[7]) * 1e4).astype(np.float32))
    weights = upload_experts(device, gate_up), upload_experts(device, down)
    middle, y = run_grouped(device, weights, ids, x, is_portable=is_portable)
    flat = ids.ravel()
    for expert in np.unique(flat):
        chosen = np.flatnonzero(flat == expert)
        rows = wide(x[chosen // count])
        want = swiglu.reference(rows @ decoded(gate_up[expert], is_gated=True).T)
        got = wide(middle[chosen])
        error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() <= 6e-3
        want = got @ decoded(down[expert], is_gated=False).T
        error = np.linalg.norm(wide(y[chosen]) - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() <= 4e-3
    part_middle, part_y = run_grouped(device, weights, ids[3:14], x[3:14], is_portable=is_portable)
    assert (part_middle == middle[3 * count : 14 * count]).all()
    assert (part_y == y[3 * count : 14 * count]).all()
    x[5] = 0x7FC0
    _, broken = run_grouped(device, weights, ids, x, is_portable=is_portable)
    others = np.arange(ids.size) // count != 5
    assert (broken[others] == y[others]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("strips", [1, 2, 4, 8])
@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_products_read_every_layout(
    device: Device, fmt: WeightFormat, strips: int, is_portable: bool
) -> None:
    """Row blocks of several strips, the last one shorter; columns that end inside a unit."""
    hidden, inner, tokens = 32 * strips + 48, 272, 40
    gate_up = make_experts(ImageLayout(fmt, 2 * inner, hidden, strips), 2, is_gated=True)
    down = make_experts(ImageLayout(fmt, hidden, inner, strips), 2, is_gated=False)
    ids = np.array([[t % 2] for t in range(tokens)], np.int32)
    x = random_bf16((tokens, hidden), 3)
    weights = upload_experts(device, gate_up), upload_experts(device, down)
    middle, y = run_grouped(device, weights, ids, x, is_portable=is_portable)
    for t in range(tokens):
        want = swiglu.reference(wide(x[t : t + 1]) @ decoded(gate_up[t % 2], is_gated=True).T)[0]
        assert np.linalg.norm(wide(middle[t]) - want) <= 6e-3 * np.linalg.norm(want)
        want = decoded(down[t % 2], is_gated=False) @ wide(middle[t])
        assert np.linalg.norm(wide(y[t]) - want) <= 4e-3 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("columns", [40, 2048, 5120])
def test_combination_adds_ranks_shared_and_residual(
    device: Device, columns: int, is_float: bool
) -> None:
    cp = device.cp
    tokens, count = 7, 8
    rng = np.random.default_rng(columns)
    routed, shared = random_bf16((tokens * count, columns), 4), random_bf16((tokens, columns), 5)
    residual = random_bf16((tokens, columns), 6)
    weights = rng.random((tokens, count)).astype(np.float32)
    gate = rng.random(tokens).astype(np.float32)
    positions = rng.permutation(tokens * count).astype(np.int32)
    y = Fenced(cp, (tokens, columns), "uint16")
    sums = Fenced(cp, (tokens, -(-columns // 32)), "float32")

    def number(codes: NDArray[np.uint16]) -> Any:
        return cp.asarray(bf16_to_float(codes) if is_float else codes)

    moe_combine.launch(
        device.kernels, number(routed), cp.asarray(weights), cp.asarray(residual), y.array,
        positions=cp.asarray(positions),
        shared=moe_combine.SharedOutput(number(shared), cp.asarray(gate)),
        square_sums=sums.array, stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    want = moe_combine.reference(
        wide(routed)[positions], weights.astype(np.float64), wide(residual), shared=wide(shared),
        shared_gate=gate.astype(np.float64),
    )  # fmt: skip
    got: NDArray[np.uint16] = y.read()
    assert np.abs(wide(got) - want).max() <= BF16_REDUCTION.relative * np.abs(want).max()
    squares = np.pad(wide(got) ** 2, ((0, 0), (0, -columns % 32))).reshape(tokens, -1, 32)
    np.testing.assert_allclose(sums.read(), squares.sum(-1), rtol=1e-5)


def test_the_combination_of_the_parts_is_the_whole() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 16))
    gate_up, down = rng.standard_normal((6, 24, 16)), rng.standard_normal((6, 16, 12))
    ids, weights = moe_router.reference(
        rng.standard_normal((5, 6)), experts_per_token=3, renormalise=True
    )
    routed = np.stack([
        swiglu.reference(x[pair // 3][None] @ gate_up[expert].T)[0] @ down[expert].T
        for pair, expert in enumerate(ids.ravel())
    ])  # fmt: skip
    got = moe_combine.reference(routed, weights, np.zeros_like(x))
    np.testing.assert_allclose(got, moe_experts.reference(x, ids, weights, gate_up, down))
