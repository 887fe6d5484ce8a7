"""moe_small_t: a mixture-of-experts layer of few tokens, on the device and as launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import linear_small_t, moe_router, moe_small_t, rms_norm, swiglu
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import InputNorm, PackedLinear
from ninfer.ops.moe_small_t import MoeWeights, MoeWorkspace, SharedExpert
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.packed_weights import PackedWeight, exact_rows, random_packed
from tests.helpers.recorded_launches import H200, RecordingLibrary, ShapeOnly, struct_bytes
from tests.helpers.tolerance import BF16_REDUCTION, FLOAT32_REDUCTION, assert_close

FORMATS = list(WeightFormat)
EPS, OFFSET = 1e-6, 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """shared: the shared expert's inner size, None for none."""

    hidden: int
    inner: int
    shared: int | None
    num_experts: int
    count: int


SIZES = [
    Sizes(2048, 512, 512, 20, 8), Sizes(256, 96, 64, 12, 4), Sizes(400, 48, None, 5, 2),
    Sizes(64, 8, 200, 1, 1), Sizes(80, 16, 32, 512, 16), Sizes(1040, 272, 16, 300, 3),
]  # fmt: skip


def random_bf16(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return float_to_bf16(values.astype(np.float32))


def wide(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    return bf16_to_float(codes).astype(np.float64)


def packed(
    fmt: WeightFormat, rows: int, columns: int, seed: int, *, is_gated: bool
) -> PackedWeight:
    layout = ImageLayout.of(fmt, rows, columns)
    return random_packed(layout, seed, is_interleaved=is_gated, scale=columns**-0.5)


class Layer:
    """Random weights on the host."""

    def __init__(self, fmt: WeightFormat, sizes: Sizes) -> None:
        self.sizes = sizes
        hidden, inner = sizes.hidden, sizes.inner
        few = min(sizes.num_experts, 24)  # the others repeat them
        self.router = packed(WeightFormat.BF16, sizes.num_experts, hidden, 1, is_gated=False)
        gate_up = [packed(fmt, 2 * inner, hidden, seed, is_gated=True) for seed in range(few)]
        down = [packed(fmt, hidden, inner, seed, is_gated=False) for seed in range(few)]
        self.gate_up = [gate_up[e % few] for e in range(sizes.num_experts)]
        self.down = [down[e % few] for e in range(sizes.num_experts)]
        self._decoded = [
            (exact_rows(gate_up[e], is_interleaved=True), exact_rows(down[e], is_interleaved=False))
            for e in range(few)
        ]
        self.shared: tuple[PackedWeight, PackedWeight] | None = None
        if sizes.shared is not None:
            self.shared = (
                packed(fmt, 2 * sizes.shared, hidden, 90, is_gated=True),
                packed(fmt, hidden, sizes.shared, 91, is_gated=False),
            )
        self.norm = random_bf16((hidden,), 7)
        self.gate = random_bf16((hidden,), 8)

    def expert(self, e: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._decoded[e % len(self._decoded)]

    def run(
        self, weights: tuple[NDArray[np.float64], NDArray[np.float64]], x: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        inner = swiglu.reference((x @ weights[0].T)[None])[0]
        return weights[1] @ wide(float_to_bf16(inner.astype(np.float32)))

    def reference(
        self, x: NDArray[np.uint16], normed: NDArray[np.uint16], logits: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        ids, weights = moe_router.reference(
            logits.astype(np.float64), experts_per_token=self.sizes.count, renormalise=True
        )
        y = wide(x)
        for t, row in enumerate(wide(normed)):
            for e, weight in zip(ids[t], weights[t], strict=True):
                y[t] += weight * self.run(self.expert(int(e)), row)
            if self.shared is not None:
                gate = 1 / (1 + np.exp(-(row @ wide(self.gate))))
                shared = exact_rows(self.shared[0], is_interleaved=True), exact_rows(self.shared[1])
                y[t] += gate * self.run(shared, row)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    normed: NDArray[np.uint16]
    logits: NDArray[np.float32]
    y: NDArray[np.uint16]
    square_sums: NDArray[np.float32]


def upload_linear(device: Device, weight: PackedWeight) -> PackedLinear:
    cp = device.cp
    plan = linear_small_t.plan_linear(weight.layout, device.kernels.limits)
    scale = None if weight.row_scale is None else cp.asarray(weight.row_scale)
    return PackedLinear(plan, cp.asarray(weight.image), scale)


def upload_experts(device: Device, experts: list[PackedWeight]) -> ExpertWeights:
    cp = device.cp
    scales = [item.row_scale for item in experts if item.row_scale is not None]
    return ExpertWeights(
        experts[0].layout,
        cp.asarray(np.stack([item.image for item in experts])),
        cp.asarray(np.stack(scales)) if scales else None,
    )


def upload(device: Device, layer: Layer) -> MoeWeights:
    shared = None
    if layer.shared is not None:
        shared = SharedExpert(*(upload_linear(device, item) for item in layer.shared))
    return MoeWeights(
        upload_linear(device, layer.router),
        upload_experts(device, layer.gate_up),
        upload_experts(device, layer.down),
        layer.sizes.count,
        True,
        shared_gate=None if shared is None else device.cp.asarray(layer.gate),
        shared=shared,
    )


class Run:
    """Buffers of T tokens; every output poisoned and fenced. y is x, as in a model."""

    def __init__(self, device: Device, layer: Layer, x: NDArray[np.uint16]) -> None:
        cp, sizes = device.cp, layer.sizes
        tokens = x.shape[0]
        self.device, self.layer = device, layer
        self.y = Fenced(cp, x.shape, "uint16")
        self.y.array[:] = cp.asarray(x)
        self.sums = Fenced(cp, (tokens, -(-sizes.hidden // 32)), "float32")
        squares = np.pad(wide(x) ** 2, ((0, 0), (0, -sizes.hidden % 32)))
        by_strip = squares.reshape(tokens, -1, 32).sum(-1)
        self.sums.array[:] = cp.asarray(by_strip.astype(np.float32))
        self.normed = Fenced(cp, x.shape, "uint16")
        self.logits = Fenced(cp, (tokens, sizes.num_experts), "float32")
        self.gate = Fenced(cp, (tokens,), "float32")
        self.inner = Fenced(cp, (tokens * sizes.count, sizes.inner), "uint16")
        self.shared = Fenced(cp, (tokens, sizes.shared or 1), "uint16")
        self.norm = InputNorm(self.sums.array, cp.asarray(layer.norm), EPS, OFFSET)
        self.workspace = MoeWorkspace(
            self.normed.array, self.logits.array, self.gate.array, self.inner.array,
            None if sizes.shared is None else self.shared.array,
        )  # fmt: skip

    def queue(self, weights: MoeWeights, *, is_chained: bool = True) -> None:
        stream = self.device.stream.ptr
        moe_small_t.launch_router(
            self.device.kernels, weights, self.y.array, self.norm, self.workspace, stream=stream
        )
        moe_small_t.launch_experts(
            self.device.kernels, weights, self.y.array, self.y.array, self.workspace,
            square_sums=self.sums.array, stream=stream, is_chained=is_chained,
        )  # fmt: skip

    def read(self) -> Result:
        self.device.stream.synchronize()
        self.inner.read()
        self.shared.read()
        self.gate.read()
        return Result(self.normed.read(), self.logits.read(), self.y.read(), self.sums.read())


def run(device: Device, layer: Layer, weights: MoeWeights, x: NDArray[np.uint16]) -> Result:
    one = Run(device, layer, x)
    one.queue(weights)
    return one.read()


def assert_same(got: Result, want: Result) -> None:
    for field in dataclasses.fields(Result):
        first, second = getattr(got, field.name), getattr(want, field.name)
        assert first.tobytes() == second.tobytes(), field.name


def rows_of(result: Result, start: int, end: int) -> Result:
    return Result(*(getattr(result, f.name)[start:end] for f in dataclasses.fields(Result)))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_layer_matches_float64_and_a_token_stands_alone(
    device: Device, fmt: WeightFormat, sizes: Sizes
) -> None:
    if fmt is WeightFormat.NVFP4 and sizes.inner % 16:
        sizes = dataclasses.replace(sizes, inner=16, shared=208)
    layer = Layer(fmt, sizes)
    weights = upload(device, layer)
    x = random_bf16((16, sizes.hidden), 3)
    x[2:12] = x[2]  # experts that more than eight tokens visit
    x[12] = float_to_bf16((bf16_to_float(x[12]) * 1e4).astype(np.float32))
    got = run(device, layer, weights, x)
    normed = rms_norm.reference(wide(x), wide(layer.norm), eps=EPS, offset=OFFSET)
    assert_close(wide(got.normed), normed, BF16_REDUCTION)
    logits = wide(got.normed) @ exact_rows(layer.router, is_interleaved=False).T
    scale = np.abs(logits).max()
    assert_close(got.logits / scale, logits / scale, FLOAT32_REDUCTION)
    want = layer.reference(x, got.normed, got.logits)
    error = np.linalg.norm(wide(got.y) - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() <= 4e-3
    squares = np.pad(wide(got.y) ** 2, ((0, 0), (0, -sizes.hidden % 32))).reshape(16, -1, 32)
    np.testing.assert_allclose(got.square_sums, squares.sum(-1), rtol=1e-5)
    for start, end in ((0, 1), (4, 5), (12, 13), (2, 10), (7, 16)):
        alone = run(device, layer, weights, x[start:end])
        assert_same(alone, rows_of(got, start, end))


@pytest.mark.gpu
def test_the_same_token_sixteen_times_is_the_same_row(device: Device) -> None:
    layer = Layer(WeightFormat.BF16, SIZES[0])
    weights = upload(device, layer)
    x = np.repeat(random_bf16((1, 2048), 5), 16, axis=0)
    got = run(device, layer, weights, x)
    for t in range(1, 16):
        assert_same(rows_of(got, t, t + 1), rows_of(got, 0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_broken_token_breaks_no_other(device: Device, fmt: WeightFormat) -> None:
    layer = Layer(fmt, SIZES[1])
    weights = upload(device, layer)
    x = random_bf16((11, 256), 6)
    want = run(device, layer, weights, x)
    x[3] = 0x7FC0
    got = run(device, layer, weights, x)
    assert np.isnan(wide(got.y)[3]).all()
    assert_same(rows_of(got, 0, 3), rows_of(want, 0, 3))
    assert_same(rows_of(got, 4, 11), rows_of(want, 4, 11))


@pytest.mark.gpu
def test_a_graph_replays_the_same_bits(device: Device) -> None:
    """Two layers one behind the other, chained, as often as in a decode of some tokens."""
    layer = Layer(WeightFormat.BF16, SIZES[0])
    weights = upload(device, layer)
    x = random_bf16((8, 2048), 9)
    plain = Run(device, layer, x)
    for _ in range(2):
        plain.queue(weights, is_chained=False)
    want = plain.read()
    one = Run(device, layer, x)
    sums = one.sums.array.copy()
    stream = device.stream
    stream.begin_capture()
    for _ in range(2):
        one.queue(weights)
    graph = stream.end_capture()
    for _ in range(200):
        one.y.array[:] = device.cp.asarray(x)
        one.sums.array[:] = sums
        graph.launch(stream)
    assert_same(one.read(), want)


@pytest.mark.gpu
def test_a_shared_expert_may_run_apart(device: Device) -> None:
    sizes = Sizes(256, 96, 64, 12, 4)
    layer = Layer(WeightFormat.BF16, sizes)
    weights = upload(device, layer)
    x = random_bf16((5, 256), 2)
    one = Run(device, layer, x)
    stream = device.stream.ptr
    moe_small_t.launch_router(
        device.kernels, weights, one.y.array, one.norm, one.workspace, stream=stream
    )
    output = random_bf16((5, 256), 11)
    workspace = dataclasses.replace(one.workspace, shared=device.cp.asarray(output))
    moe_small_t.launch_experts(
        device.kernels, dataclasses.replace(weights, shared=None), one.y.array, one.y.array,
        workspace, stream=stream,
    )  # fmt: skip
    device.stream.synchronize()
    without = Layer(WeightFormat.BF16, dataclasses.replace(sizes, shared=None))
    normed, logits = one.normed.read(), one.logits.read()
    gates: Any = one.gate.read()
    want = without.reference(x, normed, logits) + gates[:, None] * wide(output)
    got: NDArray[np.uint16] = one.y.read()
    assert np.linalg.norm(wide(got) - want) <= 4e-3 * np.linalg.norm(want)


def shape_linear(fmt: WeightFormat, rows: int, columns: int) -> PackedLinear:
    layout = ImageLayout.of(fmt, rows, columns)
    scale = ShapeOnly((rows,), "float32") if fmt.has_row_scale else None
    plan = linear_small_t.plan_linear(layout, H200)
    return PackedLinear(plan, ShapeOnly((layout.image_bytes,), "uint8"), scale)


def shape_experts(fmt: WeightFormat, rows: int, columns: int) -> ExpertWeights:
    layout = ImageLayout.of(fmt, rows, columns)
    scales = ShapeOnly((256, rows), "float32") if fmt.has_row_scale else None
    return ExpertWeights(layout, ShapeOnly((256, layout.image_bytes), "uint8"), scales)


def shape_weights(fmt: WeightFormat) -> MoeWeights:
    return MoeWeights(
        shape_linear(WeightFormat.BF16, 256, 2048), shape_experts(fmt, 1024, 2048),
        shape_experts(fmt, 2048, 512), 8, True, ShapeOnly((2048,)),
        SharedExpert(shape_linear(fmt, 1024, 2048), shape_linear(fmt, 2048, 512)),
    )  # fmt: skip


def shape_workspace(tokens: int) -> MoeWorkspace:
    return MoeWorkspace(
        ShapeOnly((tokens, 2048)), ShapeOnly((tokens, 256), "float32"),
        ShapeOnly((tokens,), "float32"), ShapeOnly((tokens * 8, 512)), ShapeOnly((tokens, 512)),
    )  # fmt: skip


def queue_shapes(
    kernels: RecordingLibrary, weights: MoeWeights, workspace: MoeWorkspace, tokens: int
) -> None:
    x = ShapeOnly((tokens, 2048))
    norm = InputNorm(ShapeOnly((tokens, 64), "float32"), ShapeOnly((2048,)), EPS, OFFSET)
    moe_small_t.launch_router(kernels.library, weights, x, norm, workspace, stream=0)
    moe_small_t.launch_experts(kernels.library, weights, x, x, workspace, stream=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_layer_is_three_launches(fmt: WeightFormat) -> None:
    kernels = RecordingLibrary()
    queue_shapes(kernels, shape_weights(fmt), shape_workspace(4), 4)
    router, gate_up, down = kernels.launches
    assert router.grid == (16 + 4, 1, 1)
    assert gate_up.grid == (264, 1, 1)
    assert down.grid == (128, 1, 1)
    assert down.options["programmatic"]
    assert router.arguments.dtype.itemsize == struct_bytes("moe_small_t", "RouterProductParams")
    assert gate_up.arguments.dtype.itemsize == struct_bytes("moe_small_t", "ExpertParams")
    assert gate_up["x_stride"] == 2048
    assert down["columns"] == 2048


def test_wrong_arguments_are_refused() -> None:
    kernels = RecordingLibrary()
    weights, workspace = shape_weights(WeightFormat.FP8_ROW), shape_workspace(4)
    assert weights.shared is not None
    bf16 = shape_weights(WeightFormat.BF16)
    calls: list[tuple[str, MoeWeights, MoeWorkspace, int]] = [
        ("up to 16 rows", weights, shape_workspace(17), 17),
        ("logits has shape", weights, dataclasses.replace(
            workspace, logits=ShapeOnly((3, 256), "float32")), 4),
        ("normed has shape", weights, dataclasses.replace(
            workspace, normed=ShapeOnly((3, 2048))), 4),
        ("inner has shape", weights, dataclasses.replace(
            workspace, inner=ShapeOnly((31, 512))), 4),
        ("its part of the workspace", weights, dataclasses.replace(workspace, shared=None), 4),
        ("17 of 256 experts", dataclasses.replace(weights, experts_per_token=17), workspace, 4),
        ("router, gate_up and down", dataclasses.replace(weights, down=weights.gate_up),
         workspace, 4),
        ("row scales", dataclasses.replace(weights, gate_up=dataclasses.replace(
            weights.gate_up, row_scales=None)), workspace, 4),
        ("other formats", dataclasses.replace(weights, shared=bf16.shared), workspace, 4),
        ("needs its gate", dataclasses.replace(weights, shared_gate=None), workspace, 4),
    ]  # fmt: skip
    for message, given, space, tokens in calls:
        kernels.launches.clear()
        with pytest.raises(OpContractError, match=message):
            queue_shapes(kernels, given, space, tokens)
        assert len(kernels.launches) <= 2
