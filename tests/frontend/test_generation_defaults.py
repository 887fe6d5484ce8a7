"""generation_config read once, strictly."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.frontend.generation_defaults import GenerationDefaults, read_generation_config


def test_values_are_taken_over() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "eos_token_id": [5, 6],
        "transformers_version": "5",
        "max_new_tokens": "odd but not ours",
    }
    assert read_generation_config(config) == GenerationDefaults(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.05,
        eos_token_ids=(5, 6),
    )


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({}, None),
        ({"temperature": 0.3}, 0.3),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": False}, 0.0),
    ],
)
def test_temperature_follows_do_sample(config: dict[str, Any], temperature: float | None) -> None:
    assert read_generation_config(config).temperature == temperature


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.7"),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_p", True),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", []),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
        ("eos_token_id", "x"),
        ("eos_token_id", [1, -2]),
        ("eos_token_id", True),
    ],
)
def test_bad_value_names_file_and_key(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config\.json: {key}: "):
        read_generation_config({key: value})


def test_single_eos_id_is_a_list_of_one() -> None:
    assert read_generation_config({"eos_token_id": 7}).eos_token_ids == (7,)
