"""draft_match, draft_step, draft_input and copy_rows on the device against their references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import copy_rows, draft_input, draft_match, draft_step, embedding, rms_norm
from ninfer.ops.device_sampling import ROW
from ninfer.ops.draft_input import DraftNorms, HiddenRows
from ninfer.ops.draft_match import MatchInputs, MatchOutputs, PairColumns
from ninfer.ops.draft_step import DraftChain, StepOutputs
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.draft_cases import random_unit
from tests.helpers.fenced import Fenced
from tests.helpers.tolerance import BF16_REDUCTION, assert_close

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (1, 4), (3, 2), (8, 4), (8, 9), (5, 16), (2, 31), (40, 3)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


class Match:
    """A unit on the device and fenced outputs of its match."""

    def __init__(self, device: Device, num_rows: int, columns: int) -> None:
        cp, self._device = device.cp, device
        self.num_rows, self.columns = num_rows, columns
        pairs = num_rows * (columns + 1)
        self.unit = random_unit(np.random.default_rng([num_rows, columns]), num_rows, columns)
        self.inputs: MatchInputs[Any] = MatchInputs(
            *(cp.asarray(getattr(self.unit, field.name)) for field in fields(self.unit))
        )
        self._fenced: list[Fenced] = []

        def fenced(*shape: int, dtype: str = "int32") -> Any:
            self._fenced.append(Fenced(cp, shape, dtype))
            return self._fenced[-1].array

        self.outputs: MatchOutputs[Any] = MatchOutputs(
            fenced(num_rows), fenced(num_rows), fenced(num_rows),
            PairColumns(fenced(pairs), fenced(pairs), fenced(pairs), fenced(3, pairs),
                        fenced(pairs), fenced(num_rows + 1), fenced(num_rows)),
            DraftChain(fenced(num_rows), fenced(3, num_rows),
                       fenced(num_rows * ROW.itemsize, dtype="uint8")),
        )  # fmt: skip

    def load(self, seed: int) -> None:
        """Another unit into the same arrays."""
        rng = np.random.default_rng([seed, self.num_rows, self.columns])
        self.unit = random_unit(rng, self.num_rows, self.columns)
        for field in fields(self.unit):
            target = getattr(self.inputs, field.name)
            target[...] = self._device.cp.asarray(getattr(self.unit, field.name))

    def launch(self, *, is_chained: bool = False) -> None:
        draft_match.launch(
            self._device.kernels, self.inputs, self.outputs, stream=self._device.stream.ptr,
            is_chained=is_chained,
        )  # fmt: skip

    def check(self) -> None:
        self._device.stream.synchronize()
        want = draft_match.reference(self.unit)
        arrays = [want.accepted, want.row_ends, want.kept_columns]
        for part in (want.pairs, want.chain):
            arrays += [getattr(part, field.name) for field in fields(part)]
        for got, expected in zip(self._fenced, arrays, strict=True):
            np.testing.assert_array_equal(got.read(), expected)
        for field in fields(self.unit):
            before = getattr(self.unit, field.name)
            after = self._device.cp.asnumpy(getattr(self.inputs, field.name))
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("num_rows", "columns"), SHAPES)
def test_a_match_is_its_reference(device: Device, num_rows: int, columns: int) -> None:
    match = Match(device, num_rows, columns)
    for seed in range(20):
        match.load(seed)
        match.launch()
        match.check()


def test_a_captured_match_follows_its_inputs(device: Device) -> None:
    match = Match(device, 8, 4)
    match.launch()
    device.stream.synchronize()
    device.stream.begin_capture()
    for _ in range(3):
        match.launch(is_chained=True)
    graph = device.stream.end_capture()
    for seed in range(5):
        match.load(seed)
        graph.launch(device.stream)
        match.check()


@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_steps_are_their_reference(device: Device, num_rows: int) -> None:
    cp, rng = device.cp, np.random.default_rng(num_rows)
    num_proposals = 4
    ordinals = rng.integers(-1, 90, num_rows).astype(np.int32)
    limits = (ordinals + rng.integers(1, 5, num_rows)).astype(np.int32)
    positions = rng.integers(0, 500, (3, num_rows)).astype(np.int32)
    rows = rng.integers(0, 100, num_rows * ROW.itemsize).astype(np.uint8)
    chosen = rng.integers(-1, 9, (num_proposals, num_rows)).astype(np.int32)
    proposals = np.full((num_rows, num_proposals), -9, np.int32)
    chain: DraftChain[Any] = DraftChain(ordinals.copy(), positions.copy(), rows.copy())
    outputs: StepOutputs[Any] = StepOutputs(
        np.empty(num_rows, np.int32), np.empty(num_rows, np.int32), proposals
    )
    want = [getattr(chain, field.name) for field in fields(chain)]
    want += [getattr(outputs, field.name) for field in fields(outputs)]
    fenced = [Fenced(cp, array.shape, array.dtype.name) for array in want]
    arrays = [item.array for item in fenced]
    for target, source in zip(arrays[:3], (ordinals, positions, rows), strict=True):
        target[...] = cp.asarray(source)
    given = cp.asarray(chosen)
    for index in range(num_proposals):
        draft_step.reference(chosen[index], limits, chain, outputs, index=index)
        draft_step.launch(
            device.kernels, given[index], cp.asarray(limits), DraftChain(*arrays[:3]),
            StepOutputs(*arrays[3:]), index=index, stream=device.stream.ptr, is_chained=True,
        )  # fmt: skip
    device.stream.synchronize()
    for got, array in zip(fenced, want, strict=True):
        np.testing.assert_array_equal(got.read(), array)
    assert (cp.asnumpy(given) == chosen).all()


def random_bf16(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    rng = np.random.default_rng([seed, *shape])
    return float_to_bf16(rng.standard_normal(shape).astype(np.float32))


class Inputs:
    """Tables of draft_input on the device and its fenced output; slot 0 of `kept` is zeros."""

    def __init__(self, device: Device, tokens: int, columns: int, seed: int = 0) -> None:
        cp, rng = device.cp, np.random.default_rng([seed, tokens, columns])
        self._device, self._columns = device, columns
        self.token_ids = rng.integers(0, 50, tokens).astype(np.int32)
        self.table, self.hidden = random_bf16((50, columns), 1), random_bf16((tokens, columns), 2)
        self.kept = random_bf16((5, columns), 3)
        self.kept[0] = 0
        self.norms = [random_bf16((columns,), seed) for seed in (4, 5)]
        self.x = Fenced(cp, (tokens, 2 * columns), "uint16")

    def launch(self, **options: Any) -> NDArray[np.uint16]:
        cp, device = self._device.cp, self._device
        norms = DraftNorms(cp.asarray(self.norms[0]), cp.asarray(self.norms[1]), 1e-6)
        draft_input.launch(
            device.kernels, cp.asarray(self.token_ids), cp.asarray(self.table),
            HiddenRows(cp.asarray(self.hidden), cp.asarray(self.kept)), norms,
            self.x.array, stream=device.stream.ptr, **options,
        )  # fmt: skip
        device.stream.synchronize()
        result: NDArray[np.uint16] = self.x.read()
        return result

    def reference(self, sources: NDArray[np.int32]) -> NDArray[np.float64]:
        wide = [
            bf16_to_float(codes).astype(np.float64)
            for codes in (self.table, self.hidden, self.kept, *self.norms)
        ]
        x: NDArray[Any] = draft_input.reference(self.token_ids, sources, *wide, eps=1e-6)
        return x.astype(np.float64)

    def by_other_kernels(self, sources: NDArray[np.int32]) -> NDArray[np.uint16]:
        """embedding, a gather of the host, and rms_norm."""
        cp, device = self._device.cp, self._device
        at = np.maximum(sources, 0)
        h = np.where((sources < 0)[:, None], self.kept[(-1 - sources) % 5], self.hidden[at])
        rows, y = cp.asarray(h), cp.empty_like(self.x.array)
        e = cp.empty_like(rows)
        embedding.launch(
            device.kernels, cp.asarray(self.token_ids), cp.asarray(self.table), e,
            stream=device.stream.ptr,
        )  # fmt: skip
        for half, (x, norm) in enumerate(zip((e, rows), self.norms, strict=True)):
            rms_norm.launch(
                device.kernels, x, cp.asarray(norm),
                y[:, half * self._columns : (half + 1) * self._columns], eps=1e-6, offset=1.0,
                stream=device.stream.ptr,
            )  # fmt: skip
        device.stream.synchronize()
        result: NDArray[np.uint16] = cp.asnumpy(y)
        return result


@pytest.mark.parametrize("columns", [8, 40, 2560, 5120, 9000])
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_inputs_have_the_bits_of_embedding_and_norm(
    device: Device, tokens: int, columns: int
) -> None:
    inputs = Inputs(device, tokens, columns)
    sources = np.random.default_rng(tokens).integers(-5, tokens, tokens).astype(np.int32)
    got = inputs.launch(sources=device.cp.asarray(sources))
    assert (got == inputs.by_other_kernels(sources)).all()
    assert_close(bf16_to_float(got), inputs.reference(sources), BF16_REDUCTION)


@pytest.mark.parametrize("read_slot", [0, 3])
def test_shifted_inputs_are_those_of_shifted_sources(device: Device, read_slot: int) -> None:
    cp, inputs = device.cp, Inputs(device, 70, 64)
    slot = cp.asarray(np.array([read_slot], np.int32))
    shifted = inputs.launch(read_slot=slot)
    sources = draft_input.shifted_sources(70, read_slot)
    assert (shifted == inputs.launch(sources=cp.asarray(sources), is_chained=True)).all()
    is_zero = bf16_to_float(shifted[0, 64:]) == 0.0
    assert is_zero.all() == (read_slot == 0)


def test_a_token_outside_the_table_spoils_its_own_half_alone(device: Device) -> None:
    inputs = Inputs(device, 3, 64)
    sources = draft_input.shifted_sources(3, 1)
    want = inputs.launch(sources=device.cp.asarray(sources))
    inputs.token_ids[1] = 50
    got = inputs.launch(sources=device.cp.asarray(sources))
    assert np.isnan(bf16_to_float(got[1, :64])).all()
    assert (got[1, 64:] == want[1, 64:]).all()
    assert (got[[0, 2]] == want[[0, 2]]).all()


@pytest.mark.parametrize("columns", [8, 2560, 5120])
@pytest.mark.parametrize(("reads", "writes"), [(True, True), (True, False), (False, True)])
def test_rows_are_copied_and_no_others_written(
    device: Device, columns: int, reads: bool, writes: bool
) -> None:
    cp, rng = device.cp, np.random.default_rng(columns)
    source, before = random_bf16((9, columns), 1), random_bf16((7, columns), 2)
    target = Fenced(cp, before.shape, "uint16")
    target.array[...] = cp.asarray(before)
    source_rows = rng.integers(0, 9, 6).astype(np.int32) if reads else None
    target_rows = rng.permutation(7)[:6].astype(np.int32) if writes else None
    copy_rows.launch(
        device.kernels, cp.asarray(source), target.array, num_rows=6, stream=device.stream.ptr,
        source_rows=None if source_rows is None else cp.asarray(source_rows),
        target_rows=None if target_rows is None else cp.asarray(target_rows),
    )  # fmt: skip
    device.stream.synchronize()
    copy_rows.reference(
        source, before, num_rows=6, source_rows=source_rows, target_rows=target_rows
    )
    assert (target.read() == before).all()
