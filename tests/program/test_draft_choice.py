"""--spec: what is loaded and planned for it, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelSource
from ninfer.contract.program import TransferKind
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program import memory_costs
from ninfer.program.draft_choice import components_of, draft_tokens, has_draft_model
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.draft_shape import mtp_shape
from ninfer.program.loader import load_program, plan_model
from ninfer.program.program import ModelProgram
from tests.helpers.checkpoints import CheckpointSpec, write_checkpoint
from tests.helpers.model_paths import DEMO_MODEL, golden_model
from tests.helpers.program_driver import move, prefill, spec_of

MTP = EngineOptions(spec="mtp", max_concurrency=2, max_context=256)
WITH_MODULE = [golden_model("qwen3_5-dense"), golden_model("qwen3_5-moe"), DEMO_MODEL]


def ignore(stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(), (("text",), False, 0)),
        (EngineOptions(spec="ngram"), (("text",), False, 7)),
        (EngineOptions(spec="ngram", draft_tokens=2), (("text",), False, 2)),
        (EngineOptions(spec="mtp"), (("text", "mtp"), True, 7)),
        (EngineOptions(spec="mtp", draft_tokens=8), (("text", "mtp"), True, 8)),
    ],
)
def test_what_the_options_ask_for(
    options: EngineOptions, expected: tuple[tuple[str, ...], bool, int]
) -> None:
    config = open_model(golden_model("qwen3_5-dense")).config
    found = components_of(config, options), has_draft_model(options), draft_tokens(options)
    assert found == expected


def with_layers(source: ModelSource, folder: Path, count: int) -> ModelSource:
    spec = CheckpointSpec(num_mtp_layers=count)
    assert source.config.num_mtp_layers == 0
    return open_model(write_checkpoint(folder, spec)) if count else source


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "--spec: mtp needs an MTP module, and the model's files have none"),
        (2, "--spec: mtp is for a module of one layer, and the model's has 2"),
    ],
)
def test_models_whose_module_is_missing_or_deeper_are_refused(
    tmp_path: Path, count: int, message: str
) -> None:
    source = with_layers(open_model(golden_model("qwen3_5-vl")), tmp_path / "model", count)
    with pytest.raises(OptionError, match=message) as caught:
        plan_model(source, MTP)
    assert caught.value.option == "--spec"
    with pytest.raises(OptionError, match=message):
        load_program(source, MTP, ignore)
    load_program(source, dataclasses.replace(MTP, spec="ngram"), ignore)[0].close()


def test_weights_of_the_module_are_read_only_when_asked_for() -> None:
    source = open_model(golden_model("qwen3_5-moe"))
    totals = {}
    for spec in ("ngram", "mtp"):
        steps: list[tuple[int, int]] = []

        def note(stage: str, done: int, total: int, steps: list[tuple[int, int]] = steps) -> None:
            steps.append((done, total))

        options = dataclasses.replace(MTP, spec=spec)
        program, plan = load_program(source, options, note)
        program.close()
        assert plan.capacity == plan_model(source, options).capacity
        assert steps[0] == (0, plan.weights_bytes)
        assert steps[-1] == (plan.weights_bytes, plan.weights_bytes)
        assert program.capacity.has_draft_model == (spec == "mtp")
        totals[spec] = plan.weights_bytes
    module = sum(array.nbytes for _, array in source.read_float32("mtp"))
    assert module > 0
    assert totals["mtp"] == totals["ngram"] + module


@pytest.mark.parametrize("path", WITH_MODULE, ids=lambda path: path.parent.name)
def test_planned_bytes_are_what_the_executor_allocates(path: Path) -> None:
    source = open_model(path)
    plain = plan_model(source, dataclasses.replace(MTP, spec="ngram", draft_tokens=3))
    plan = plan_model(source, MTP)
    memory = cpu_memory.allocate(source.config, plan.capacity, mtp_shape(source.config))
    pools = (memory.k_pages, memory.v_pages, *memory.draft_k_pages, *memory.draft_v_pages)
    assert plan.kv_bytes == sum(pool.nbytes for pool in pools)
    planes = (memory.windows, memory.states, memory.hidden)
    assert plan.state_bytes == sum(plane.nbytes for plane in planes)
    assert plan.detail["page_bytes"] == memory.host_blocks.shape[1]
    assert plan.detail["slot_bytes"] == memory.slot_bytes
    att, config = source.config.attention, source.config
    assert plan.detail["page_bytes"] - plain.detail["page_bytes"] == (
        4 * 2 * 64 * att.num_kv_heads * att.head_dim
    )
    assert plan.detail["slot_bytes"] - plain.detail["slot_bytes"] == 4 * config.hidden_size
    assert plan.workspace_bytes > plain.workspace_bytes
    assert plan.weights_bytes == memory_costs.weights_bytes_of(source.objects, ("text", "mtp"))


async def test_files_of_a_run_without_the_module_are_not_found(tmp_path: Path) -> None:
    """Their pages and StateImages lack what it keeps."""
    options = dataclasses.replace(MTP, cache_dir=str(tmp_path))
    found = []

    def load(spec: str) -> ModelProgram:
        source = open_model(golden_model("qwen3_5-dense"))
        return load_program(source, dataclasses.replace(options, spec=spec), ignore)[0]

    for spec in ("mtp", "ngram"):
        program = load(spec)
        found.append(len(program.disk_notes()))
        asked = spec_of(70, vocab_size=128)
        handle = program.open_sequence(asked)
        await prefill(program, handle, asked, chunk=70)
        checkpoint = program.capture(handle)
        assert checkpoint is not None
        await move(program, TransferKind.STORE, checkpoint)
        program.close()
    for spec in ("ngram", "mtp", "none"):
        program = load(spec)
        found.append(len(program.disk_notes()))
        program.close()
    assert found == [0, 0, 1, 1, 1]
