"""`ninfer info` with speculation: the draft model, and how much is drafted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.helpers.command import ninfer
from tests.helpers.dflash_checkpoints import DEMO_DRAFT, dflash_values, write_dflash


def test_the_draft_model_is_described(tmp_path: Path) -> None:
    spec = replace(DEMO_DRAFT, is_second=True)
    folder = write_dflash(tmp_path / "draft", spec)
    arguments = ("info", "--spec", "dflash", "--draft-model", str(folder))
    shown = json.loads(ninfer(*arguments, "--json").stdout)
    assert shown["draft_model"] == {
        "path": str(folder),
        "architecture": "DFlash2DraftModel",
        "num_parameters": sum(array.size for array in dflash_values(spec).values()),
        "num_layers": 2,
        "block_size": 6,
        "target_layers": [2, 6, 10],
    }
    assert shown["memory_plan"]["capacity"]["max_draft_tokens"] == 5
    lines = ninfer(*arguments).stdout.splitlines()
    assert any(
        line.split() == ["draft", "model", f"{folder}:", "DFlash2DraftModel"] for line in lines
    )
    assert any("up to 5 tokens of a sequence at once" in line for line in lines)


def test_without_a_draft_model_none_is_shown() -> None:
    for arguments, drafts in ((("info",), 0), (("info", "--spec", "ngram"), 7)):
        shown = json.loads(ninfer(*arguments, "--json").stdout)
        assert shown["draft_model"] is None
        assert shown["memory_plan"]["capacity"]["max_draft_tokens"] == drafts


def test_a_draft_model_that_is_not_there_leaves_no_plan() -> None:
    done = ninfer("info", "--json", "--spec", "dflash", "--draft-model", "nowhere")
    shown = json.loads(done.stdout)
    assert shown["memory_plan"] is None
    assert shown["memory_plan_error"] == "--draft-model: nowhere: No such file or directory"
