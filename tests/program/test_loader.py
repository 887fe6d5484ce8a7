"""load_program: the whole way from files to tokens, and nothing half-loaded on failure."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError, ModelFileError, OptionError
from ninfer.contract.model import ModelObject, ModelSource
from ninfer.contract.program import SequenceSpec
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program import cuda_loader, host_memory
from ninfer.program.executors import cuda_device
from ninfer.program.executors.cuda_device import unusable_reason
from ninfer.program.loader import load_program, plan_model
from tests.helpers.dflash_checkpoints import DflashSpec, dflash_values, write_dflash
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.model_paths import GOLDEN, golden_model
from tests.helpers.program_driver import decode, prefill

CASE = "qwen3_5-moe"


class PartialSource:
    """A source whose reading stops, goes wrong or skips at the object number `at`."""

    def __init__(self, source: ModelSource, failure: str, at: int) -> None:
        self._source = source
        self._failure = failure
        self._at = at
        self.given_out: list[weakref.ref[Float32Array]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_float32(self, component: str = "text") -> Iterator[tuple[ModelObject, Float32Array]]:
        for index, (item, array) in enumerate(self._source.read_float32(component)):
            if index == self._at:
                if self._failure == "raises":
                    raise ModelFileError(self._source.path, item.name, "checksum differs")
                if self._failure == "exhausts":
                    raise MemoryError
                if self._failure == "skips":
                    continue
                if self._failure == "shape":
                    array = array[:-1]
                if self._failure == "repeats":
                    yield item, array
            self.given_out.append(weakref.ref(array))
            yield item, array


def ignore(stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("case", ["qwen3-dense", "qwen3_5-dense-tied-realheads", CASE])
async def test_a_loaded_model_continues_as_the_golden_says(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    name = next(key.split("/")[0] for key in golden.files if key.endswith("/greedy_logits"))
    token_ids = golden[f"{name}/input_ids"].astype(np.int32)
    program, plan = load_program(
        open_model(golden_model(case)), EngineOptions(max_concurrency=2), ignore
    )
    try:
        assert program.capacity == plan.capacity
        spec = SequenceSpec("golden", PreparedPrompt(token_ids), SamplingParams())
        handle = program.open_sequence(spec)
        tokens = [await prefill(program, handle, spec, chunk=5)]
        for _ in range(15):
            tokens += await decode(program, [handle])
        assert tokens == golden[f"{name}/greedy"].tolist()
    finally:
        program.close()


def test_progress_runs_from_nothing_to_all_of_the_weights() -> None:
    calls: list[tuple[str, int, int]] = []
    program, plan = load_program(
        open_model(golden_model(CASE)), EngineOptions(), lambda *call: calls.append(call)
    )
    program.close()
    done = [call[1] for call in calls]
    assert {(stage, total) for stage, _, total in calls} == {("weights", plan.weights_bytes)}
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, plan.weights_bytes)


def test_the_plan_is_the_same_without_loading() -> None:
    source, options = open_model(golden_model(CASE)), EngineOptions(memory_budget=2**28)
    program, plan = load_program(source, options, ignore)
    program.close()
    assert plan_model(source, options) == plan


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("raises", ModelFileError, "checksum differs"),
        ("exhausts", OptionError, "--memory-budget: the system gives less memory"),
        ("skips", InvariantError, "were not read"),
        ("shape", InvariantError, "was read as float32"),
        ("repeats", InvariantError, "read twice"),
    ],
)
def test_a_failed_read_leaves_nothing_half_loaded(
    failure: str, error: type[Exception], message: str
) -> None:
    source = PartialSource(open_model(golden_model(CASE)), failure, at=7)
    with pytest.raises(error, match=message) as caught:
        load_program(source, EngineOptions(), ignore)
    # The error still holds the frames it passed through; only the object at hand may live there.
    alive = [reference for reference in source.given_out[:7] if reference() is not None]
    assert len(alive) <= 1
    assert caught.value is not None


def test_a_failing_progress_display_stops_the_load() -> None:
    source = PartialSource(open_model(golden_model(CASE)), "none", at=0)

    def fail(stage: str, done: int, total: int) -> None:
        if done > 0:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        load_program(source, EngineOptions(), fail)
    assert len(source.given_out) == 1


def test_what_cannot_fit_fails_before_a_weight_is_read() -> None:
    source = PartialSource(open_model(golden_model(CASE)), "none", at=0)
    with pytest.raises(OptionError, match="--memory-budget"):
        load_program(source, EngineOptions(memory_budget=1000), ignore)
    assert source.given_out == []


@pytest.mark.skipif(unusable_reason() is None, reason="a GPU can be used here")
def test_cuda_is_refused_by_name_where_there_is_none() -> None:
    with pytest.raises(OptionError, match=r"--executor: cuda cannot be used: ") as caught:
        load_program(open_model(golden_model(CASE)), EngineOptions(executor="cuda"), ignore)
    assert caught.value.option == "--executor"


def test_a_driver_without_the_package_for_it_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_device, "_driver_loads", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert 'pip install -e ".[cuda12]"' in str(unusable_reason())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (EngineOptions(executor="cpu", weights="fp8"), "--weights"),
        (EngineOptions(executor="cpu", weights="bf16", kv_dtype="int8"), "--weights"),
        (EngineOptions(executor="cpu", kv_dtype="fp8"), "--kv-dtype"),
        (EngineOptions(executor="cpu", device=3), "--device"),
        (EngineOptions(executor="cpu", kernels="folder"), "--kernels"),
    ],
)
def test_settings_of_a_gpu_are_refused_on_the_cpu(options: EngineOptions, flag: str) -> None:
    with pytest.raises(
        OptionError, match=f"{flag}: it is for a GPU, and here the model runs on the CPU"
    ):
        plan_model(open_model(golden_model(CASE)), options)


def test_threads_of_the_cpu_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "unusable_reason", lambda _index=0: None)
    with pytest.raises(OptionError, match="--cpu-threads: it is for the CPU, and here the model"):
        plan_model(open_model(golden_model(CASE)), EngineOptions(cpu_threads=2))


def test_draft_models_are_planned_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_device, "unusable_reason", lambda _index=0: None)
    monkeypatch.setattr(cuda_loader, "open_device", lambda _options: FakeCuda())
    source = open_model(golden_model("qwen3_5-dense"))
    plain = plan_model(source, EngineOptions(weights="bf16"))
    spec = DflashSpec(head_dim=32)
    options = EngineOptions(
        weights="bf16", spec="dflash", draft_model=str(write_dflash(tmp_path, spec))
    )
    plan = plan_model(source, options)
    assert (plan.capacity.max_draft_tokens, plan.capacity.has_draft_model) == (5, True)
    values = sum(array.size for array in dflash_values(spec).values())
    assert plan.weights_bytes - plain.weights_bytes >= 2 * values
    stored_dim = 64
    kv = 2 * 64 * spec.num_layers * spec.num_kv_heads * stored_dim * 2
    assert plan.detail["page_bytes"] - plain.detail["page_bytes"] == kv
    assert plan.detail["slot_bytes"] == plain.detail["slot_bytes"]


def test_draft_models_without_kernels_are_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_device, "unusable_reason", lambda _index=0: None)
    monkeypatch.setattr(cuda_loader, "open_device", lambda _options: FakeCuda())
    options = EngineOptions(spec="dflash", draft_model=str(write_dflash(tmp_path, DflashSpec())))
    with pytest.raises(OptionError, match=r"--draft-model: cuda cannot run .* heads of 16"):
        plan_model(open_model(golden_model("qwen3_5-dense")), options)


def test_drafts_have_a_length_and_take_memory_for_logits() -> None:
    source = open_model(golden_model(CASE))
    plain = plan_model(source, EngineOptions())
    drafting = plan_model(source, EngineOptions(spec="ngram", draft_tokens=8))
    assert plain.capacity.max_draft_tokens == 0
    assert drafting.capacity.max_draft_tokens == 8
    assert plan_model(source, EngineOptions(spec="ngram")).capacity.max_draft_tokens == 7
    logits = [plan.detail["logits_bytes"] for plan in (plain, drafting)]
    assert logits[1] >= logits[0]
    with pytest.raises(OptionError, match="--draft-tokens: it is for --spec, which is none"):
        plan_model(source, EngineOptions(draft_tokens=2))


def test_a_system_that_hides_its_memory_needs_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    source = open_model(golden_model(CASE))
    with pytest.raises(OptionError, match="--memory-budget: needed here"):
        plan_model(source, EngineOptions())
    assert plan_model(source, EngineOptions(memory_budget=2**28)).budget_bytes == 2**28
