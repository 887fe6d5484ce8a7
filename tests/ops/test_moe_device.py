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
        ShapeOnly((moe_pairs.max_tiles(num_pairs, num_experts), 4), "int32"),
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


def shape_experts(fmt: WeightFormat, rows: int, columns: int, strips: int = 0) -> ExpertWeights:
    layout = ImageLayout.of(fmt, rows, columns)
    if strips:
        layout = ImageLayout(fmt, rows, columns, strips)
    scales = ShapeOnly((256, rows), "float32") if fmt.has_row_scale else None
    return ExpertWeights(layout, ShapeOnly((256, layout.image_bytes), "uint8"), scales)


def queue_grouped(kernels: RecordingLibrary, gate_up: ExpertWeights, down: ExpertWeights) -> None:
    num_bytes = moe_grouped.workspace_bytes(kernels.limits, 4096, 256, 2048, 512)
    moe_grouped.launch(
        kernels.library, gate_up, down, shape_pairs(4096, 256), ShapeOnly((512, 2048)),
        ShapeOnly((4096, 2048)), workspace=ShapeOnly((num_bytes,), "uint8"), stream=0,
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_products_elsewhere_have_a_block_for_every_tile(fmt: WeightFormat) -> None:
    limits = dataclasses.replace(H200, architecture="sm_86", shared_bytes_per_block=99 * 1024)
    kernels = RecordingLibrary(limits)
    queue_grouped(kernels, shape_experts(fmt, 1024, 2048), shape_experts(fmt, 2048, 512))
    first, second = kernels.launches
    assert first.grid == (8, 32 + 256, 1)
    assert second.grid == (16, 32 + 256, 1)
    assert first["y"] == second["x"]
    assert first["rows"] != 0
    assert second["rows"] == 0
    assert first.arguments.dtype.itemsize == struct_bytes("moe_grouped", "GroupedParams")


@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_products_of_nine_zero_pass_images(fmt: WeightFormat) -> None:
    kernels = RecordingLibrary()
    queue_grouped(kernels, shape_experts(fmt, 1024, 2048), shape_experts(fmt, 2048, 512))
    gather, first, second = kernels.launches
    assert gather.grid == (8, 32 + 256, 1)
    assert gather.arguments.dtype.itemsize == struct_bytes("moe_grouped_wgmma", "GatherParams")
    assert first.grid == second.grid == (132, 1, 1)
    assert gather["images"] == first["x"]
    assert first["y"] - first["x"] == (32 + 256) * 32 * 16384
    assert second["x"] == first["y"]
    assert {gather["run"], first["y_run"]} == {16 if fmt is WeightFormat.NVFP4 else 8}
    assert all(launch.options["shared_bytes"] <= 227 * 1024 for launch in (first, second))


def test_a_layout_without_images_takes_the_kernels_of_other_architectures() -> None:
    kernels = RecordingLibrary()
    odd = shape_experts(WeightFormat.BF16, 1024, 2048, strips=8)
    queue_grouped(kernels, odd, shape_experts(WeightFormat.BF16, 2048, 512))
    assert {launch.family for launch in kernels.launches} == {"moe_grouped"}


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
    gate_up = shape_experts(WeightFormat.FP8_ROW, 1024, 2048)
    down = shape_experts(WeightFormat.FP8_ROW, 2048, 512)
    pairs, x, y = shape_pairs(40, 256), ShapeOnly((5, 2048)), ShapeOnly((40, 2048))
    space = ShapeOnly((1 << 30,), "uint8")
    calls: list[tuple[str, ExpertWeights, ShapeOnly, ShapeOnly, ShapeOnly]] = [
        ("row scales", dataclasses.replace(down, row_scales=None), x, y, space),
        ("x has shape", down, ShapeOnly((6, 2048)), y, space),
        ("for x of 1024 columns", down, ShapeOnly((5, 1024)), y, space),
        ("expected", gate_up, x, y, space),
        ("y has shape", down, x, ShapeOnly((39, 2048)), space),
        ("workspace has 4096 bytes", down, x, y, ShapeOnly((4096,), "uint8")),
    ]
    for message, given_down, given_x, given_y, given_space in calls:
        with pytest.raises(OpContractError, match=message):
            moe_grouped.launch(
                kernels.library, gate_up, given_down, pairs, given_x, given_y,
                workspace=given_space, stream=0,
            )  # fmt: skip
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
    assert tiles.tolist() == [[0, 0, 1, 0], [1, 1, 2, 0], [2, 3, 1, 0], [3, 4, 2, 0]]


def test_tiles_end_with_their_expert() -> None:
    ids = np.array([[0], [2]]).repeat([300, 128], axis=0)
    _, _, _, tiles = moe_pairs.reference(ids, 3)
    assert tiles.tolist() == [[0, 0, 128, 0], [0, 128, 128, 0], [0, 256, 44, 0], [2, 300, 128, 0]]
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
    padded = np.full((most, 4), 0x5A5A5A5A, np.int32)
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
    tiles = Fenced(cp, (moe_pairs.max_tiles(num_pairs, num_experts), 4), "int32")
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
    device: Device, gate_up: ExpertWeights, down: ExpertWeights, ids: NDArray[np.int32],
    x: NDArray[np.uint16], *, is_portable: bool,
) -> NDArray[np.uint16]:  # fmt: skip
    """y by pair; y and workspace poisoned and fenced."""
    cp = device.cp
    num_experts = gate_up.images.__cuda_array_interface__["shape"][0]
    pairs = upload_pairs(device, ids, num_experts)
    hidden, inner = down.layout.rows, down.layout.columns
    limits = device.kernels.limits
    num_bytes = moe_grouped.workspace_bytes(limits, ids.size, num_experts, hidden, inner)
    space, y = Fenced(cp, (num_bytes,), "uint8"), Fenced(cp, (ids.size, hidden), "uint16")
    space.array[:] = 0xFF  # NaN to whoever reads what nobody wrote
    moe_grouped.launch(
        device.kernels, gate_up, down, pairs, cp.asarray(x), y.array, workspace=space.array,
        stream=device.stream.ptr, is_portable=is_portable,
    )  # fmt: skip
    device.stream.synchronize()
    space.read()
    result: NDArray[np.uint16] = y.read()
    return result[moe_pairs.reference(ids, num_experts)[0]]


def grouped_error(
    gate_up: PackedWeight, down: PackedWeight, rows: NDArray[np.uint16], y: NDArray[np.uint16]
) -> float:
    """The largest relative error of a pair."""
    inner = swiglu.reference(wide(rows) @ decoded(gate_up, is_gated=True).T)
    want = wide(float_to_bf16(inner.astype(np.float32))) @ decoded(down, is_gated=False).T
    errors = np.linalg.norm(wide(y) - want, axis=1) / np.linalg.norm(want, axis=1)
    return float(errors.max())


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

    def run(rows: slice) -> NDArray[np.uint16]:
        return run_grouped(device, *weights, ids[rows], x[rows], is_portable=is_portable)

    y = run(slice(0, tokens))
    for expert in np.unique(ids):
        chosen = np.flatnonzero(ids.ravel() == expert)
        error = grouped_error(gate_up[expert], down[expert], x[chosen // count], y[chosen])
        assert error <= 6e-3, f"expert {expert}"
    assert (run(slice(3, 14)) == y[3 * count : 14 * count]).all()
    x[5] = 0x7FC0
    broken = run(slice(0, tokens))
    others = np.arange(ids.size) // count != 5
    assert (broken[others] == y[others]).all()
    assert np.isnan(wide(broken[~others])).all()


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
    y = run_grouped(device, *weights, ids, x, is_portable=is_portable)
    for expert in range(2):
        chosen = slice(expert, None, 2)
        assert grouped_error(gate_up[expert], down[expert], x[chosen], y[chosen]) <= 6e-3


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
