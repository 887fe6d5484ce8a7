"""Gated DeltaNet on the device: steps and chunks against float64, bit by bit, in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.model import GdnConfig
from ninfer.ops import gated_rms_norm, gdn_decode, gdn_prefill
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.gdn_device import HEAD_DIMS, GdnMemory, GdnRows, GdnWeights
from ninfer.ops.gdn_prefill import ChunkShape
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.gdn_layer import EPS, LAYER, GdnLayer, GdnResult, oracle, random_layer
from tests.helpers.tolerance import (
    BF16_REDUCTION,
    GDN_OUTPUT,
    GDN_STATE,
    assert_close,
    assert_close_overall,
)

pytestmark = pytest.mark.gpu

HEADS_128 = GdnConfig(2, 6, 128, 128, 4)
LENGTHS = [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500]
CHUNK_SIZES = [(64, 64), (64, 32), (32, 32)]


@dataclass(frozen=True)
class Run:
    """What one run left: y as codes, windows and states of all slots of the layer."""

    y: NDArray[np.uint16]
    windows: NDArray[np.uint16]
    states: NDArray[np.float32]

    def of(self, layer: GdnLayer) -> Run:
        """Only what `layer` writes."""
        return Run(self.y, self.windows[layer.write_slots], self.states[layer.write_slots])


class LayerOnDevice:
    """The arrays of a layer, with fences round all that is written."""

    def __init__(self, device: Device, layer: GdnLayer) -> None:
        cp = device.cp
        self._device, self._layer = device, layer
        self.config = layer.config
        self._windows = Fenced(cp, layer.windows.shape, "uint16")
        self._states = Fenced(cp, layer.states.shape, "float32")
        self._windows.array[...] = cp.asarray(layer.windows)
        self._states.array[...] = cp.asarray(layer.states)
        self.memory = GdnMemory(self._windows.array, self._states.array, LAYER)
        self._constants = [
            cp.asarray(item) for item in (layer.conv, layer.a_log, layer.dt_bias, layer.norm)
        ]
        self.weights = GdnWeights(*self._constants)

    def steps(
        self, layer: GdnLayer | None = None, *, launches: int = 1, is_chained: bool = False
    ) -> Run:
        """gdn_decode, `launches` times over."""
        part, cp = layer or self._layer, self._device.cp
        y = Fenced(cp, (part.num_tokens, self.config.value_dim), "uint16")
        projection = cp.asarray(part.projection)
        rows = [cp.asarray(item) for item in (part.row_starts, part.read_slots, part.write_slots)]
        for _ in range(launches):
            gdn_decode.launch(
                self._device.kernels, self.config, self.weights, self.memory, GdnRows(*rows),
                projection, y.array, eps=EPS, stream=self._device.stream.ptr,
                is_chained=is_chained,
            )  # fmt: skip
        return self._finish(part, projection, y)

    def chunks(
        self, shape: ChunkShape | None = None, layer: GdnLayer | None = None, *, launches: int = 1
    ) -> Run:
        """gdn_prefill of the only row, `launches` times over, chained."""
        part, cp = layer or self._layer, self._device.cp
        shape = shape or gdn_prefill.plan_chunks(self.config, self._device.kernels.limits)
        y = Fenced(cp, (part.num_tokens, self.config.value_dim), "uint16")
        size = gdn_prefill.workspace_bytes(self.config, shape, part.num_tokens)
        workspace = Fenced(cp, (size,), "uint8")
        workspace.array.fill(0xFF)
        projection = cp.asarray(part.projection)
        reads, writes = cp.asarray(part.read_slots), cp.asarray(part.write_slots)
        for _ in range(launches):
            gdn_prefill.launch(
                self._device.kernels, self.config, shape, self.weights, self.memory, projection,
                y.array, read_slots=reads, write_slots=writes, workspace=workspace.array, eps=EPS,
                stream=self._device.stream.ptr, is_chained=True,
            )  # fmt: skip
        run = self._finish(part, projection, y)
        workspace.read()
        return run

    def _finish(self, part: GdnLayer, projection: Any, y: Fenced) -> Run:
        self._device.stream.synchronize()
        cp, layer = self._device.cp, self._layer
        windows, states = self._windows.read(), self._states.read()
        kept = np.setdiff1d(np.arange(windows.shape[0]), layer.write_slots)
        others = np.setdiff1d(np.arange(windows.shape[1]), [LAYER])
        assert (windows[kept] == layer.windows[kept]).all()
        assert (states[kept] == layer.states[kept]).all()
        assert (windows[:, others] == layer.windows[:, others]).all()
        assert (states[:, others] == layer.states[:, others]).all()
        assert (cp.asnumpy(projection) == part.projection).all()
        given = (layer.conv, layer.a_log, layer.dt_bias, layer.norm)
        for constant, before in zip(self._constants, given, strict=True):
            assert (cp.asnumpy(constant) == before).all()
        return Run(y.read(), windows[:, LAYER], states[:, LAYER])


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def assert_result(run: Run, want: GdnResult) -> None:
    """`run` of the layer's own slots."""
    assert np.isfinite(bf16_to_float(run.y)).all()
    assert np.isfinite(run.states).all()
    assert (run.windows == want.windows).all()
    assert_close_overall(bf16_to_float(run.y), want.y, GDN_OUTPUT)
    assert_close_overall(run.states, want.states, GDN_STATE)


def assert_same(first: Run, second: Run) -> None:
    assert (first.y == second.y).all()
    assert (first.windows == second.windows).all()
    assert (first.states.view(np.uint32) == second.states.view(np.uint32)).all()


@pytest.mark.parametrize("value_dim", HEAD_DIMS)
@pytest.mark.parametrize("key_dim", HEAD_DIMS)
def test_steps_match_float64(device: Device, key_dim: int, value_dim: int) -> None:
    layer = random_layer(GdnConfig(2, 6, key_dim, value_dim, 4), [3, 1, 16, 2], slowness=20.0)
    assert_result(LayerOnDevice(device, layer).steps().of(layer), oracle(layer))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 2), (2, 4), (1, 4)])
def test_steps_of_any_width_and_head_ratio(
    device: Device, width: int, key_heads: int, value_heads: int
) -> None:
    layer = random_layer(GdnConfig(key_heads, value_heads, 64, 32, width), [1, 2, 5], slowness=20.0)
    assert_result(LayerOnDevice(device, layer).steps().of(layer), oracle(layer))


def test_steps_of_a_real_layer_and_eight_rows(device: Device) -> None:
    layer = random_layer(GdnConfig(16, 48, 128, 128, 4), [1] * 8, slowness=20.0)
    assert_result(LayerOnDevice(device, layer).steps().of(layer), oracle(layer))


def test_a_row_without_tokens_keeps_its_state(device: Device) -> None:
    layer = random_layer(HEADS_128, [1, 0, 2])
    run = LayerOnDevice(device, layer).steps()
    read, written = layer.read_slots[1], layer.write_slots[1]
    assert (run.states[written] == layer.states[read, LAYER]).all()
    assert (run.windows[written] == layer.windows[read, LAYER]).all()


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_steps_of_extreme_magnitude(device: Device, scale: float) -> None:
    layer = random_layer(HEADS_128, [16], scale=scale, slowness=100.0)
    assert_result(LayerOnDevice(device, layer).steps().of(layer), oracle(layer))


@pytest.mark.parametrize("config", [HEADS_128, GdnConfig(2, 4, 32, 64, 3)])
def test_a_row_has_the_same_bits_alone_and_among_others(device: Device, config: GdnConfig) -> None:
    layer = random_layer(config, [1, 4, 16, 1, 3, 2, 1, 7], slowness=20.0)
    together = LayerOnDevice(device, layer).steps().of(layer)
    for row in range(8):
        alone = layer.only_row(row)
        first, last = layer.row_starts[row : row + 2]
        expected = Run(
            together.y[first:last],
            together.windows[row : row + 1],
            together.states[row : row + 1],
        )
        assert_same(LayerOnDevice(device, alone).steps().of(alone), expected)


@pytest.mark.parametrize("cuts", [[1] * 16, [4, 4, 4, 4], [1, 15], [13, 3]])
def test_a_row_has_the_same_bits_however_it_is_cut(device: Device, cuts: list[int]) -> None:
    layer = random_layer(HEADS_128, [16, 1], slowness=20.0).only_row(0)
    whole = LayerOnDevice(device, layer).steps().of(layer)
    free = np.setdiff1d(np.arange(1, layer.windows.shape[0], dtype=np.int32), layer.read_slots)[:2]
    pieces: list[Run] = []
    first, state = 0, layer
    for index, length in enumerate(cuts):
        target = free[index % 2 : index % 2 + 1]
        part = replace(state.only_row(0, slice(first, first + length)), write_slots=target)
        run = LayerOnDevice(device, part).steps()
        pieces.append(run)
        windows, states = layer.windows.copy(), layer.states.copy()
        windows[:, LAYER], states[:, LAYER] = run.windows, run.states
        state = replace(layer, windows=windows, states=states, read_slots=target)
        first += length
    last = int(state.read_slots[0])
    y = np.concatenate([piece.y for piece in pieces])
    assert_same(Run(y, pieces[-1].windows[[last]], pieces[-1].states[[last]]), whole)


def test_steps_repeat_bit_by_bit_chained_and_in_a_graph(device: Device) -> None:
    layer = random_layer(HEADS_128, [1, 16, 3], slowness=20.0)
    first = LayerOnDevice(device, layer).steps()
    assert_same(LayerOnDevice(device, layer).steps(launches=5, is_chained=True), first)
    rows = [device.cp.asarray(x) for x in (layer.row_starts, layer.read_slots, layer.write_slots)]
    on_device = LayerOnDevice(device, layer)
    y = Fenced(device.cp, (layer.num_tokens, HEADS_128.value_dim), "uint16")
    projection = device.cp.asarray(layer.projection)
    device.stream.begin_capture()
    for _ in range(3):
        gdn_decode.launch(
            device.kernels, HEADS_128, on_device.weights, on_device.memory, GdnRows(*rows),
            projection, y.array, eps=EPS, stream=device.stream.ptr, is_chained=True,
        )  # fmt: skip
    graph = device.stream.end_capture()
    for _ in range(2):
        graph.launch(device.stream)
    device.stream.synchronize()
    assert (y.read() == first.y).all()


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("chunk", CHUNK_SIZES)
def test_chunks_match_float64(device: Device, tokens: int, chunk: tuple[int, int]) -> None:
    layer = random_layer(HEADS_128, [tokens], slowness=20.0)
    run = LayerOnDevice(device, layer).chunks(ChunkShape(128, *chunk)).of(layer)
    assert_result(run, oracle(layer, in_chunks=True))


@pytest.mark.parametrize("value_dim", HEAD_DIMS)
@pytest.mark.parametrize("key_dim", HEAD_DIMS)
def test_chunks_of_all_head_sizes(device: Device, key_dim: int, value_dim: int) -> None:
    layer = random_layer(GdnConfig(2, 4, key_dim, value_dim, 4), [200], slowness=20.0)
    want = oracle(layer, in_chunks=True)
    for chunk_tokens, columns in CHUNK_SIZES:
        if columns <= value_dim:
            shape = ChunkShape(key_dim, chunk_tokens, columns)
            assert_result(LayerOnDevice(device, layer).chunks(shape).of(layer), want)


@pytest.mark.parametrize("width", [2, 3])
def test_chunks_of_short_windows_and_odd_heads(device: Device, width: int) -> None:
    layer = random_layer(GdnConfig(1, 3, 32, 32, width), [70], slowness=20.0)
    run = LayerOnDevice(device, layer).chunks().of(layer)
    assert_result(run, oracle(layer, in_chunks=True))


@pytest.mark.parametrize(
    ("scale", "likeness", "slowness"),
    [(1e-3, 0.0, 20.0), (100.0, 0.0, 100.0), (1.0, 0.9, 300.0), (1.0, 0.99, 1e4), (1.0, 0.0, 0.02)],
)
def test_chunks_of_like_keys_extreme_decays_and_magnitudes(
    device: Device, scale: float, likeness: float, slowness: float
) -> None:
    layer = random_layer(HEADS_128, [300], scale=scale, likeness=likeness, slowness=slowness)
    run = LayerOnDevice(device, layer).chunks().of(layer)
    assert_result(run, oracle(layer, in_chunks=True))


def test_chunks_agree_with_steps_over_a_long_row(device: Device) -> None:
    layer = random_layer(GdnConfig(16, 48, 128, 128, 4), [2049], slowness=50.0)
    chunks = LayerOnDevice(device, layer).chunks().of(layer)
    steps = LayerOnDevice(device, layer).steps().of(layer)
    assert (chunks.windows == steps.windows).all()
    assert_close_overall(bf16_to_float(chunks.y), bf16_to_float(steps.y), GDN_OUTPUT)
    assert_close_overall(chunks.states, steps.states, GDN_STATE)


def test_chunks_continue_where_chunks_ended(device: Device) -> None:
    layer = random_layer(HEADS_128, [160, 1], slowness=20.0).only_row(0)
    target = np.setdiff1d(np.arange(1, 5, dtype=np.int32), layer.write_slots)[:1]
    head = replace(layer.only_row(0, slice(0, 101)), write_slots=target)
    first = LayerOnDevice(device, head).chunks()
    windows, states = layer.windows.copy(), layer.states.copy()
    windows[:, LAYER], states[:, LAYER] = first.windows, first.states
    tail = replace(
        layer.only_row(0, slice(101, 160)), windows=windows, states=states, read_slots=target
    )
    second = LayerOnDevice(device, tail).chunks().of(tail)
    joined = Run(np.concatenate((first.y, second.y)), second.windows, second.states)
    assert_result(joined, oracle(layer, in_chunks=True))


def test_chunks_repeat_bit_by_bit_in_a_chain(device: Device) -> None:
    layer = random_layer(GdnConfig(16, 32, 128, 128, 4), [700], slowness=20.0)
    first = LayerOnDevice(device, layer).chunks()
    assert_same(LayerOnDevice(device, layer).chunks(launches=4), first)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_gated_rms_norm_matches_float64(device: Device, head_dim: int, tokens: int) -> None:
    cp, heads = device.cp, 3
    rng = np.random.default_rng([tokens, head_dim])
    x, z = (
        float_to_bf16((rng.standard_normal((tokens, heads * head_dim)) * 20).astype(np.float32))
        for _ in range(2)
    )
    weight = float_to_bf16(rng.uniform(0.5, 1.5, head_dim).astype(np.float32))
    given, gate, gain = cp.asarray(x), cp.asarray(z), cp.asarray(weight)
    y = Fenced(cp, x.shape, "uint16")
    for target in (y.array, given):
        gated_rms_norm.launch(
            device.kernels, given, gate, gain, target, eps=EPS, stream=device.stream.ptr,
            is_chained=True,
        )  # fmt: skip
    device.stream.synchronize()
    wide = [bf16_to_float(item).astype(np.float64) for item in (x, z, weight)]
    shape = (tokens, heads, head_dim)
    want = gated_rms_norm.reference(
        wide[0].reshape(shape), wide[1].reshape(shape), wide[2], eps=EPS
    )
    assert_close(bf16_to_float(y.read()), want.reshape(x.shape), BF16_REDUCTION)
    assert (cp.asnumpy(given) == y.read()).all()
    assert (cp.asnumpy(gate) == z).all()
