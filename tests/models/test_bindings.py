from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ninfer.artifact.bindings import ActivationPrecision
from ninfer.contract.model import ModelConfig
from ninfer.models.bindings import bindings_of, uses_of
from ninfer.models.config import parse_config
from ninfer.models.parameters import model_objects
from tests.helpers.checkpoints import CheckpointSpec, Family, hf_config


def spec_config(family: Family, *, is_tied: bool, num_mtp_layers: int = 0) -> ModelConfig:
    spec = CheckpointSpec(family=family, is_tied=is_tied, num_mtp_layers=num_mtp_layers)
    return parse_config(hf_config(spec), Path("config.json"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_bindings_tile_every_object_without_gaps(family: Family) -> None:
    config = spec_config(family, is_tied=False)
    objects = model_objects(config)
    rows = {item.name: np.zeros(item.shape[0], int) for item in objects}
    for binding in bindings_of(config, objects):
        rows[binding.object_name][binding.rows] += 1
    assert all((counts == 1).all() for counts in rows.values())


def test_a_fused_parent_binds_its_parts_in_order() -> None:
    config = spec_config("qwen3_5", is_tied=False)
    found = {binding.parameter: binding for binding in bindings_of(config, model_objects(config))}
    parts = [found[f"layers.0.gdn.{name}"] for name in ("in_qkv", "in_z", "in_b", "in_a")]
    assert {part.object_name for part in parts} == {"layers.0.gdn.in_proj"}
    assert [(part.start, part.stop) for part in parts] == [(0, 64), (64, 96), (96, 100), (100, 104)]


def test_a_tied_head_is_a_second_view_and_a_second_use_of_the_embedding() -> None:
    config = spec_config("qwen3", is_tied=True)
    objects = model_objects(config)
    head = next(item for item in bindings_of(config, objects) if item.parameter == "lm_head")
    assert (head.object_name, head.start, head.stop) == ("embed_tokens", 0, config.vocab_size)
    consumers = {
        use.consumer for use in uses_of(config, objects) if use.object_name == "embed_tokens"
    }
    assert consumers == {"embed_tokens", "lm_head"}


def test_the_draft_module_uses_embedding_and_head_of_the_model() -> None:
    for is_tied, head in ((True, "embed_tokens"), (False, "lm_head")):
        config = spec_config("qwen3_5", is_tied=is_tied, num_mtp_layers=1)
        uses = {use.consumer: use.object_name for use in uses_of(config, model_objects(config))}
        assert uses["mtp.embed_tokens"] == "embed_tokens"
        assert uses["mtp.lm_head"] == head


def test_wide_weights_meet_wide_activations_only() -> None:
    config = spec_config("qwen3", is_tied=False)
    objects = model_objects(config)
    uses = uses_of(config, objects)
    assert {use.object_name for use in uses} == {item.name for item in objects}
    assert {use.activations for use in uses} == {(ActivationPrecision.A16,)}
