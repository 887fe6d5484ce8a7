"""linear_small_t without a device: plans, rings, the reference, and what launches refuse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.kernels.sources import KERNELS_DIR
from ninfer.ops import linear_pack, linear_small_t
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_plan import (
    MAX_TOKENS,
    fit_ring,
    max_tokens,
    plan_linear,
    shape_ring,
    workspace_size,
)
from ninfer.ops.linear_small_t import Epilogue, InputNorm, PackedLinear
from tests.helpers.fake_array import FakeArray
from tests.helpers.fake_driver import H200, ORIN, FakeDriver
from tests.helpers.tolerance import FLOAT64_ALGORITHM, assert_close

RTX_4090 = DeviceLimits("fake 4090", "sm_89", 128, 101376, 102400)
DEVICES = [H200, ORIN, RTX_4090]
shapes = st.tuples(st.integers(1, 300_000), st.integers(1, 1200).map(lambda n: n * 16))


class FakeKernels:
    """A KernelLibrary whose functions are those of a stand-in driver."""

    def __init__(self, limits: DeviceLimits = H200) -> None:
        entries = {
            f"linear_small_t_{fmt.value}_{tile}" for fmt in WeightFormat for tile in (8, 16, 24, 32)
        } | {f"linear_pack_{fmt.value}" for fmt in WeightFormat}
        self.driver = FakeDriver(frozenset(entries), argument_bytes=144)
        self.limits = limits

    def function(self, name: str, entry: str) -> Any:
        from ninfer.kernels.library import KernelFunction

        status, handle = self.driver.cuModuleGetFunction(0, entry.encode())
        assert status.name == "CUDA_SUCCESS"
        return KernelFunction(cast(Any, self.driver), entry, handle)


@given(shapes, st.sampled_from(WeightFormat), st.sampled_from(DEVICES))
def test_plans_use_every_block_and_all_blocks_fit_the_device(
    shape: tuple[int, int], fmt: WeightFormat, limits: DeviceLimits
) -> None:
    plan = plan_linear(ImageLayout.of(fmt, *shape), limits)
    assert 1 <= plan.thread_blocks <= plan.layout.units
    assert plan.thread_blocks <= 2 * limits.num_multiprocessors
    per_multiprocessor = -(-plan.thread_blocks // limits.num_multiprocessors)
    for tokens in (1, 8, 9, 16, max_tokens(plan, limits)):
        ring = shape_ring(plan, tokens, limits)
        assert 2 <= ring.stages <= 12
        assert ring.shared_bytes <= limits.shared_bytes_per_block
        taken = per_multiprocessor * (ring.shared_bytes + 1024)
        assert taken <= limits.shared_bytes_per_multiprocessor
        assert ring.window % plan.layout.unit_columns == 0
        assert ring.window * 2 % 128 == 0
        stretch = plan.max_units * plan.layout.unit_columns
        assert ring.windows == 2 or tokens <= 16 or ring.window >= stretch


@given(shapes, st.sampled_from(WeightFormat), st.sampled_from(DEVICES))
def test_as_many_columns_are_taken_as_the_device_has_room_for(
    shape: tuple[int, int], fmt: WeightFormat, limits: DeviceLimits
) -> None:
    """At least the 16 of a row, whole tiles beyond, and one tile more fails to fit."""
    plan = plan_linear(ImageLayout.of(fmt, *shape), limits)
    most = max_tokens(plan, limits)
    assert most in (16, 24, 32)
    if most < MAX_TOKENS and plan.thread_blocks <= limits.num_multiprocessors:
        with pytest.raises(OpContractError, match="do not fit"):
            shape_ring(plan, most + 8, limits)


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.FP8_ROW, WeightFormat.FP8_BLOCK])
@pytest.mark.parametrize("shape", [(16480, 5120), (34816, 5120), (5120, 17408), (248320, 5120)])
def test_a_large_model_takes_all_columns_on_the_device_it_is_made_for(
    fmt: WeightFormat, shape: tuple[int, int]
) -> None:
    assert max_tokens(plan_linear(ImageLayout.of(fmt, *shape), H200), H200) == MAX_TOKENS


def test_two_blocks_of_one_multiprocessor_lack_the_registers_for_all_columns() -> None:
    plan = plan_linear(ImageLayout.of(WeightFormat.NVFP4, 34816, 5120), H200)
    assert plan.thread_blocks > H200.num_multiprocessors
    assert max_tokens(plan, H200) == 24


@given(shapes, st.sampled_from(WeightFormat), st.integers(1, MAX_TOKENS), st.integers(1, 32))
def test_two_windows_are_no_longer_than_asked_and_fit(
    shape: tuple[int, int], fmt: WeightFormat, tokens: int, units: int
) -> None:
    plan = plan_linear(ImageLayout.of(fmt, *shape), H200)
    ring = fit_ring(
        plan, tokens, H200, resident_blocks=1, max_stages=8, lookahead=3, window_units=units
    )
    assert (ring.windows, ring.lookahead) == (2, 3)
    assert 2 <= ring.stages <= 8
    unit_columns = plan.layout.unit_columns
    assert unit_columns <= ring.window <= max(units * unit_columns + 63, 64)
    x_bytes = 2 * ring.window * tokens * 2
    assert x_bytes + ring.stages * fmt.unit_bytes() < ring.shared_bytes
    assert ring.shared_bytes <= H200.shared_bytes_per_block


@given(shapes, st.sampled_from(WeightFormat))
def test_the_split_is_the_same_for_every_number_of_columns(
    shape: tuple[int, int], fmt: WeightFormat
) -> None:
    """A plan has no T in it, and the workspace of the largest T serves all."""
    plan = plan_linear(ImageLayout.of(fmt, *shape), H200)
    sizes = [workspace_size(plan, tokens) for tokens in range(1, MAX_TOKENS + 1)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == workspace_size(plan)


def test_a_ring_that_cannot_hold_one_unit_of_x_is_refused() -> None:
    tiny = dataclasses.replace(H200, shared_bytes_per_block=49152)
    plan = plan_linear(ImageLayout(WeightFormat.NVFP4, 2560, 4096, 1), H200)
    with pytest.raises(OpContractError, match="do not fit"):
        fit_ring(plan, 16, tiny, resident_blocks=1, max_stages=4, lookahead=0)


def test_reference_with_its_ends() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 16)), rng.standard_normal((8, 16))
    residual = rng.standard_normal((3, 8))
    plain = x @ weight.T
    assert_close(linear_small_t.reference(x, weight), plain, FLOAT64_ALGORITHM)
    added = linear_small_t.reference(x, weight, residual=residual)
    assert_close(added, residual + plain, FLOAT64_ALGORITHM)
    gate, up = plain[:, :4], plain[:, 4:]
    gated = linear_small_t.reference(x, weight, is_gated=True)
    assert_close(gated, gate / (1 + np.exp(-gate)) * up, FLOAT64_ALGORITHM)


@pytest.mark.parametrize(
    ("module", "source"), [(linear_small_t, "linear_small_t"), (linear_pack, "linear_pack")]
)
def test_the_parameter_struct_has_the_size_the_kernel_asserts(module: Any, source: str) -> None:
    text = Path(KERNELS_DIR / f"{source}.cu").read_text()
    match = re.search(r"static_assert\(sizeof\(\w+\) == (\d+)", text)
    assert match is not None
    assert module._PARAMS.itemsize == int(match[1])


def make_weight(fmt: WeightFormat = WeightFormat.BF16, **changes: Any) -> PackedLinear:
    layout = ImageLayout.of(fmt, 2560, 4096)
    plan = plan_linear(layout, H200)
    scale = FakeArray((2560,), "float32") if fmt.has_row_scale else None
    image = FakeArray((layout.image_bytes,), "uint8", 0x2000)
    return dataclasses.replace(PackedLinear(plan, image, scale), **changes)


def launch(kernels: FakeKernels, weight: PackedLinear, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "x": FakeArray((4, 4096), "uint16", 0x10000),
        "y": FakeArray((4, 2560), "uint16", 0x20000),
        "workspace": FakeArray((workspace_size(weight.plan),), "float32", 0x30000),
        "stream": 7,
    }
    arguments.update(changes)
    x, y = arguments.pop("x"), arguments.pop("y")
    linear_small_t.launch(cast(KernelLibrary, kernels), weight, x, y, **arguments)


@pytest.mark.parametrize("fmt", list(WeightFormat))
@pytest.mark.parametrize(
    ("tokens", "tile"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (32, 32)]
)
def test_a_launch_picks_the_entry_and_passes_the_shape(
    fmt: WeightFormat, tokens: int, tile: int
) -> None:
    kernels = FakeKernels()
    weight = make_weight(fmt)
    x = FakeArray((tokens, 4096), "uint16", 0x10000, row_stride=8192)
    y = FakeArray((tokens, 2560), "uint16", 0x20000)
    launch(kernels, weight, x=x, y=y, is_chained=True)
    (call,) = kernels.driver.launches
    assert call.entry == f"linear_small_t_{fmt.value}_{tile}"
    assert call.grid == (weight.plan.thread_blocks, 1, 1)
    assert call.is_programmatic
    assert call.stream == 7
    params: Mapping[str, Any] = np.frombuffer(call.arguments, linear_small_t._PARAMS)[0]
    assert (params["rows"], params["columns"], params["tokens"]) == (2560, 4096, tokens)
    assert (params["x"], params["y"], params["weights"]) == (0x10000, 0x20000, 0x2000)
    ring = shape_ring(weight.plan, tokens, H200)
    assert (params["stages"], params["window"]) == (ring.stages, ring.window)
    assert params["windows"] == ring.windows
    assert params["x_stride"] == (8192 if tokens > 1 else 4096)
    assert params["row_scale"] == (0x1000 if fmt.has_row_scale else 0)
    assert params["residual"] == params["square_sums"] == params["x_square_sums"] == 0


def test_optional_operands_reach_the_kernel() -> None:
    kernels = FakeKernels()
    sums = FakeArray((4, 128), "float32", 0x50000)
    norm = InputNorm(sums, FakeArray((4096,), "uint16", 0x60000), 1e-6, 1.0)
    launch(
        kernels, make_weight(), epilogue=Epilogue.ADD_RESIDUAL,
        residual=FakeArray((4, 2560), "uint16", 0x40000),
        square_sums=FakeArray((4, 80), "float32", 0x70000), norm=norm,
    )  # fmt: skip
    params = np.frombuffer(kernels.driver.launches[0].arguments, linear_small_t._PARAMS)[0]
    assert (params["residual"], params["square_sums"]) == (0x40000, 0x70000)
    assert (params["x_square_sums"], params["norm_weight"]) == (0x50000, 0x60000)
    assert (params["num_square_sums"], params["norm_offset"]) == (128, 1.0)
    assert params["epilogue"] == Epilogue.ADD_RESIDUAL.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": FakeArray((33, 4096), "uint16")}, "T up to 32"),
        ({"x": FakeArray((4, 4088), "uint16")}, "4096 columns"),
        ({"x": FakeArray((4, 4096), "float32")}, "x is float32"),
        ({"x": FakeArray((4, 4096), "uint16", 0x1008)}, "aligned"),
        ({"x": FakeArray((4, 4096), "uint16", row_stride=4100)}, "aligned"),
        ({"y": FakeArray((4, 2561), "uint16")}, "y has shape"),
        ({"y": FakeArray((4, 2560), "float32")}, "y is float32"),
        ({"epilogue": Epilogue.STORE_FLOAT}, "y is uint16"),
        ({"epilogue": Epilogue.SWIGLU}, "y has shape"),
        ({"epilogue": Epilogue.ADD_RESIDUAL}, "residual"),
        ({"residual": FakeArray((4, 2560), "uint16")}, "residual"),
        (
            {
                "residual": FakeArray((4, 2560), "uint16", row_stride=4096),
                "epilogue": Epilogue.ADD_RESIDUAL,
            },
            "row stride",
        ),
        ({"square_sums": FakeArray((4, 40), "float32")}, "square_sums has shape"),
        (
            {
                "square_sums": FakeArray((4, 80), "float32"),
                "y": FakeArray((4, 2560), "float32"),
                "epilogue": Epilogue.STORE_FLOAT,
            },
            "no square sums",
        ),
        ({"workspace": FakeArray((100,), "float32")}, "workspace holds 100"),
        (
            {
                "norm": InputNorm(
                    FakeArray((4, 128), "float32"), FakeArray((4096,), "uint16"), 0.0, 1.0
                )
            },
            "eps",
        ),
        (
            {
                "norm": InputNorm(
                    FakeArray((3, 128), "float32"), FakeArray((4096,), "uint16"), 1e-6, 1.0
                )
            },
            "norm.square_sums",
        ),
        (
            {
                "norm": InputNorm(
                    FakeArray((4, 128), "float32"), FakeArray((4096,), "uint16", 0x1008), 1e-6, 1.0
                )
            },
            "norm.weight",
        ),
    ],
)
def test_operands_outside_the_contract_are_refused(changes: dict[str, Any], message: str) -> None:
    kernels = FakeKernels()
    with pytest.raises(OpContractError, match=message):
        launch(kernels, make_weight(), **changes)
    assert kernels.driver.launches == []


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (make_weight(image=FakeArray((5,), "uint8")), "image has shape"),
        (make_weight(row_scale=FakeArray((2560,), "float32")), "row_scale"),
        (make_weight(WeightFormat.FP8_ROW, row_scale=None), "row_scale"),
        (make_weight(WeightFormat.NVFP4, row_scale=FakeArray((1,), "float32")), "row_scale has"),
    ],
)
def test_weights_outside_the_contract_are_refused(weight: PackedLinear, message: str) -> None:
    with pytest.raises(OpContractError, match=message):
        launch(FakeKernels(), weight)


def test_one_window_that_would_have_to_move_is_refused_for_many_columns() -> None:
    weight = make_weight()
    ring = shape_ring(weight.plan, 20, H200)
    narrow = dataclasses.replace(ring, windows=1, window=64)
    x, y = FakeArray((20, 4096), "uint16"), FakeArray((20, 2560), "uint16")
    with pytest.raises(OpContractError, match="does not hold"):
        launch(FakeKernels(), weight, x=x, y=y, ring=narrow)


def test_blocks_that_would_wait_for_each_other_for_ever_are_refused() -> None:
    kernels = FakeKernels()
    kernels.driver.resident = 0
    with pytest.raises(OpContractError, match="resident"):
        launch(kernels, make_weight())


@pytest.mark.parametrize("fmt", list(WeightFormat))
def test_packing_passes_sources_and_refuses_what_does_not_fit(fmt: WeightFormat) -> None:
    layout = ImageLayout.of(fmt, 512, 1024)
    columns = 512 if fmt is WeightFormat.NVFP4 else 1024
    codes = FakeArray((512, columns), "uint16" if fmt is WeightFormat.BF16 else "uint8", 0x4000)
    image = FakeArray((layout.image_bytes,), "uint8", 0x8000)
    scales = {
        WeightFormat.FP8_BLOCK: FakeArray((4, 8), "float32", 0x6000),
        WeightFormat.NVFP4: FakeArray((512, 64), "uint8", 0x6000),
    }.get(fmt)
    kernels = FakeKernels()
    library = cast(KernelLibrary, kernels)
    linear_pack.launch(library, layout, codes, image, scales=scales, stream=3)
    params = np.frombuffer(kernels.driver.launches[0].arguments, linear_pack._PARAMS, 1)[0]
    assert (params["codes"], params["image"]) == (0x4000, 0x8000)
    assert params["scales"] == (0x6000 if scales else 0)
    short = FakeArray((16,), "uint8", 0x8000)
    wrong = FakeArray((1, 1), "float32") if scales is None else None
    with pytest.raises(OpContractError, match="image"):
        linear_pack.launch(library, layout, codes, short, scales=scales, stream=3)
    with pytest.raises(OpContractError, match="scales"):
        linear_pack.launch(library, layout, codes, image, scales=wrong, stream=3)
