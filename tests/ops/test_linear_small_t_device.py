"""linear_small_t and linear_pack on the device: against float64, bit by bit, under a graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import linear_pack, linear_plan, linear_small_t, rms_norm
from ninfer.ops.float_codecs import bf16_to_float, e2m1_to_float, e4m3_to_float, float_to_bf16
from ninfer.ops.linear_packing import (
    E2M1_SHIFT,
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
    pack_bf16,
    pack_fp8_row,
    pack_fp8_scaled_rows,
    pack_nvfp4,
)
from ninfer.ops.linear_small_t import Epilogue, InputNorm, PackedLinear
from tests.helpers.device import Device, open_device

pytestmark = pytest.mark.gpu

FENCE = 64
POISON = 0x7FC1
SHAPES = [
    (32, 64, 8), (48, 272, 1), (528, 1040, 2), (528, 1040, 4), (528, 1040, 8), (4128, 2560, 4),
    (2560, 9216, 1), (2560, 9216, 2), (2560, 9216, 8),
]  # fmt: skip
FORMATS = list(WeightFormat)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One random weight: as it is stored, as it is packed, and decoded in float64 [N, K]."""

    layout: ImageLayout
    codes: NDArray[Any]
    scales: NDArray[Any] | None
    row_scale: NDArray[np.float32] | None
    image: NDArray[np.uint8]
    decoded: NDArray[np.float64]


def make_weight(
    fmt: WeightFormat, rows: int, columns: int, *, strips: int = 0, is_interleaved: bool = False
) -> Weight:
    """Rows in natural order; only the image is interleaved."""
    rng = np.random.default_rng([rows, columns])
    layout = ImageLayout.of(fmt, rows, columns)
    if strips:
        layout = ImageLayout(fmt, rows, columns, strips)

    def order(matrix: NDArray[Any]) -> NDArray[Any]:
        return interleave_gate_up(matrix) if is_interleaved else matrix

    if fmt is WeightFormat.BF16:
        codes = float_to_bf16(rng.standard_normal((rows, columns)).astype(np.float32))
        decoded = bf16_to_float(codes).astype(np.float64)
        return Weight(layout, codes, None, None, pack_bf16(order(codes), layout), decoded)
    if fmt is WeightFormat.NVFP4:
        nibbles = rng.integers(0, 16, (rows, columns), np.uint8)
        packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
        scales = rng.integers(0, 0x7F, (rows, columns // 16), np.uint8)
        row_scale = rng.uniform(0.01, 0.02, rows).astype(np.float32)
        spread = np.repeat(e4m3_to_float(scales).astype(np.float64), 16, axis=1)
        decoded = e2m1_to_float(nibbles) * spread * row_scale[:, None]
        image = pack_nvfp4(order(packed), order(scales), layout)
        shifted = order(row_scale) * np.float32(E2M1_SHIFT)
        return Weight(layout, packed, scales, shifted, image, decoded)
    fp8 = rng.integers(0, 256, (rows, columns), np.uint8)
    fp8[fp8 & 0x7F == 0x7F] = 0x7E
    values: NDArray[np.float64] = e4m3_to_float(fp8).astype(np.float64)
    if fmt is WeightFormat.FP8_ROW:
        row_scale = rng.uniform(0.01, 0.02, rows).astype(np.float32)
        image = pack_fp8_row(order(fp8), layout)
        return Weight(layout, fp8, None, order(row_scale), image, values * row_scale[:, None])
    parts = 2 if is_interleaved else 1
    part_rows = rows // parts
    blocks = (parts, -(-part_rows // 128), -(-columns // 128))
    scales = rng.uniform(0.5, 2.0, blocks).astype(np.float32)
    by_row = np.repeat(scales, 128, axis=1)[:, :part_rows].reshape(rows, -1)
    image = pack_fp8_scaled_rows(order(fp8), order(by_row), layout)
    decoded = values * np.repeat(by_row, 128, axis=1)[:, :columns]
    return Weight(layout, fp8, scales.reshape(-1, blocks[2]), None, image, decoded)


def upload(device: Device, weight: Weight) -> PackedLinear:
    cp = device.cp
    plan = linear_small_t.plan_linear(weight.layout, device.kernels.limits)
    scale = None if weight.row_scale is None else cp.asarray(weight.row_scale)
    return PackedLinear(plan, cp.asarray(weight.image), scale)


def make_workspace(device: Device, packed: PackedLinear) -> Any:
    size = linear_small_t.workspace_size(packed.plan)
    return device.cp.full(size, 0xFFFFFFFF, device.cp.uint32).view(device.cp.float32)


def random_x(tokens: int, columns: int, seed: int = 1) -> NDArray[np.uint16]:
    rng = np.random.default_rng([seed, columns])
    return float_to_bf16(rng.standard_normal((tokens, columns)).astype(np.float32))


def run(
    device: Device,
    packed: PackedLinear,
    x: NDArray[np.uint16],
    *,
    epilogue: Epilogue = Epilogue.STORE_BF16,
    workspace: Any = None,
    **options: Any,
) -> NDArray[Any]:
    """y, from a poisoned buffer with fences around it that must survive."""
    cp = device.cp
    layout = packed.plan.layout
    columns = layout.rows // 2 if epilogue is Epilogue.SWIGLU else layout.rows
    dtype = cp.float32 if epilogue is Epilogue.STORE_FLOAT else cp.uint16
    buffer = cp.full(2 * FENCE + x.shape[0] * columns, POISON, dtype)
    y = buffer[FENCE:-FENCE].reshape(x.shape[0], columns)
    given = cp.asarray(x)
    used = make_workspace(device, packed) if workspace is None else workspace
    linear_small_t.launch(
        device.kernels, packed, given, y, workspace=used, stream=device.stream.ptr,
        epilogue=epilogue, **options,
    )  # fmt: skip
    device.stream.synchronize()
    assert (cp.asnumpy(buffer[:FENCE]) == POISON).all()
    assert (cp.asnumpy(buffer[-FENCE:]) == POISON).all()
    assert (cp.asnumpy(given) == x).all()
    assert (cp.asnumpy(used.view(cp.uint32)) == 0xFFFFFFFF).all()
    return np.asarray(cp.asnumpy(y))


def assert_near(got: NDArray[Any], want: NDArray[Any], relative: float) -> None:
    """Relative L2 error, and every element finite and roughly right."""
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= relative * np.linalg.norm(want)
    assert np.abs(got - want).max() <= 4 * relative * np.abs(want).max()


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("strips", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (48, 272), (544, 1040), (2304, 512)])
def test_the_device_packs_the_same_bytes(
    device: Device, fmt: WeightFormat, rows: int, columns: int, strips: int, is_interleaved: bool
) -> None:
    cp = device.cp
    weight = make_weight(fmt, rows, columns, strips=strips, is_interleaved=is_interleaved)
    image = cp.full(weight.layout.image_bytes, 0xA5, cp.uint8)
    linear_pack.launch(
        device.kernels, weight.layout, cp.asarray(weight.codes), image,
        scales=None if weight.scales is None else cp.asarray(weight.scales),
        is_interleaved=is_interleaved, stream=device.stream.ptr,
    )  # fmt: skip
    assert (cp.asnumpy(image) == weight.image).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "columns", "strips"), SHAPES)
def test_columns_match_float64_and_do_not_depend_on_their_number(
    device: Device, fmt: WeightFormat, rows: int, columns: int, strips: int
) -> None:
    weight = make_weight(fmt, rows, columns, strips=strips)
    packed = upload(device, weight)
    most = linear_plan.max_tokens(packed.plan, device.kernels.limits)
    x = random_x(most, columns)
    want = linear_small_t.reference(bf16_to_float(x).astype(np.float64), weight.decoded)
    whole = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT)
    assert_near(whole, want, 1e-4)
    for tokens in (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 25, 31):
        part = run(device, packed, x[: min(tokens, most)], epilogue=Epilogue.STORE_FLOAT)
        assert (part == whole[:tokens]).all(), f"T = {tokens} differs"
    order = np.random.default_rng(0).permutation(most)
    shuffled = run(device, packed, x[order], epilogue=Epilogue.STORE_FLOAT)
    assert (shuffled == whole[order]).all()
    rounded = run(device, packed, x[:5])
    assert (rounded == float_to_bf16(whole[:5])).all()


@pytest.mark.parametrize("fmt", [WeightFormat.FP8_ROW, WeightFormat.FP8_BLOCK])
def test_the_smallest_codes_count(device: Device, fmt: WeightFormat) -> None:
    """e4m3 numbers without an implicit one, alone: next to larger ones nobody would miss them."""
    rows, columns = 96, 1024
    rng = np.random.default_rng(0)
    codes = (rng.integers(1, 8, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7).astype(
        np.uint8
    )
    layout = ImageLayout.of(fmt, rows, columns)
    ones = np.ones((rows, -(-columns // 128)), np.float32)
    if fmt is WeightFormat.FP8_ROW:
        image, scale = pack_fp8_row(codes, layout), np.ones(rows, np.float32)
    else:
        image, scale = pack_fp8_scaled_rows(codes, ones, layout), None
    decoded = e4m3_to_float(codes).astype(np.float64)
    packed = upload(device, Weight(layout, codes, None, scale, image, decoded))
    x = random_x(3, columns)
    want = linear_small_t.reference(bf16_to_float(x).astype(np.float64), decoded)
    assert_near(run(device, packed, x, epilogue=Epilogue.STORE_FLOAT), want, 1e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_plan_that_cannot_be_resident_is_refused(device: Device, fmt: WeightFormat) -> None:
    packed = upload(device, make_weight(fmt, 4128, 2560))
    limits = device.kernels.limits
    crowded = linear_plan.LinearPlan(packed.plan.layout, 3 * limits.num_multiprocessors)
    with pytest.raises(OpContractError, match="resident"):
        run(device, dataclasses.replace(packed, plan=crowded), random_x(1, 2560))


@pytest.mark.parametrize("thread_blocks", [1, 2, 7, 131, 132])
@pytest.mark.parametrize("fmt", FORMATS)
def test_any_split_gives_the_product(device: Device, fmt: WeightFormat, thread_blocks: int) -> None:
    """Blocks that own many row blocks, and row blocks that many blocks share."""
    for rows, columns, strips in ((544, 1040, 1), (96, 16384, 4)):
        weight = make_weight(fmt, rows, columns, strips=strips)
        packed = upload(device, weight)
        plan = linear_plan.LinearPlan(weight.layout, min(thread_blocks, weight.layout.units))
        packed = dataclasses.replace(packed, plan=plan)
        ring = linear_plan.fit_ring(
            plan, 9, device.kernels.limits, resident_blocks=2, max_stages=3, lookahead=2
        )
        x = random_x(9, columns)
        got = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT, ring=ring)
        want = linear_small_t.reference(bf16_to_float(x).astype(np.float64), weight.decoded)
        assert_near(got, want, 1e-4)
        many = run(device, packed, np.tile(x, (3, 1))[:24], epilogue=Epilogue.STORE_FLOAT)
        assert (many == np.tile(got, (3, 1))[:24]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [9, 23, 32])
def test_a_column_of_nan_spoils_no_other(device: Device, fmt: WeightFormat, tokens: int) -> None:
    packed = upload(device, make_weight(fmt, 528, 1040))
    x = random_x(tokens, 1040)
    clean = run(device, packed, x)
    x[4] = 0x7FC0
    got = run(device, packed, x)
    assert np.isnan(bf16_to_float(got[4])).all()
    rest = [t for t in range(tokens) if t != 4]
    assert (got[rest] == clean[rest]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 6, 16, 21, 32])
def test_residual_is_added_before_the_one_rounding(
    device: Device, fmt: WeightFormat, tokens: int
) -> None:
    cp = device.cp
    weight = make_weight(fmt, 1056, 512)
    packed = upload(device, weight)
    x, residual = random_x(tokens, 512), random_x(tokens, 1056, seed=3)
    sums = cp.full((tokens, 33), cp.nan, cp.float32)
    plain = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT)
    got = run(
        device, packed, x, epilogue=Epilogue.ADD_RESIDUAL,
        residual=cp.asarray(residual), square_sums=sums,
    )  # fmt: skip
    assert (got == float_to_bf16(plain + bf16_to_float(residual))).all()
    squares = bf16_to_float(got).astype(np.float64) ** 2
    np.testing.assert_allclose(cp.asnumpy(sums), squares.reshape(tokens, 33, 32).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 8, 11, 18, 32])
def test_swiglu_of_interleaved_rows(device: Device, fmt: WeightFormat, tokens: int) -> None:
    weight = make_weight(fmt, 1056, 256, is_interleaved=True)
    packed = upload(device, weight)
    x = random_x(tokens, 256)
    got = bf16_to_float(run(device, packed, x, epilogue=Epilogue.SWIGLU))
    want = linear_small_t.reference(
        bf16_to_float(x).astype(np.float64), weight.decoded, is_gated=True
    )
    assert_near(got, want, 3e-3)
    alone = bf16_to_float(run(device, packed, x[-1:], epilogue=Epilogue.SWIGLU))
    assert (alone[0] == got[-1]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 9, 19, 32])
def test_input_is_normalised_on_the_way_in(device: Device, fmt: WeightFormat, tokens: int) -> None:
    cp = device.cp
    columns = 1024
    weight = make_weight(fmt, 544, columns)
    packed = upload(device, weight)
    x, gain = random_x(tokens, columns), random_x(1, columns, seed=9)[0]
    wide = bf16_to_float(x).astype(np.float64)
    sums = (wide**2).reshape(tokens, 32, 32).sum(-1).astype(np.float32)
    norm = InputNorm(cp.asarray(sums), cp.asarray(gain), 1e-6, 1.0)
    got = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT, norm=norm)
    normed = rms_norm.reference(wide, bf16_to_float(gain).astype(np.float64), eps=1e-6, offset=1.0)
    rounded = bf16_to_float(float_to_bf16(normed.astype(np.float32))).astype(np.float64)
    assert_near(got, linear_small_t.reference(rounded, weight.decoded), 3e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_ring_shape_changes_no_bit(device: Device, fmt: WeightFormat) -> None:
    packed = upload(device, make_weight(fmt, 2560, 1408))
    x = random_x(8, 1408)
    limits = device.kernels.limits
    want = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT)
    for stages, resident, lookahead in itertools.product((2, 3, 6), (2, 3), (0, 5)):
        ring = linear_plan.fit_ring(
            packed.plan, 8, limits,
            resident_blocks=resident, max_stages=stages, lookahead=lookahead,
        )  # fmt: skip
        got = run(device, packed, x, epilogue=Epilogue.STORE_FLOAT, ring=ring)
        assert (got == want).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("rows", "columns", "strips"), [(2560, 5120, 2), (96, 16384, 4)])
def test_moving_windows_changes_no_bit(
    device: Device, fmt: WeightFormat, has_norm: bool, rows: int, columns: int, strips: int
) -> None:
    """Of one column, which has all of x at once, and of many in windows of any length."""
    cp = device.cp
    packed = upload(device, make_weight(fmt, rows, columns, strips=strips))
    x, gain = random_x(32, columns), random_x(1, columns, seed=9)[0]
    sums = (bf16_to_float(x).astype(np.float64) ** 2).reshape(32, -1, 32).sum(-1)

    def product(first: int, last: int, **options: Any) -> NDArray[Any]:
        norm = InputNorm(
            cp.asarray(sums[first:last].astype(np.float32)), cp.asarray(gain), 1e-6, 1.0
        )
        return run(
            device, packed, x[first:last], epilogue=Epilogue.STORE_FLOAT,
            norm=norm if has_norm else None, **options,
        )  # fmt: skip

    want = np.concatenate([product(t, t + 1) for t in (0, 7, 15, 16, 23, 31)])
    for tokens, units in itertools.product((16, 24, 32), (1, 2, 3)):
        ring = linear_plan.fit_ring(
            packed.plan, tokens, device.kernels.limits,
            resident_blocks=1, max_stages=4, lookahead=0, window_units=units,
        )  # fmt: skip
        got = product(0, tokens, ring=ring)
        picked = [t for t in (0, 7, 15, 16, 23, 31) if t < tokens]
        assert (got[picked] == want[: len(picked)]).all(), f"T = {tokens}, {units} units a window"


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("tokens", [8, 32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_captured_chain_gives_the_bits_of_single_launches(
    device: Device, fmt: WeightFormat, tokens: int, is_chained: bool
) -> None:
    """x -> down -> up -> ... with one workspace; every link reads what the one before wrote."""
    cp = device.cp
    weight = make_weight(fmt, 2560, 2560)
    packed = upload(device, weight)
    links = 12
    states = cp.zeros((links + 1, tokens, 2560), cp.uint16)
    states[0] = cp.asarray(random_x(tokens, 2560))
    sums = cp.ones((links + 1, tokens, 80), cp.float32)
    gain = cp.asarray(random_x(1, 2560, seed=5)[0])
    workspace = make_workspace(device, packed)

    def link(index: int, chained: bool) -> None:
        linear_small_t.launch(
            device.kernels, packed, states[index], states[index + 1], workspace=workspace,
            stream=device.stream.ptr, square_sums=sums[index + 1],
            norm=InputNorm(sums[index], gain, 1e-6, 0.0), is_chained=chained,
        )  # fmt: skip

    for index in range(links):
        link(index, False)
        device.stream.synchronize()
    want = cp.asnumpy(states)
    device.stream.begin_capture()
    for index in range(links):
        link(index, is_chained)
    graph = device.stream.end_capture()
    for _ in range(20):
        states[1:] = POISON
        graph.launch(device.stream)
        device.stream.synchronize()
        assert (cp.asnumpy(states) == want).all()
    assert np.isfinite(bf16_to_float(want)).all()
