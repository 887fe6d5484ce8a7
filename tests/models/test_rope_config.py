from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import ModelConfig, RopeConfig
from ninfer.models.config import parse_config
from tests.helpers.checkpoints import CheckpointSpec, Family, hf_config

PATH = Path("config.json")
ROPE_KEYS = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"))


def parsed(family: Family, **rope: Any) -> ModelConfig:
    """A configuration whose rope keys are exactly `rope`."""
    spec = CheckpointSpec(family=family, head_dim=32, overrides={**ROPE_KEYS, **rope})
    return parse_config(hf_config(spec), PATH)


def rope_of(family: Family, **rope: Any) -> RopeConfig:
    return parsed(family, **rope).attention.rope


def refused(family: Family, field: str, **rope: Any) -> str:
    with pytest.raises(ModelFileError) as caught:
        parsed(family, **rope)
    assert caught.value.field == field
    return caught.value.message.removeprefix(f"{PATH}: {field}: ")


def test_the_three_spellings_mean_the_same() -> None:
    block = {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_type": "default"}
    expected = RopeConfig(5e6, 32, (6, 5, 5))
    assert rope_of("qwen3_vl", rope_theta=5000000, rope_scaling=block) == expected
    assert rope_of("qwen3_vl", rope_parameters={"rope_theta": 5e6, **block}) == expected
    assert rope_of("qwen3", rope_theta=1000000, rope_scaling=None) == RopeConfig(1e6, 32)


@pytest.mark.parametrize(
    ("family", "rope", "expected"),
    [
        ("qwen3", {}, RopeConfig(1e4, 32)),
        ("qwen3_vl", {}, RopeConfig(5e5, 32, (24, 20, 20))),
        ("qwen3_5", {}, RopeConfig(1e7, 8, (11, 11, 10))),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default"}},
            RopeConfig(1e4, 8, (11, 11, 10)),
        ),
        ("qwen3_5", {"rope_theta": 2e4}, RopeConfig(2e4, 8, (11, 11, 10))),
        ("qwen3_5", {"partial_rotary_factor": 0.5}, RopeConfig(1e7, 16, (11, 11, 10))),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_theta": 3, "partial_rotary_factor": 1}},
            RopeConfig(3.0, 32, (11, 11, 10)),
        ),
    ],
)
def test_missing_keys_take_the_defaults_of_the_family(
    family: Family, rope: dict[str, Any], expected: RopeConfig
) -> None:
    assert rope_of(family, **rope) == expected


def test_the_old_name_of_multi_axis_rope_is_plain_rope() -> None:
    block = {"type": "mrope", "mrope_section": [6, 5, 5]}
    assert rope_of("qwen3_vl", rope_scaling=block) == RopeConfig(5e5, 32, (6, 5, 5))
    assert "'mrope'" in refused("qwen3", "rope_scaling.type", rope_scaling={"type": "mrope"})


def test_linear_scaling_stretches_the_context() -> None:
    config = parsed("qwen3", rope_scaling={"rope_type": "linear", "factor": 4})
    expected = RopeConfig(1e4, 32, None, "linear", 4.0, original_max_position=4096)
    assert config.attention.rope == expected
    assert config.max_position_embeddings == 4 * 4096


def test_yarn_is_read_with_all_its_settings() -> None:
    block = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.5,
    }
    config = parsed("qwen3", rope_scaling=block)
    assert config.attention.rope == RopeConfig(1e4, 32, None, "yarn", 4.0, 1024, 16.0, 2.0, 1.5)
    assert config.max_position_embeddings == 4096
    longer = parsed("qwen3", rope_scaling={**block, "factor": 6.0})
    assert longer.max_position_embeddings == 6144


def test_yarn_without_settings_takes_the_usual_ones() -> None:
    rope = rope_of("qwen3", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert rope == RopeConfig(1e4, 32, None, "yarn", 2.0, 4096, 32.0, 1.0, None)


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts() -> None:
    block = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert rope_of("qwen3", rope_scaling=block).factor == 4.0
    message = refused("qwen3", "rope_scaling.factor", rope_scaling={"rope_type": "yarn"})
    assert message == "missing"


@pytest.mark.parametrize("in_block", [None, 64])
def test_the_original_context_beside_the_block_wins(in_block: int | None) -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": in_block}
    rope = rope_of("qwen3", rope_scaling=block, original_max_position_embeddings=128)
    assert rope.original_max_position == 128


def test_yarn_needs_frequencies_that_fall() -> None:
    block = {"rope_type": "yarn", "factor": 4.0}
    message = refused("qwen3", "rope_theta", rope_scaling=block, rope_theta=1.0)
    assert message == "1: yarn needs more than 1"


def test_both_mscales_give_the_attention_factor() -> None:
    block = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    found = rope_of("qwen3", rope_scaling=block).attention_factor
    log = math.log(8.0)
    assert found == pytest.approx((0.1 * log + 1) / (0.05 * log + 1))


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"rope_type": "longrope"}, "rope_type"),
        ({"rope_type": 3}, "rope_type"),
        ({"type": "dynamic"}, "type"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"mrope_section": [1, 2]}, "mrope_section"),
        ({"mrope_section": [1, 2, -3]}, "mrope_section"),
        ({"mrope_section": 3}, "mrope_section"),
        ({"mrope_section": [1, 2, 1], "mrope_interleaved": False}, "mrope_interleaved"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 0}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 8}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 0.5}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": -1}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 2, "truncate": False}, "truncate"),
        ({"full_attention": {"rope_theta": 1e4}}, "full_attention"),
    ],
)
def test_bad_settings_are_refused_by_key(block: dict[str, Any], key: str) -> None:
    refused("qwen3_5", f"rope_parameters.{key}", rope_parameters=block)


def test_an_odd_number_of_rotary_dimensions_is_refused() -> None:
    spec = CheckpointSpec(family="qwen3", head_dim=15)
    with pytest.raises(ModelFileError, match="gives 15 rotary dimensions"):
        parse_config(hf_config(spec), PATH)


def test_a_partial_rotation_of_a_plain_family_is_refused() -> None:
    refused("qwen3", "partial_rotary_factor", partial_rotary_factor=0.5)


def test_two_blocks_that_disagree_are_refused() -> None:
    block = {"rope_type": "yarn", "factor": 2.0}
    same = rope_of("qwen3", rope_parameters=block, rope_scaling=dict(block))
    assert same.rope_type == "yarn"
    message = refused(
        "qwen3", "rope_scaling", rope_parameters={"rope_theta": 1e4}, rope_scaling=block
    )
    assert message == "contradicts rope_parameters"
