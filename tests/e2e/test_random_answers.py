"""A model with random weights answers random schemas; see also bench.check_random_answers."""

from __future__ import annotations

from pathlib import Path

from bench.check_random_answers import tally, write_random_model
from tests.helpers.guided_rig import load_guided_model


async def test_what_a_random_model_answers_is_valid(tmp_path: Path) -> None:
    model = load_guided_model(write_random_model(tmp_path))
    found = await tally(model, range(32))
    assert found.wrong == []
    assert found.num_valid >= 29
