"""dflash_block, dflash_proposals and dflash_conv on the device against their references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import dflash_block, dflash_conv, dflash_proposals
from ninfer.ops.device_sampling import ROW
from ninfer.ops.dflash_block import BlockColumns, BlockInputs, BlockRules, LayerKind
from ninfer.ops.draft_step import DraftChain
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.dflash_cases import random_block
from tests.helpers.fenced import Fenced
from tests.helpers.tolerance import BF16_REDUCTION, assert_close

pytestmark = pytest.mark.gpu

KINDS: tuple[LayerKind, ...] = ((None, False), (3, True), (5, False), (None, True))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


class Block:
    """Rows on the device and the fenced columns of their block."""

    def __init__(self, device: Device, num_rows: int, columns: int, rules: BlockRules) -> None:
        cp, self._device = device.cp, device
        self.num_rows, self.columns, self.rules = num_rows, columns, rules
        self.given = random_block(np.random.default_rng(0), num_rows, columns)
        self.arrays = [cp.asarray(array) for array in flat(self.given)]
        total, kinds = num_rows * columns, len(rules.kinds)
        self.fenced = [
            Fenced(cp, shape, "int32")
            for shape in (
                (total,), (total,), (3, total), (total,), (num_rows + 1,), (kinds, total),
                (kinds, total),
            )
        ] + [Fenced(cp, (total * ROW.itemsize,), "uint8")]  # fmt: skip

    def load(self, seed: int) -> None:
        """Other rows into the same arrays, and poison into the columns."""
        rng = np.random.default_rng([seed, self.num_rows, self.columns])
        self.given = random_block(rng, self.num_rows, self.columns)
        for target, source in zip(self.arrays, flat(self.given), strict=True):
            target[...] = self._device.cp.asarray(source)
        for item in self.fenced:
            item.array.view("uint8")[...] = 0xA5

    def launch(self, *, is_chained: bool = False) -> None:
        inputs: BlockInputs[Any] = BlockInputs(DraftChain(*self.arrays[:3]), *self.arrays[3:])
        outputs: BlockColumns[Any] = BlockColumns(*(item.array for item in self.fenced))
        dflash_block.launch(
            self._device.kernels, inputs, outputs, self.rules, stream=self._device.stream.ptr,
            is_chained=is_chained,
        )  # fmt: skip

    def check(self) -> None:
        self._device.stream.synchronize()
        want = dflash_block.reference(self.given, self.rules, columns=self.columns)
        for got, field in zip(self.fenced, fields(want), strict=True):
            expected = getattr(want, field.name)
            np.testing.assert_array_equal(got.read(), expected, field.name)
        for array, before in zip(self.arrays, flat(self.given), strict=True):
            np.testing.assert_array_equal(self._device.cp.asnumpy(array), before)


def flat(inputs: BlockInputs[NDArray[Any]]) -> list[NDArray[Any]]:
    chain = [getattr(inputs.chain, field.name) for field in fields(inputs.chain)]
    return chain + [getattr(inputs, field.name) for field in fields(inputs)[1:]]


@pytest.mark.parametrize("num_candidates", [0, 16])
@pytest.mark.parametrize(("num_rows", "columns"), [(1, 2), (1, 16), (3, 5), (8, 16), (40, 64)])
def test_a_block_is_its_reference(
    device: Device, num_rows: int, columns: int, num_candidates: int
) -> None:
    for kinds in (KINDS, KINDS[2:3]):
        block = Block(device, num_rows, columns, BlockRules(77, kinds, num_candidates))
        for seed in range(8):
            block.load(seed)
            block.launch()
            block.check()


def test_a_captured_block_follows_its_inputs(device: Device) -> None:
    block = Block(device, 8, 16, BlockRules(77, KINDS))
    block.launch()
    device.stream.synchronize()
    device.stream.begin_capture()
    for _ in range(3):
        block.launch(is_chained=True)
    graph = device.stream.end_capture()
    for seed in range(5):
        block.load(seed)
        graph.launch(device.stream)
        block.check()


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 2), (3, 5), (8, 16), (300, 9)])
@pytest.mark.parametrize("num_proposals", [1, 8, 15])
def test_proposals_are_their_reference(
    device: Device, num_rows: int, columns: int, num_proposals: int
) -> None:
    cp, rng = device.cp, np.random.default_rng([num_rows, columns])
    chosen = rng.integers(-1, 90, num_rows * columns).astype(np.int32)
    ordinals = rng.integers(-1, 3, num_rows * columns).astype(np.int32)
    proposals = Fenced(cp, (num_rows, num_proposals), "int32")
    dflash_proposals.launch(
        device.kernels, cp.asarray(chosen), cp.asarray(ordinals), proposals.array,
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    want = np.empty((num_rows, num_proposals), np.int32)
    dflash_proposals.reference(chosen, ordinals, want)
    assert (proposals.read() == want).all()


def random_bf16(shape: tuple[int, ...], seed: int, scale: float = 0.25) -> NDArray[np.uint16]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return float_to_bf16(values.astype(np.float32))


def wide(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    return bf16_to_float(codes).astype(np.float64)


class Convolution:
    """Operands of both sides on the host; x, dynamic and y stand in wider rows on the device."""

    def __init__(self, rows: int, channels: int, taps: int, group_size: int) -> None:
        self.taps, self.groups = taps, channels // group_size
        self.x, self.before = random_bf16((rows, channels), 1), random_bf16((rows, channels), 2)
        self.dynamic = random_bf16((rows, 2 * taps * self.groups), 3)
        self.base = random_bf16((2, taps, channels), 4)

    def launch(
        self, device: Device, side: int, columns: int, *, first: int = 0, is_residual: bool = False
    ) -> NDArray[np.uint16]:
        """Of the rows from `first` on."""
        cp, (rows, channels) = device.cp, self.x[first:].shape
        x, dynamic = (
            cp.asarray(np.pad(array[first:], ((0, 0), (0, 8))))
            for array in (self.x, self.dynamic)
        )  # fmt: skip
        y = Fenced(cp, (rows, channels + 8), "uint16")
        poison = y.read()
        if is_residual:
            y.array[:, :channels] = cp.asarray(self.before[first:])
        dflash_conv.launch(
            device.kernels, x[:, :-8], dynamic[:, :-8], cp.asarray(self.base),
            y.array[:, :channels], side=side, columns=columns, stream=device.stream.ptr,
            is_residual=is_residual,
        )  # fmt: skip
        device.stream.synchronize()
        got: NDArray[np.uint16] = y.read()
        assert (got[:, channels:] == poison[:, channels:]).all()
        assert (cp.asnumpy(x)[:, :-8] == self.x[first:]).all()
        return got[:, :channels]

    def reference(self, side: int, columns: int) -> NDArray[Any]:
        rows = self.x.shape[0]
        dynamic = wide(self.dynamic).reshape(rows, 2, self.taps, self.groups)[:, side]
        return dflash_conv.reference(
            wide(self.x), dynamic, wide(self.base)[side], np.arange(rows) % columns
        )


@pytest.mark.parametrize("group_size", [2, 4, 8, 16, 64])
@pytest.mark.parametrize(("taps", "columns"), [(1, 5), (2, 16), (4, 3), (7, 5)])
def test_a_convolution_is_its_reference(
    device: Device, group_size: int, taps: int, columns: int
) -> None:
    for blocks, channels in ((1, 64), (3, 2624)):
        conv = Convolution(blocks * columns, channels, taps, group_size)
        for side in (0, 1):
            got, want = conv.launch(device, side, columns), conv.reference(side, columns)
            assert_close(bf16_to_float(got), want, BF16_REDUCTION)
            added = conv.launch(device, side, columns, is_residual=True)
            assert_close(bf16_to_float(added), want + wide(conv.before), BF16_REDUCTION)


@pytest.mark.parametrize("group_size", [4, 16])
def test_a_convolved_block_depends_on_no_other(device: Device, group_size: int) -> None:
    conv = Convolution(32, 64, 4, group_size)
    together = conv.launch(device, 1, 8)
    for first in (8, 24):
        assert (conv.launch(device, 1, 8, first=first) == together[first:]).all()
    conv.x[:16] = 0x7FC0
    assert (conv.launch(device, 1, 8)[16:] == together[16:]).all()
