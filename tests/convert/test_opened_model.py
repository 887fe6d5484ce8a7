from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.errors import InvariantError
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from tests.helpers.checkpoints import CheckpointSpec, checkpoint_values, write_checkpoint
from tests.helpers.model_paths import DEMO_MODEL, golden_model


def test_reading_needs_little_more_than_the_object_itself(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3", vocab_size=64_000, hidden_size=128, num_layers=1)
    folder = write_checkpoint(tmp_path / "m", spec)
    write_artifact(open_model(folder), tmp_path / "x.ninfer")
    for path in (folder, tmp_path / "x.ninfer"):
        objects = open_model(path).read_float32()
        tracemalloc.start()
        item, values = next(objects)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert item.name == "embed_tokens"
        assert values.nbytes == 32_768_000
        assert peak_bytes - values.nbytes < 8_000_000


def test_objects_are_separate_writable_arrays() -> None:
    model = open_model(golden_model("qwen3-dense"))
    first, second = ({item.name: array for item, array in model.read_float32()} for _ in range(2))
    first["embed_tokens"][:] = 0.0
    assert np.any(second["embed_tokens"])
    assert all(values.flags.c_contiguous for values in second.values())


def test_bindings_give_every_parameter_as_a_view_of_its_object(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3_5", is_tied=True)
    model = open_model(write_checkpoint(tmp_path / "m", spec))
    values = checkpoint_values(spec)
    objects = {item.name: array for item, array in model.read_float32()}
    views = {
        binding.parameter: objects[binding.object_name][binding.rows] for binding in model.bindings
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = values[f"model.layers.3.self_attn.{name}.weight"]
        assert np.array_equal(views[f"layers.3.attn.{name}"], expected)
    assert np.array_equal(views["lm_head"], values["model.embed_tokens.weight"])


def test_a_component_that_does_not_exist_is_our_mistake() -> None:
    model = open_model(DEMO_MODEL)
    with pytest.raises(InvariantError, match="audio"):
        next(model.read_float32("audio"))
    assert list(model.read_float32("vision")) == []
