"""`--spec dflash`: what is refused, what is planned, what is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import ModelFileError, OptionError
from ninfer.contract.model import ModelSource
from ninfer.contract.units import MemoryPlan
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program.dflash_loading import open_dflash_draft
from ninfer.program.loader import load_program, plan_model
from tests.helpers.checkpoints import edit_json, write_json
from tests.helpers.dflash_checkpoints import DflashSpec, dflash_values, write_dflash
from tests.helpers.model_paths import copy_golden, golden_model

CASE = "qwen3_5-dense"
SPEC = DflashSpec()


def source() -> ModelSource:
    return open_model(golden_model(CASE))


def options(folder: Path, spec: DflashSpec = SPEC, **changes: int | None) -> EngineOptions:
    draft = str(write_dflash(folder / "draft", spec))
    base = EngineOptions(executor="cpu", max_concurrency=2, spec="dflash", draft_model=draft)
    return replace(base, **changes)  # type: ignore[arg-type]


def plain_plan() -> MemoryPlan:
    return plan_model(source(), EngineOptions(executor="cpu", max_concurrency=2))


def test_the_two_options_need_each_other(tmp_path: Path) -> None:
    alone = EngineOptions(executor="cpu", spec="dflash")
    with pytest.raises(OptionError, match="--draft-model: --spec dflash needs it"):
        plan_model(source(), alone)
    for spec in ("none", "ngram", "mtp"):
        with pytest.raises(OptionError, match=f"--draft-model: it is for .* --spec is {spec}"):
            plan_model(source(), replace(options(tmp_path), spec=spec))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden size 64, and this one has 96"),
        ({"vocab_size": 640}, "vocabulary 640, and this one has 512"),
        ({"num_target_layers": 8}, "8 layers, and this one has 4"),
        ({"tap_layers": (0, 4)}, "reads layer 4"),
    ],
)
def test_a_draft_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    with pytest.raises(OptionError, match=f"--draft-model: .*{words}"):
        plan_model(source(), options(tmp_path, replace(SPEC, **changes)))  # type: ignore[arg-type]


def test_files_of_the_draft_are_named(tmp_path: Path) -> None:
    asked = options(tmp_path)
    edit_json(tmp_path / "draft" / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelFileError, match="layer_types"):
        load_program(source(), asked, lambda *_: None)
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "nothing", "nothing: No such file or directory"),
        (
            tmp_path / "draft" / "config.json",
            r"config.json is a file; a draft model is a directory",
        ),
        (tmp_path / "empty", "empty is empty"),
    ):
        with pytest.raises(OptionError, match=f"--draft-model: .*{words}"):
            plan_model(source(), replace(asked, draft_model=str(path)))


@pytest.mark.parametrize(
    ("block_size", "wanted", "expected"),
    [(6, None, 5), (2, None, 1), (16, None, MAX_DRAFT_TOKENS), (6, 3, 3), (6, 5, 5)],
)
def test_drafts_are_as_long_as_the_trained_block(
    tmp_path: Path, block_size: int, wanted: int | None, expected: int
) -> None:
    asked = options(tmp_path, replace(SPEC, block_size=block_size), draft_tokens=wanted)
    capacity = plan_model(source(), asked).capacity
    assert capacity.max_draft_tokens == expected
    assert capacity.has_draft_model


def test_more_than_the_trained_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--draft-tokens: 6: .* at most 5"):
        plan_model(source(), options(tmp_path, draft_tokens=6))


def test_the_plan_has_the_drafts_weights_pages_and_passes(tmp_path: Path) -> None:
    plan, plain = plan_model(source(), options(tmp_path)), plain_plan()
    values = sum(array.size for array in dflash_values(SPEC).values())
    assert plan.weights_bytes - plain.weights_bytes == 4 * values
    pages = (plan.capacity.num_pages, plain.capacity.num_pages)
    kv = 2 * 64 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * 4
    assert plan.kv_bytes // pages[0] - plain.kv_bytes // pages[1] == kv
    assert plan.detail["draft_bytes"] > 0
    assert plan.state_bytes // plan.capacity.num_slots == (
        plain.state_bytes // plain.capacity.num_slots
    )


def test_progress_runs_to_all_of_both_models_weights(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    program, plan = load_program(source(), options(tmp_path), lambda *call: calls.append(call))
    program.close()
    done = [call[1] for call in calls]
    assert {call[0] for call in calls} == {"weights"}
    assert {call[2] for call in calls} == {plan.weights_bytes}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, plan.weights_bytes)


def test_caches_of_other_drafts_are_other_caches(tmp_path: Path) -> None:
    def fingerprint(name: str, spec: DflashSpec) -> str:
        draft = open_dflash_draft(source(), options(tmp_path / name, spec))
        assert draft is not None
        return draft.fingerprint("cpu float32")

    again = fingerprint("a", SPEC)
    assert again == fingerprint("b", SPEC)
    assert again != fingerprint("c", replace(SPEC, seed=1))
    assert again != fingerprint("d", replace(SPEC, sliding_window=9))


def with_tokenizer(folder: Path, num_tokens: int, added: tuple[int, ...] = ()) -> ModelSource:
    copy_golden(CASE, folder)
    document = {
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(num_tokens)}, "merges": []},
        "added_tokens": [{"id": token_id, "content": "<x>"} for token_id in added],
    }
    write_json(folder / "tokenizer.json", document)
    return open_model(folder)


@pytest.mark.parametrize(
    ("num_tokens", "added", "expected"), [(300, (), 300), (300, (305, 303), 306), (600, (), 512)]
)
def test_ids_without_a_token_are_known_from_the_tokenizer(
    tmp_path: Path, num_tokens: int, added: tuple[int, ...], expected: int
) -> None:
    target = with_tokenizer(tmp_path / "target", num_tokens, added)
    draft = open_dflash_draft(target, options(tmp_path))
    assert draft is not None
    assert draft.num_token_ids == expected


def test_without_a_tokenizer_all_ids_are_tokens(tmp_path: Path) -> None:
    draft = open_dflash_draft(source(), options(tmp_path))
    assert draft is not None
    assert draft.num_token_ids == 512


def test_a_draft_that_knows_no_token_of_the_model_is_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, style="speculators", token_ids=(2, 5, 9))
    target = with_tokenizer(tmp_path / "target", 2)
    with pytest.raises(OptionError, match="guesses no token"):
        plan_model(target, options(tmp_path, spec))
