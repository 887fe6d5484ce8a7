"""system_fingerprint: another one for other outputs, the same for the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ninfer.cli.fingerprint import OUTPUT_OPTIONS, fingerprint_of
from ninfer.cli.loading import embedded_model_path
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions

NAMES = [item.name for item in dataclasses.fields(EngineOptions)]


def another(value: Any) -> Any:
    return value + 1 if isinstance(value, int | float) else 7 if value is None else value + "x"


@pytest.mark.parametrize("name", NAMES)
def test_only_options_that_change_outputs_count(name: str) -> None:
    source = open_model(embedded_model_path())
    options = EngineOptions()
    changed = dataclasses.replace(options, **{name: another(getattr(options, name))})
    is_same = fingerprint_of(source, changed) == fingerprint_of(source, options)
    assert is_same == (name not in OUTPUT_OPTIONS)


def test_the_context_cache_is_none_of_them() -> None:
    assert not [name for name in OUTPUT_OPTIONS if "cache" in name]
    assert set(OUTPUT_OPTIONS) <= set(NAMES)
