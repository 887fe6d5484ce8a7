"""dflash_block, _proposals, _conv and _logits on the device against their references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import dflash_block, dflash_conv, dflash_logits, dflash_proposals
from ninfer.ops.device_sampling import ROW
from ninfer.ops.dflash_block import BlockColumns, BlockInputs, BlockRules, LayerKind
from ninfer.ops.draft_step import DraftChain
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.dflash_cases import random_block
from tests.helpers.fenced import Fenced
from tests.helpers.tolerance import BF16_REDUCTION, FLOAT32_POINTWISE, assert_close

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


def random_logits(rows: int, columns: int) -> NDArray[np.float32]:
    values = np.random.default_rng([rows, columns]).standard_normal((rows, columns)) * 20.0
    return values.astype(np.float32)


@pytest.mark.parametrize("columns", [1, 1000, 1025, 151936])
@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (1.0, 30.0), (2.0, 5.0)])
def test_logits_are_scaled_and_bounded_in_place(
    device: Device, columns: int, scale: float, cap: float | None
) -> None:
    given = random_logits(3, columns)
    logits = Fenced(device.cp, (3, columns + 5), "float32")
    poison = logits.read()[:, columns:].view(np.uint32)
    logits.array[:, :columns] = device.cp.asarray(given)
    dflash_logits.launch(
        device.kernels, logits.array[:, :columns], scale=scale, cap=cap, stream=device.stream.ptr
    )
    device.stream.synchronize()
    want = dflash_logits.reference(given.astype(np.float64), scale=scale, cap=cap)
    got = logits.read()
    assert_close(got[:, :columns], want, FLOAT32_POINTWISE)
    assert (got[:, columns:].view(np.uint32) == poison).all()


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, 10.0)])
def test_logits_of_some_tokens_go_to_their_places(
    device: Device, scale: float, cap: float | None
) -> None:
    cp, num_ids, columns = device.cp, 5000, 3001
    given = random_logits(4, columns)
    token_ids = np.random.default_rng(1).permutation(num_ids)[:columns].astype(np.int32)
    token_ids[[5, 77]] = -1, num_ids
    y = Fenced(cp, (4, num_ids), "float32")
    before, source = y.read(), cp.asarray(given)
    dflash_logits.launch(
        device.kernels, source, scale=scale, cap=cap, stream=device.stream.ptr,
        token_ids=cp.asarray(token_ids), y=y.array,
    )  # fmt: skip
    device.stream.synchronize()
    want = dflash_logits.reference(given.astype(np.float64), scale=scale, cap=cap)
    got, is_real = y.read(), (token_ids >= 0) & (token_ids < num_ids)
    assert_close(got[:, token_ids[is_real]], want[:, is_real], FLOAT32_POINTWISE)
    others = np.setdiff1d(np.arange(num_ids), token_ids)
    assert (got[:, others].view(np.uint32) == before[:, others].view(np.uint32)).all()
    assert (cp.asnumpy(source) == given).all()
