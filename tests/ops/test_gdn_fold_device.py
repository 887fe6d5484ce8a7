"""Padded rows, outputs without state, and gdn_fold on the device: the bits of plain steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.model import GdnConfig
from ninfer.ops import gdn_decode, gdn_fold
from ninfer.ops.gdn_device import HEAD_DIMS, GdnMemory, GdnRows, GdnWeights
from ninfer.ops.gdn_fold import FoldLayer
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.gdn_layer import EPS, NUM_LAYERS, GdnLayer, random_layer

pytestmark = pytest.mark.gpu

HEADS_128 = GdnConfig(2, 6, 128, 128, 4)
COLUMNS = 5
COUNTS = [5, 1, 3, 0, 2, 4]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@dataclass(frozen=True)
class Images:
    """windows and states of all slots and layers."""

    windows: NDArray[np.uint16]
    states: NDArray[np.float32]

    def assert_equals(self, other: Images) -> None:
        assert (self.windows == other.windows).all()
        assert (self.states.view(np.uint32) == other.states.view(np.uint32)).all()


class Unit:
    """Rows of COLUMNS columns in NUM_LAYERS layers on the device, over StateImages of its own."""

    def __init__(self, device: Device, config: GdnConfig, num_rows: int) -> None:
        self.layers = [
            random_layer(config, [COLUMNS] * num_rows, seed, slowness=20.0)
            for seed in range(NUM_LAYERS)
        ]
        self.config, self.device, cp = config, device, device.cp
        self.first: GdnLayer = self.layers[0]
        self.projections = [cp.asarray(layer.projection) for layer in self.layers]
        self.weights = [
            GdnWeights(*map(cp.asarray, (layer.conv, layer.a_log, layer.dt_bias, layer.norm)))
            for layer in self.layers
        ]
        self._windows = Fenced(cp, self.first.windows.shape, "uint16")
        self._states = Fenced(cp, self.first.states.shape, "float32")
        self.reset()

    def reset(self) -> None:
        self._windows.array[...] = self.device.cp.asarray(self.first.windows)
        self._states.array[...] = self.device.cp.asarray(self.first.states)

    def memory(self, layer: int) -> GdnMemory:
        return GdnMemory(self._windows.array, self._states.array, layer)

    def rows(self, starts: NDArray[np.int32], ends: Any = None) -> GdnRows:
        as_array = self.device.cp.asarray
        slots = (self.first.read_slots, self.first.write_slots)
        return GdnRows(as_array(starts), as_array(slots[0]), as_array(slots[1]), ends)

    def padded_rows(self, counts: list[int]) -> GdnRows:
        starts = self.first.row_starts
        return self.rows(starts, self.device.cp.asarray(starts[:-1] + np.array(counts, np.int32)))

    def step(
        self, layer: int, rows: GdnRows, projection: Any, *, keeps_state: bool
    ) -> NDArray[np.uint16]:
        y = Fenced(self.device.cp, (projection.shape[0], self.config.value_dim), "uint16")
        gdn_decode.launch(
            self.device.kernels, self.config, self.weights[layer], self.memory(layer), rows,
            projection, y.array, eps=EPS, stream=self.device.stream.ptr, keeps_state=keeps_state,
        )  # fmt: skip
        self.device.stream.synchronize()
        result: NDArray[np.uint16] = y.read()
        return result

    def real_columns(self, counts: list[int]) -> NDArray[np.intp]:
        return np.flatnonzero(np.arange(COLUMNS) < np.array(counts)[:, None])

    def steps_of_real_columns(self, counts: list[int]) -> tuple[list[NDArray[np.uint16]], Images]:
        """y of every layer, and what gdn_decode leaves of rows without padding. A row of no tokens
        leaves nothing."""
        columns = self.real_columns(counts)
        rows = self.rows(np.cumsum([0, *counts], dtype=np.int32))
        outputs = [
            self.step(layer, rows, self.projections[layer][columns], keeps_state=True)
            for layer in range(NUM_LAYERS)
        ]
        images = self.images()
        for row in np.flatnonzero(np.array(counts) == 0):
            slot = self.first.write_slots[row]
            images.windows[slot] = self.first.windows[slot]
            images.states[slot] = self.first.states[slot]
        self.reset()
        return outputs, images

    def table(self) -> Any:
        layers = [FoldLayer(*pair) for pair in zip(self.weights, self.projections, strict=True)]
        return self.device.cp.asarray(gdn_fold.describe(self.config, layers).view(np.uint8))

    def fold(self, table: Any, rows: GdnRows, *, is_chained: bool = False) -> None:
        gdn_fold.launch(
            self.device.kernels, self.config, table, self._windows.array, self._states.array, rows,
            stream=self.device.stream.ptr, is_chained=is_chained,
        )  # fmt: skip

    def images(self) -> Images:
        self.device.stream.synchronize()
        return Images(self._windows.read(), self._states.read())


@pytest.mark.parametrize("keeps_state", [False, True])
@pytest.mark.parametrize("config", [HEADS_128, GdnConfig(1, 4, 32, 32, 2)])
def test_padded_rows_step_as_rows_without_padding(
    device: Device, config: GdnConfig, keeps_state: bool
) -> None:
    unit = Unit(device, config, len(COUNTS))
    wanted, left = unit.steps_of_real_columns(COUNTS)
    rows, columns = unit.padded_rows(COUNTS), unit.real_columns(COUNTS)
    for layer in range(NUM_LAYERS):
        y = unit.step(layer, rows, unit.projections[layer], keeps_state=keeps_state)
        assert (y[columns] == wanted[layer]).all()
        assert (np.delete(y, columns, axis=0) == 0).all()
    if keeps_state:
        written = unit.first.write_slots[np.array(COUNTS) > 0]
        images = unit.images()
        Images(images.windows[written], images.states[written]).assert_equals(
            Images(left.windows[written], left.states[written])
        )
    else:
        unit.images().assert_equals(Images(unit.first.windows, unit.first.states))


@pytest.mark.parametrize("key_dim", HEAD_DIMS)
@pytest.mark.parametrize("value_dim", HEAD_DIMS)
def test_a_fold_leaves_the_bits_of_steps(device: Device, key_dim: int, value_dim: int) -> None:
    unit = Unit(device, GdnConfig(2, 6, key_dim, value_dim, 4), len(COUNTS))
    _, wanted = unit.steps_of_real_columns(COUNTS)
    unit.fold(unit.table(), unit.padded_rows(COUNTS))
    unit.images().assert_equals(wanted)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 2), (1, 4)])
def test_a_fold_of_any_width_and_head_ratio(
    device: Device, width: int, key_heads: int, value_heads: int
) -> None:
    unit = Unit(device, GdnConfig(key_heads, value_heads, 64, 32, width), 3)
    _, wanted = unit.steps_of_real_columns([5, 1, 2])
    unit.fold(unit.table(), unit.padded_rows([5, 1, 2]))
    unit.images().assert_equals(wanted)


def test_a_fold_of_a_real_layer(device: Device) -> None:
    unit = Unit(device, GdnConfig(16, 48, 128, 128, 4), 8)
    counts = [1, 2, 3, 4, 5, 1, 4, 2]
    _, wanted = unit.steps_of_real_columns(counts)
    unit.fold(unit.table(), unit.padded_rows(counts))
    unit.images().assert_equals(wanted)


def test_poisoned_columns_behind_the_last_token_are_not_read(device: Device) -> None:
    unit = Unit(device, HEADS_128, 3)
    counts = [2, 5, 1]
    _, wanted = unit.steps_of_real_columns(counts)
    for projection in unit.projections:
        padding = np.setdiff1d(np.arange(3 * COLUMNS), unit.real_columns(counts))
        projection[padding] = 0x7FC0
    y = unit.step(0, unit.padded_rows(counts), unit.projections[0], keeps_state=False)
    assert ((y & 0x7F80) != 0x7F80).all()
    unit.fold(unit.table(), unit.padded_rows(counts))
    unit.images().assert_equals(wanted)


def test_a_captured_fold_follows_the_ends_of_the_rows(device: Device) -> None:
    cp, unit = device.cp, Unit(device, HEADS_128, 3)
    table, ends = unit.table(), cp.zeros(3, cp.int32)
    unit.fold(table, unit.padded_rows([1, 1, 1]))
    rows = unit.rows(unit.first.row_starts, ends)
    device.stream.begin_capture()
    for _ in range(3):
        unit.fold(table, rows, is_chained=True)
    graph = device.stream.end_capture()
    for counts in ([1, 5, 2], [4, 0, 3], [5, 5, 5]):
        unit.reset()
        _, wanted = unit.steps_of_real_columns(counts)
        ends[...] = cp.asarray(unit.first.row_starts[:-1] + np.array(counts, np.int32))
        graph.launch(device.stream)
        unit.images().assert_equals(wanted)
