"""The draft head holds the first and the last rows of the head, quantised, whatever the head is
stored in; guesses are chosen from it, and mostly as from the head."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import Capacity
from ninfer.kernels.library import KernelLibrary
from ninfer.models.parameters import model_objects
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.ops import dequantise
from ninfer.ops.float_codecs import HalfArray, bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat, pack_bf16, pack_fp8_row
from ninfer.ops.linear_small_t import PackedLinear, plan_linear
from ninfer.ops.quantise import reference_fp8_row
from ninfer.program.cuda_costs import CudaCosts
from ninfer.program.cuda_loader import build_cuda
from ninfer.program.executors import cuda_draft_head
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_device import CudaDevice
from ninfer.program.executors.cuda_draft_head import (
    LEAST_VOCAB,
    NUM_FIRST,
    NUM_LAST,
    head_rows,
    listed_rows,
    make_draft_head,
    with_draft_head,
)
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_round_buffers import DraftBuffers
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.cuda_weights import (
    HEAD,
    WEIGHT_FORMATS,
    LinearPart,
    MatrixSpec,
    WeightPlan,
    plan_weights,
)
from ninfer.program.executors.cuda_workspace import carve_workspace
from tests.helpers import executor_driver as driver_of_rows
from tests.helpers.cuda_models import require_device
from tests.helpers.fake_cuda import H200, FakeCuda, Launch
from tests.helpers.packing_cuda import PackingCuda
from tests.program.executors.test_cuda import OPTIONS, build, small_config

COLUMNS = 64


class HeadCuda(PackingCuda):
    """Also plays the kernels that unpack and quantise rows."""

    def queue(self, item: Any) -> None:
        super().queue(item)
        if isinstance(item, Launch) and item.family == "dequantise":
            self._dequantise(item)
        elif isinstance(item, Launch) and item.entry == "quantise_fp8_row":
            self._quantise(item.arguments)

    def _dequantise(self, launch: Launch) -> None:
        arguments = launch.arguments
        fmt = WeightFormat(launch.entry.removeprefix("dequantise_"))
        rows, columns = int(arguments["rows"]), int(arguments["columns"])
        layout = ImageLayout(fmt, rows, columns, int(arguments["strips_per_block"]))
        image = self.memory(int(arguments["image"]), layout.image_bytes)
        scale = None
        if fmt.has_row_scale:
            scale = self.memory(int(arguments["row_scale"]), 4 * rows).view(np.float32)
        decoded = dequantise.reference(image, layout, row_scale=scale)
        self.memory(int(arguments["y"]), decoded.nbytes)[:] = decoded.view(np.uint8).reshape(-1)

    def _quantise(self, arguments: NDArray[np.void]) -> None:
        rows, columns = int(arguments["rows"]), int(arguments["columns"])
        x = self.memory(int(arguments["x"]), 2 * rows * columns).view(np.uint16)
        codes, scales = reference_fp8_row(x.reshape(rows, columns))
        self.memory(int(arguments["codes"]), codes.nbytes)[:] = codes.reshape(-1)
        self.memory(int(arguments["scales"]), scales.nbytes)[:] = scales.view(np.uint8)


def random_rows(rows: int) -> HalfArray:
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows, COLUMNS)) * rng.uniform(0.1, 4.0, (rows, 1))
    return float_to_bf16(values.astype(np.float32))


def upload(driver: CudaDriver, array: NDArray[Any]) -> DeviceTensor:
    tensor = DeviceTensor.dense(driver.allocate(array.nbytes), array.shape, array.dtype.name)
    driver.upload(tensor.address, np.ascontiguousarray(array))
    driver.synchronize()
    return tensor


def make_head(
    driver: CudaDriver, kernels: KernelLibrary, fmt: WeightFormat, rows: int
) -> tuple[LinearPart, HalfArray]:
    """A head on the device, and its rows as bf16."""
    layout = ImageLayout.of(fmt, rows, COLUMNS)
    decoded, scale = random_rows(rows), None
    if fmt is WeightFormat.BF16:
        image = pack_bf16(decoded, layout)
    else:
        codes, scales = reference_fp8_row(decoded)
        image, scale = pack_fp8_row(codes, layout), upload(driver, scales)
        decoded = dequantise.reference(image, layout, row_scale=scales)
    linear = PackedLinear(plan_linear(layout, kernels.limits), upload(driver, image), scale)
    return LinearPart(0, True, MatrixSpec(HEAD, layout, False), linear), decoded


def check_draft_head(
    driver: CudaDriver, fmt: WeightFormat, vocab: int, first: int, last: int
) -> None:
    head, decoded = make_head(driver, driver.kernels, fmt, vocab)
    planned = head_rows(first, last, COLUMNS)
    measured = Arena()
    planned.matrix.take(measured)
    place = driver.allocate(measured.used_bytes)
    (made,) = make_draft_head(driver, [head], [planned], Arena(place, measured.used_bytes))
    assert (made.first_row, made.is_whole) == (first, last - first == vocab)
    layout = made.matrix.layout
    assert (layout.rows, layout.columns) == (last - first, COLUMNS)
    codes, scales = reference_fp8_row(decoded[first:last])
    got_image = np.empty(layout.image_bytes, np.uint8)
    got_scales = np.empty(layout.rows, np.float32)
    image, scale = made.linear.image, made.linear.row_scale
    assert isinstance(image, DeviceTensor)
    assert isinstance(scale, DeviceTensor)
    driver.download(got_image, image.address)
    driver.download(got_scales, scale.address)
    driver.synchronize()
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_image, pack_fp8_row(codes, layout))


CASES = [
    (WeightFormat.BF16, 500, 0, 500), (WeightFormat.BF16, 9000, 0, 8999),
    (WeightFormat.BF16, 9000, 0, 300), (WeightFormat.BF16, 9000, 8704, 9000),
    (WeightFormat.BF16, 9700, 256, 9700), (WeightFormat.FP8_ROW, 9100, 0, 8500),
    (WeightFormat.FP8_ROW, 9100, 0, 4000), (WeightFormat.FP8_ROW, 9100, 6912, 9100),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "vocab", "first", "last"), CASES)
@pytest.mark.parametrize("piece_bytes", [1, 100_000, 64 << 20])
def test_rows_of_any_head_come_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
    fmt: WeightFormat,
    vocab: int,
    first: int,
    last: int,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(cuda_draft_head, "_PIECE_BYTES", piece_bytes)
    check_draft_head(HeadCuda(), fmt, vocab, first, last)


def test_staging_is_given_back() -> None:
    cuda = HeadCuda()
    head, _ = make_head(cuda, cuda.kernels, WeightFormat.BF16, 600)
    planned = [head_rows(0, 256, COLUMNS), head_rows(256, 600, COLUMNS)]
    size = sum(rows.matrix.num_bytes + 512 for rows in planned)
    place = cuda.allocate(size)
    before = len(cuda.sizes)
    made = make_draft_head(cuda, [head], planned, Arena(place, size))
    assert [part.first_row for part in made] == [0, 256]
    assert len(cuda.sizes) == before


@pytest.mark.parametrize(("first", "last"), [(0, 700), (512, 601), (32, 600)])
def test_rows_that_the_head_lacks_or_cannot_divide_are_refused(first: int, last: int) -> None:
    cuda = HeadCuda()
    head, _ = make_head(cuda, cuda.kernels, WeightFormat.BF16, 600)
    with pytest.raises(InvariantError, match="no draft head"):
        make_draft_head(cuda, [head], [head_rows(first, last, COLUMNS)], Arena())


@given(st.integers(LEAST_VOCAB, 500_000))
@example(NUM_FIRST)
@example(NUM_FIRST + NUM_LAST)
@example(NUM_FIRST + NUM_LAST + 255)
@example(NUM_FIRST + NUM_LAST + 256)
def test_first_and_last_ids_are_listed(vocab_size: int) -> None:
    listed = [id for first, last in listed_rows(vocab_size) for id in (first, last)]
    assert listed == sorted(set(listed))
    assert (listed[0], listed[-1]) == (0, vocab_size)
    if len(listed) == 2:
        assert vocab_size < NUM_FIRST + NUM_LAST + 256
    else:
        assert listed[1] == NUM_FIRST
        assert NUM_LAST <= vocab_size - listed[2] < NUM_LAST + 256


def plan_of(config: ModelConfig, weights: str = "bf16") -> tuple[WeightPlan, WeightPlan]:
    """Without and with a draft head."""
    plan = plan_weights(config, WEIGHT_FORMATS[weights], components=("text", "mtp"))
    return plan, with_draft_head(config, plan)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3-8b"])
def test_the_plan_grows_by_the_draft_head_and_its_logits(name: str, weights: str) -> None:
    config = dataclasses.replace(SYNTHETIC_MODELS[name], num_mtp_layers=1)
    plan, drafting = plan_of(config, weights)
    rows = sum(last - first for first, last in listed_rows(config.vocab_size))
    assert NUM_FIRST + NUM_LAST <= rows < NUM_FIRST + NUM_LAST + 256
    assert [part.matrix.layout.format for part in drafting.draft_head] == [WeightFormat.FP8_ROW] * 2
    grown = drafting.num_bytes - plan.num_bytes
    assert 0 <= grown - rows * (config.hidden_size + 4) < 32 * config.hidden_size + 1024
    capacity = Capacity(
        3, 4096, 200, 7, 512, num_host_blocks=0, max_draft_tokens=3, has_draft_model=True
    )
    sizes = []
    for chosen in (plan, drafting):
        costs = CudaCosts(config, chosen, H200, "bf16")
        sizes.append(sum(costs.workspace_bytes(capacity).values()))
        arena = Arena()
        tensors = carve_workspace(arena, config, chosen, capacity, H200, kv_dtype="bf16")
        persistent = 200 * costs.page_bytes() + 7 * costs.slot_bytes()
        assert arena.used_bytes == sizes[-1] + persistent
        assert tensors.rounds is not None
        assert tensors.rounds.draft is not None
        assert (tensors.rounds.draft.logits is None) == (chosen is plan)
    assert sizes[1] - sizes[0] >= 3 * 4 * config.vocab_size


def test_small_heads_and_heads_of_codes_are_guessed_from_themselves() -> None:
    small = drafting_config(LEAST_VOCAB - 1)
    plan, drafting = plan_of(small)
    assert drafting is plan
    plan, drafting = plan_of(dataclasses.replace(small, vocab_size=LEAST_VOCAB))
    assert [part.first_row for part in drafting.draft_head] == [0]
    coded = MatrixSpec(HEAD, ImageLayout.of(WeightFormat.NVFP4, 200_000, 64), False)
    plan = dataclasses.replace(plan, matrices=(*plan.matrices[:-1], coded))
    assert with_draft_head(dataclasses.replace(small, vocab_size=200_000), plan) is plan


VOCAB = NUM_FIRST + 9_001
MTP = dataclasses.replace(OPTIONS, spec="mtp", draft_tokens=3, memory_budget=512 << 20)


def drafting_config(vocab_size: int = VOCAB) -> ModelConfig:
    return dataclasses.replace(small_config(), vocab_size=vocab_size, num_mtp_layers=1)


def draft_buffers(executor: CudaExecutor) -> DraftBuffers:
    rounds = executor.workspace.rounds
    assert rounds is not None
    assert rounds.draft is not None
    return rounds.draft


def read_logits(driver: CudaDriver, logits: DeviceTensor) -> Float32Array:
    """[R, V]"""
    whole = np.empty((logits.shape[0], logits.row_stride), np.float32)
    driver.download(whole, logits.address)
    driver.synchronize()
    return whole[:, : logits.shape[1]]


def guess_launches(cuda: FakeCuda, executor: CudaExecutor, num_rows: int) -> list[Launch]:
    """Of two guesses."""
    before = len(cuda.queued)
    executor.rounds.queue_guesses((num_rows, 1), 2)
    return cuda.launches(cuda.queued[before:])


def test_guesses_are_chosen_from_the_logits_of_the_draft_head() -> None:
    cuda = FakeCuda()
    built = build(cuda, drafting_config(), MTP)
    assert sum(cuda.sizes.values()) == built.plan.memory.total_bytes
    logits = draft_buffers(built.executor).logits
    assert logits is not None
    assert np.all(read_logits(cuda, logits) < -2e30)
    launches = guess_launches(cuda, built.executor, 2)
    (_, _), (tail, _) = listed_rows(VOCAB)
    places = (logits.address, logits.address + 4 * tail)
    products = [launch for launch in launches if launch.entry == "linear_small_t_fp8_row_8"]
    assert [int(launch.arguments["y"]) for launch in products] == [*places, *places]
    assert {int(launch.arguments["y_stride"]) for launch in products} == {logits.row_stride}
    sampled = [launch for launch in launches if launch.family == "sampling"]
    assert [int(launch.arguments["logits"]) for launch in sampled] == [logits.address] * 2
    assert {int(launch.arguments["num_valid_ids"]) for launch in sampled} == {VOCAB}


def test_without_a_draft_head_guesses_are_chosen_from_the_head() -> None:
    cuda = FakeCuda()
    executor = build(cuda, drafting_config(300), MTP).executor
    assert draft_buffers(executor).logits is None
    launches = guess_launches(cuda, executor, 2)
    logits = executor.workspace.buffers.logits.address
    sampled = [launch for launch in launches if launch.family == "sampling"]
    assert [int(launch.arguments["logits"]) for launch in sampled] == [logits] * 2
    assert not [launch for launch in launches if "fp8" in launch.entry]


def test_e4m3_rows_mostly_have_the_best_token_of_the_head() -> None:
    """Random rows are harder than a trained head: their best tokens are close to each other."""
    cuda = HeadCuda()
    head, decoded = make_head(cuda, cuda.kernels, WeightFormat.BF16, 20_000)
    planned = head_rows(0, 20_000, COLUMNS)
    size = planned.matrix.num_bytes + 512
    (part,) = make_draft_head(cuda, [head], [planned], Arena(cuda.allocate(size), size))
    image, scale = part.linear.image, part.linear.row_scale
    assert isinstance(image, DeviceTensor)
    assert isinstance(scale, DeviceTensor)
    codes = dequantise.reference(
        cuda.read(image), planned.matrix.layout, row_scale=cuda.read(scale)
    )
    hidden = np.random.default_rng(1).standard_normal((300, COLUMNS)).astype(np.float32)
    best = np.argmax(hidden @ bf16_to_float(decoded).T, axis=1)
    guessed = np.argmax(hidden @ bf16_to_float(codes).T, axis=1)
    assert 0.8 * len(best) <= np.count_nonzero(best == guessed) < len(best)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "vocab", "first", "last"), CASES)
def test_the_device_makes_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, fmt: WeightFormat, vocab: int, first: int, last: int
) -> None:
    require_device()
    monkeypatch.setattr(cuda_draft_head, "_PIECE_BYTES", 100_000)
    driver = CudaDevice()
    try:
        check_draft_head(driver, fmt, vocab, first, last)
    finally:
        driver.close()


@pytest.mark.gpu
async def test_the_device_mostly_guesses_as_from_the_whole_head() -> None:
    require_device()
    config = drafting_config()
    rng = np.random.default_rng(3)
    weights = {
        item.name: (0.2 * rng.standard_normal(item.shape)).astype(np.float32)
        for item in model_objects(config)
    }

    def fill(store: WeightStore) -> None:
        for name, weight in weights.items():
            store.put(name, weight)

    executor = build_cuda(config, CudaDevice(), MTP, fill).executor
    try:
        await check_guesses(executor, bf16_to_float(float_to_bf16(weights["embed_tokens"])))
    finally:
        executor.close()


async def check_guesses(executor: CudaExecutor, head: Float32Array) -> None:
    rng = np.random.default_rng(4)
    draft, target = draft_buffers(executor), driver_of_rows.sequence()
    assert draft.logits is not None
    (_, end), (tail, _) = listed_rows(VOCAB)
    same, total = 0, 60
    for _ in range(total):
        token = int(rng.integers(VOCAB))
        row = dataclasses.replace(target.row([token], samples=True), num_proposed=1)
        (output,) = await executor.verify((row,))
        target.advance([token])
        (guess,) = output.proposal
        normed = np.empty((1, head.shape[1]), np.uint16)
        executor.driver.download(normed, draft.normed.address)
        found = read_logits(executor.driver, draft.logits)[0]
        exact = head @ bf16_to_float(normed)[0]
        assert np.all(found[end:tail] < -1e30)
        exact[end:tail] = -np.inf
        assert guess == np.argmax(found)
        listed = np.isfinite(exact)
        assert np.std(found[listed] - exact[listed]) < 0.05 * np.std(exact[listed])
        same += int(guess == np.argmax(exact))
    assert same >= 0.75 * total
