"""device_sampling: its algorithm in NumPy against the Op's reference; the device against both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import SampleRow
from ninfer.ops import device_sampling, sampling
from ninfer.ops.device_sampling import MAX_TOP, ROW, SamplingInputs, SamplingOutputs
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.radix_sampling import sampled
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes
from tests.helpers.sample_rows import random_logits, random_sample

VOCAB = 248077


def filled(
    samples: list[SampleRow], size: int, capacity: int = 1 << 16
) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[np.float32]]:
    rows = np.zeros(len(samples), ROW)
    ids, values = np.zeros(capacity, np.int32), np.zeros(capacity, np.float32)
    device_sampling.fill_rows(samples, size, rows, ids, values)
    return rows, ids, values


def expected(logits: NDArray[np.float32], sample: SampleRow) -> int:
    token = sampling.reference(logits, sample)
    return -1 if token is None else token.token_id


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4000), st.booleans())
def test_radix_cuts_choose_the_token_of_the_reference(
    seed: int, size: int, is_rounded: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, size, is_rounded=is_rounded)
    for _ in range(4):
        sample = random_sample(rng, size)
        (row,), ids, values = filled([sample], size)
        assert sampled(logits, row, ids, values) == expected(logits, sample)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.3),
    SamplingParams(temperature=1.0, top_k=100, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=1.0),
])  # fmt: skip
def test_ties_at_a_cut_go_to_the_lowest_ids(params: SamplingParams) -> None:
    logits = np.zeros(1000, np.float32)
    empty = np.empty(0, np.int32)
    for seed in range(40):
        sample = SampleRow(replace(params, seed=seed), 3, empty, empty, empty)
        (row,), ids, values = filled([sample], 1000)
        assert sampled(logits, row, ids, values) == expected(logits, sample)


def test_lists_of_several_rows_share_the_buffers() -> None:
    rng = np.random.default_rng(1)
    samples = [random_sample(rng, 500, repetition_penalty=1.5) for _ in range(5)]
    rows, ids, values = filled(samples, 500)
    for row, sample in zip(rows, samples, strict=True):
        begin = row["prompt_begin"]
        assert (ids[begin : begin + row["prompt_count"]] == sample.prompt_ids).all()
        begin, count = row["generated_begin"], row["generated_count"]
        assert (values[begin : begin + count] == sample.generated_counts).all()


def test_a_bias_given_twice_is_added_twice() -> None:
    empty = np.empty(0, np.int32)
    params = SamplingParams(logit_bias=((7, 1.5), (3, 1.0), (7, 2.0)))
    (row,), ids, values = filled([SampleRow(params, 0, empty, empty, empty)], 10)
    assert row["bias_count"] == 2
    assert dict(zip(ids[:2].tolist(), values[:2].tolist(), strict=True)) == {3: 1.0, 7: 3.5}


@pytest.mark.parametrize(
    ("params", "capacity"),
    [
        (SamplingParams(logit_bias=((10, 1.0),)), 100),
        (SamplingParams(logit_bias=((-1, 1.0),)), 100),
        (SamplingParams(logit_bias=tuple((i, 1.0) for i in range(10))), 9),
        (SamplingParams(top_logprobs=11), 100),
    ],
)
def test_rows_that_do_not_fit_are_refused(params: SamplingParams, capacity: int) -> None:
    empty = np.empty(0, np.int32)
    with pytest.raises(OpContractError, match="device_sampling"):
        filled([SampleRow(params, 0, empty, empty, empty)], 10, capacity)


def shape_only_call(num_rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "logits": ShapeOnly((num_rows, 248320), "float32"),
        "inputs": SamplingInputs(
            ShapeOnly((num_rows * ROW.itemsize,), "uint8"), ShapeOnly((99,), "int32"),
            ShapeOnly((99,), "float32"),
        ),
        "outputs": SamplingOutputs(
            ShapeOnly((num_rows,), "int32"), ShapeOnly((num_rows,), "int32"),
            ShapeOnly((num_rows,), "float32"), ShapeOnly((num_rows, MAX_TOP), "int32"),
            ShapeOnly((num_rows, MAX_TOP), "float32"),
        ),
        "num_valid_ids": VOCAB,
        "scratch": ShapeOnly((device_sampling.scratch_bytes(num_rows),), "uint8"),
        **changes,
    }  # fmt: skip


def launch_shapes(kernels: RecordingLibrary, call: dict[str, Any]) -> None:
    given = dict(call)
    logits, inputs, outputs = (given.pop(name) for name in ("logits", "inputs", "outputs"))
    device_sampling.launch(kernels.library, logits, inputs, outputs, stream=0, **given)


def test_slices_cover_the_vocabulary_and_waiting_blocks_are_resident() -> None:
    kernels = RecordingLibrary()
    launch_shapes(kernels, shape_only_call(40))
    rows = 0
    for launch in kernels.launches:
        parts, count, _ = launch.grid
        assert parts * launch["slice"] >= VOCAB > (parts - 1) * launch["slice"]
        assert launch["slice"] <= 16384
        assert launch["slice"] % 4 == 0
        assert launch["first_row"] == rows
        assert launch.arguments.dtype.itemsize == struct_bytes("sampling", "SamplingParams")
        assert launch.options["shared_bytes"] <= 99 * 1024
        assert parts * count <= 2 * kernels.limits.num_multiprocessors
        rows += count
    assert rows == 40
    assert ROW.itemsize == struct_bytes("sampling", "SampleRow")
    assert device_sampling.scratch_bytes(1) == struct_bytes("sampling", "RowScratch")


@pytest.mark.parametrize(
    "change",
    [
        {"num_valid_ids": 248321},
        {"num_valid_ids": 0},
        {"logits": ShapeOnly((2, 248320), "float64")},
        {"logits": ShapeOnly((2, 248320), "float32", address=1028)},
        {"scratch": ShapeOnly((device_sampling.scratch_bytes(2) - 1,), "uint8")},
        {"logits": ShapeOnly((3, 248320), "float32")},
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="device_sampling"):
        launch_shapes(kernels, shape_only_call(2, **change))
    assert not kernels.launches


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


class Sampler:
    """Buffers of one size on the device; every launch starts from poisoned outputs."""

    def __init__(self, device: Device, num_rows: int) -> None:
        self.device = device
        self.scratch = device.cp.zeros(device_sampling.scratch_bytes(num_rows), device.cp.uint8)

    def run(
        self,
        logits: NDArray[Any],
        samples: list[SampleRow],
        size: int,
        *,
        masks: NDArray[np.uint32] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Outputs by name. logits [R, V] f32, or uint16 for bf16."""
        cp = self.device.cp
        rows, ids, values = filled(samples, size)
        if masks is not None:
            rows["has_mask"] = 1
        count = len(samples)
        fenced = {
            "token_ids": Fenced(cp, (count,), "int32"), "is_finite": Fenced(cp, (count,), "int32"),
            "logprobs": Fenced(cp, (count,), "float32"),
            "top_ids": Fenced(cp, (count, MAX_TOP), "int32"),
            "top_logprobs": Fenced(cp, (count, MAX_TOP), "float32"),
        }  # fmt: skip
        inputs = SamplingInputs(
            cp.asarray(rows.view(np.uint8)), cp.asarray(ids), cp.asarray(values),
            None if masks is None else cp.asarray(masks),
        )  # fmt: skip
        outputs = SamplingOutputs(**{name: item.array for name, item in fenced.items()})
        device_sampling.launch(
            self.device.kernels, cp.asarray(logits), inputs, outputs, num_valid_ids=size,
            scratch=self.scratch, stream=self.device.stream.ptr,
        )  # fmt: skip
        self.device.stream.synchronize()
        zeros = cp.asnumpy(self.scratch).reshape(-1, device_sampling.scratch_bytes(1))[:, :122944]
        assert not zeros.any(), "scratch was left dirty"
        return {name: item.read() for name, item in fenced.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("size", [1, 3, 64, 1001, 16384, 16385, 50000, VOCAB])
def test_the_device_chooses_the_reference_token(
    device: Device, size: int, is_rounded: bool
) -> None:
    rng = np.random.default_rng([size, is_rounded])
    pitch = -(-size // 8) * 8
    sampler = Sampler(device, 8)
    for _ in range(6):
        samples = [random_sample(rng, size) for _ in range(8)]
        logits = np.full((8, pitch), 1e9, np.float32)
        for row in range(8):
            logits[row, :size] = random_logits(rng, size, is_rounded=is_rounded)
        given = float_to_bf16(logits) if is_rounded else logits
        got = sampler.run(given, samples, size)
        want = [expected(logits[i, :size], sample) for i, sample in enumerate(samples)]
        assert got["is_finite"].all()
        assert got["token_ids"].tolist() == want


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_mates(device: Device) -> None:
    rng = np.random.default_rng(5)
    samples = [random_sample(rng, VOCAB, top_logprobs=20) for _ in range(40)]
    logits = np.stack([random_logits(rng, 248320) for _ in range(40)])
    sampler = Sampler(device, 40)
    together = sampler.run(logits, samples, VOCAB)
    again = sampler.run(logits, samples, VOCAB)
    for name, values in together.items():
        assert (values == again[name]).all(), name
    for row in (0, 7, 23, 39):
        alone = sampler.run(logits[row : row + 1], samples[row : row + 1], VOCAB)
        for name, values in together.items():
            assert (alone[name][0] == values[row]).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_log_probabilities_are_those_of_the_raw_logits(
    device: Device, num_top: int, is_greedy: bool
) -> None:
    rng = np.random.default_rng(num_top)
    fixed: dict[str, Any] = {"top_logprobs": num_top}
    if is_greedy:
        fixed["temperature"] = 0.0
    for size, is_rounded in ((1000, True), (VOCAB, True), (VOCAB, False)):
        sample = random_sample(rng, size, **fixed)
        logits = random_logits(rng, size, is_rounded=is_rounded)
        padded = np.pad(logits, (0, -size % 8))[None]
        got = Sampler(device, 1).run(padded, [sample], size)
        want = sampling.logprobs(logits, int(got["token_ids"][0]), num_top)
        np.testing.assert_allclose(got["logprobs"][0], want.logprob, rtol=1e-5, atol=1e-5)
        assert got["top_ids"][0, :num_top].tolist() == [token for token, _ in want.top]
        np.testing.assert_allclose(
            got["top_logprobs"][0, :num_top], [value for _, value in want.top],
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


@pytest.mark.gpu
def test_rows_without_a_token_are_told_apart(device: Device) -> None:
    empty = np.empty(0, np.int32)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    plain = SampleRow(params, 0, empty, empty, empty)
    blocked = replace(plain, suppressed_ids=tuple(range(64)))
    logits = np.ones((4, 64), np.float32)
    logits[1, 63], logits[2, 0] = np.nan, np.inf
    got = Sampler(device, 4).run(logits, [plain, plain, plain, blocked], 64)
    assert got["is_finite"].tolist() == [1, 0, 0, 1]
    assert (got["token_ids"] == -1).tolist() == [False, True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_its_ids_alone(device: Device, temperature: float) -> None:
    rng = np.random.default_rng(3)
    empty = np.empty(0, np.int32)
    allowed = np.sort(rng.choice(VOCAB, 5, replace=False))
    masks = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in allowed:
        masks[0, token // 32] |= np.uint32(1 << token % 32)
    logits = random_logits(rng, 248320)
    sampler = Sampler(device, 1)
    for seed in range(10):
        params = SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
        sample = SampleRow(params, 1, empty, empty, empty)
        masked = np.full(VOCAB, -1e30, np.float32)
        masked[allowed] = logits[allowed]
        got = sampler.run(logits[None], [sample], VOCAB, masks=masks)
        assert got["token_ids"][0] == expected(masked, sample)


@pytest.mark.gpu
def test_bf16_logits_are_read_as_they_are(device: Device) -> None:
    rng = np.random.default_rng(4)
    logits = float_to_bf16(random_logits(rng, 4096))
    sample = random_sample(rng, 4096, top_k=50)
    got = Sampler(device, 1).run(logits[None], [sample], 4096)
    assert got["token_ids"][0] == expected(bf16_to_float(logits), sample)
