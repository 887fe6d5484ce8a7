from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pytest

from ninfer.contract.errors import InvariantError, ModelFileError
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from ninfer.ops.float_codecs import bf16_to_float
from tests.helpers.checkpoints import (
    CheckpointSpec,
    Family,
    RawTensor,
    checkpoint_values,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from tests.helpers.model_paths import DEMO_MODEL, golden_model

Dtype: TypeAlias = Literal["BF16", "F16", "F32"]


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


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("has_f32_vectors", [False, True])
@pytest.mark.parametrize("per_expert", [False, True])
def test_what_is_stored_in_bf16_can_be_had_as_codes(
    tmp_path: Path, family: Family, dtype: Dtype, has_f32_vectors: bool, per_expert: bool
) -> None:
    spec = CheckpointSpec(
        family=family, dtype=dtype, f32_vectors=has_f32_vectors, per_expert=per_expert
    )
    model = open_model(write_checkpoint(tmp_path / "m", spec))
    numbers = {item.name: array for item, array in model.read_float32()}
    num_coded = 0
    for item, (band,) in model.read_bands(()):
        is_coded = band.codes.dtype == np.uint16
        num_coded += is_coded
        values = bf16_to_float(band.codes) if is_coded else band.codes
        assert np.array_equal(values, numbers.pop(item.name))
    assert not numbers
    assert (num_coded > 0) == (dtype == "BF16")


def test_a_bf16_code_that_is_no_number_is_found(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", CheckpointSpec())
    tensors = read_tensors(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = np.frombuffer(tensors[name].data, "<u2").copy()
    codes[-1] = 0x7F80
    tensors[name] = RawTensor("BF16", tensors[name].shape, codes.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match="NaN or infinite") as caught:
        list(open_model(folder).read_bands(()))
    assert caught.value.field == name


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
