from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import ModelFileError
from ninfer.convert.opened_model import COMPONENTS, OpenedModel
from ninfer.convert.source import open_model
from tests.helpers.checkpoints import (
    CheckpointSpec,
    Family,
    RawTensor,
    checkpoint_values,
    edit_json,
    encode,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from tests.helpers.model_paths import GOLDEN_CASES, copy_golden, golden_model

Tensors = dict[str, RawTensor]
ALL_FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_moe")


def objects_of(model: OpenedModel) -> dict[str, Float32Array]:
    return {
        item.name: values
        for component in COMPONENTS
        for item, values in model.read_float32(component)
    }


def opened(folder: Path, spec: CheckpointSpec) -> dict[str, Float32Array]:
    return objects_of(open_model(write_checkpoint(folder, spec)))


def edited(folder: Path, case: str, edit: Callable[[Tensors], object]) -> Path:
    """A golden checkpoint of one file with its tensors changed."""
    copy_golden(case, folder)
    tensors = read_tensors(folder / "model.safetensors")
    edit(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def refused(folder: Path) -> ModelFileError:
    """The error of opening, or else of reading."""
    with pytest.raises(ModelFileError) as caught:
        objects_of(open_model(folder))
    return caught.value


def all_sorted(arrays: dict[str, Float32Array]) -> Float32Array:
    return np.sort(np.concatenate([array.reshape(-1) for array in arrays.values()]))


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_tied": True, "num_shards": 3},
        {"is_wrapper": True, "has_vision": True, "f32_vectors": True},
        {"per_expert": True, "dense_layers": (1, 2), "dtype": "F32", "num_shards": 5},
        {"dtype": "F16", "num_heads": 6, "num_kv_heads": 3, "head_dim": 24, "hidden_size": 40},
        {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "vocab_size": 7},
    ],
)
def test_every_stored_value_is_in_exactly_one_object(
    tmp_path: Path, family: Family, changes: dict[str, Any]
) -> None:
    spec = replace(CheckpointSpec(family=family), **changes)
    if spec.is_hybrid:
        spec = replace(spec, num_mtp_layers=1)
    found = opened(tmp_path / "m", spec)
    assert np.array_equal(all_sorted(found), all_sorted(checkpoint_values(spec)))


def test_projections_of_one_input_are_stacked_in_order(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3_5", is_wrapper=True)
    values, found = checkpoint_values(spec), opened(tmp_path / "m", spec)
    prefix = "model.language_model.layers."
    attention = [values[f"{prefix}3.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert np.array_equal(found["layers.3.attn.qkv_proj"], np.concatenate(attention))
    gdn = [
        values[f"{prefix}1.linear_attn.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")
    ]
    assert np.array_equal(found["layers.1.gdn.in_proj"], np.concatenate(gdn))
    mlp = [values[f"{prefix}2.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert np.array_equal(found["layers.2.mlp.gate_up"], np.concatenate(mlp))
    conv = values[f"{prefix}0.linear_attn.conv1d.weight"]
    assert np.array_equal(found["layers.0.gdn.conv"], conv[:, 0, :])
    for ours, theirs in (
        ("input_norm", "input_layernorm"),
        ("post_norm", "post_attention_layernorm"),
    ):
        assert np.array_equal(found[f"layers.0.{ours}"], values[f"{prefix}0.{theirs}.weight"])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_in_one_tensor_or_in_many_give_the_same_objects(
    tmp_path: Path, family: Family
) -> None:
    spec = CheckpointSpec(family=family, num_mtp_layers=1 if family == "qwen3_5_moe" else 0)
    folder = write_checkpoint(tmp_path / "stacked", spec)
    expected = objects_of(open_model(folder))
    split = Path(shutil.copytree(folder, tmp_path / "split"))
    tensors = split_experts(read_tensors(folder / "model.safetensors"))
    assert any(name.startswith("model.layers.0.mlp.experts.3.up_proj") for name in tensors)
    write_safetensors(split / "model.safetensors", tensors)
    found = objects_of(open_model(split))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def split_experts(tensors: Tensors) -> Tensors:
    split: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            split[name] = tensor
            continue
        codes = np.frombuffer(tensor.data, "<u2").reshape(tensor.shape)
        for index, matrix in enumerate(codes):
            halves = {"down": matrix}
            if leaf == "gate_up_proj":
                half = len(matrix) // 2
                halves = {"gate": matrix[:half], "up": matrix[half:]}
            for part, rows in halves.items():
                raw = RawTensor(tensor.dtype, rows.shape, rows.tobytes())
                split[f"{stem}.{index}.{part}_proj.weight"] = raw
    return split


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_text_classes_load_wrapper_files_and_wrappers_load_text_files(
    tmp_path: Path, family: Family
) -> None:
    flat = write_checkpoint(tmp_path / "flat", CheckpointSpec(family=family))
    nested = write_checkpoint(tmp_path / "nested", CheckpointSpec(family=family, is_wrapper=True))
    expected = objects_of(open_model(flat))
    crossed = Path(shutil.copytree(flat, tmp_path / "crossed"))
    shutil.copy(nested / "model.safetensors", crossed / "model.safetensors")
    other = Path(shutil.copytree(nested, tmp_path / "other"))
    shutil.copy(flat / "model.safetensors", other / "model.safetensors")
    for folder in (nested, crossed, other):
        found = objects_of(open_model(folder))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_objects_come_in_order_of_use_then_mtp_then_vision(tmp_path: Path) -> None:
    spec = CheckpointSpec(is_wrapper=True, num_mtp_layers=1, has_vision=True)
    model = open_model(write_checkpoint(tmp_path / "m", spec))
    components = [item.component for item in model.objects]
    assert components == sorted(components, key=COMPONENTS.index)
    assert set(components) == set(COMPONENTS)
    names = [item.name for item in model.objects]
    assert names[0] == "embed_tokens"
    assert names.index("visual.blocks.2.norm1.weight") < names.index(
        "visual.blocks.10.norm1.weight"
    )
    for component in COMPONENTS:
        read = [item for item, _ in model.read_float32(component)]
        assert read == [item for item in model.objects if item.component == component]


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_golden_checkpoint_is_opened(case: str) -> None:
    model = open_model(golden_model(case))
    assert (model.kind, model.name) == ("safetensors", "model")
    assert model.hf_config == json.loads((golden_model(case) / "config.json").read_bytes())
    for item in model.objects:
        assert item.shape[0] == sum(part.shape[0] for part in item.parts)
    for name, values in objects_of(model).items():
        assert values.dtype == np.float32
        assert np.isfinite(values).all(), name


def test_the_draft_module_is_optional_even_where_the_configuration_has_it(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    model = open_model(edited(tmp_path / "m", "qwen3_5-dense", drop))
    assert model.config.num_mtp_layers == 0
    assert list(model.read_float32("mtp")) == []


def test_draft_tensors_the_configuration_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = copy_golden("qwen3_5-dense", tmp_path / "m")
    edit_json(folder / "config.json", mtp_num_hidden_layers=0)
    model = open_model(folder)
    assert {item.component for item in model.objects} == {"text"}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3_5-dense", "model.layers.0.linear_attn.A_log"),
        ("qwen3_5-dense", "mtp.fc.weight"),
        ("qwen3_5-dense", "lm_head.weight"),
        ("qwen3_5-vl", "model.language_model.layers.3.self_attn.k_norm.weight"),
        ("qwen3_5-moe", "model.layers.1.mlp.experts.down_proj"),
        ("qwen3_5-moe", "model.layers.1.mlp.shared_expert_gate.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, case: str, name: str) -> None:
    error = refused(edited(tmp_path / "m", case, lambda tensors: tensors.pop(name)))
    assert (error.path, error.field) == (tmp_path / "m" / "model.safetensors", name)
    assert "missing tensor" in str(error)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3_moe", per_expert=True)
    folder = write_checkpoint(tmp_path / "m", spec)
    tensors = read_tensors(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[name]
    write_safetensors(folder / "model.safetensors", tensors)
    assert refused(folder).field == name


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.4.input_layernorm.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "something.else",
        "mtp.layers.1.input_layernorm.weight",
    ],
)
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    extra = RawTensor("BF16", (2,), bytes(4))
    error = refused(
        edited(tmp_path / "m", "qwen3_5-moe", lambda tensors: tensors.update({name: extra}))
    )
    assert (error.path, error.field) == (tmp_path / "m" / "model.safetensors", name)
    assert "unexpected tensor" in str(error)


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    extra = {
        "model.rotary_emb.inv_freq": RawTensor("F32", (2,), bytes(8)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": RawTensor("F32", (2,), bytes(8)),
    }
    folder = edited(tmp_path / "m", "qwen3-dense", lambda tensors: tensors.update(extra))
    expected = objects_of(open_model(golden_model("qwen3-dense")))
    assert objects_of(open_model(folder)).keys() == expected.keys()


@pytest.mark.parametrize(
    ("case", "name", "shape"),
    [
        ("qwen3_5-dense", "model.layers.0.linear_attn.conv1d.weight", (320, 4)),
        ("qwen3_5-dense", "model.embed_tokens.weight", (96, 512)),
        ("qwen3_5-moe", "model.layers.0.mlp.experts.gate_up_proj", (8, 32, 128)),
        ("qwen3_5-dense", "mtp.fc.weight", (192, 96)),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(
    tmp_path: Path, case: str, name: str, shape: tuple[int, ...]
) -> None:
    def reshape(tensors: Tensors) -> None:
        tensors[name] = replace(tensors[name], shape=shape)

    error = refused(edited(tmp_path / "m", case, reshape))
    right = list(read_tensors(golden_model(case) / "model.safetensors")[name].shape)
    assert error.field == name
    assert str(error).endswith(f"shape {list(shape)}, the configuration says {right}")


def test_a_configuration_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    edit_json(folder / "config.json", num_key_value_heads=4)
    assert refused(folder).field == "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "F64", "U8"])
def test_a_dtype_we_do_not_read_is_named(tmp_path: Path, dtype: str) -> None:
    name = "model.norm.weight"
    width = {"F8_E4M3": 1, "U8": 1, "I32": 4, "F64": 8}[dtype]

    def recode(tensors: Tensors) -> None:
        tensors[name] = RawTensor(dtype, (96,), bytes(96 * width))

    error = refused(edited(tmp_path / "m", "qwen3_5-dense", recode))
    assert error.field == name
    assert f"dtype {dtype} is not supported" in str(error)


@pytest.mark.parametrize(
    ("suffix", "scheme"),
    [
        ("weight_scale_inv", "block FP8"),
        ("weight_scale_2", "ModelOpt NVFP4"),
        ("weight_packed", "compressed-tensors"),
        ("qweight", "GPTQ or AWQ"),
    ],
)
def test_quantised_tensors_without_a_configuration_are_refused_by_the_name_of_their_scheme(
    tmp_path: Path, suffix: str, scheme: str
) -> None:
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    extra = RawTensor("F32", (1,), bytes(4))
    error = refused(
        edited(tmp_path / "m", "qwen3-dense", lambda tensors: tensors.update({name: extra}))
    )
    assert error.field == name
    assert f"unexpected tensor of {scheme}" in str(error)
    assert "no quantization_config" in str(error)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named_when_it_is_read(
    tmp_path: Path, dtype: str, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    values = np.zeros((160, 96), np.float32)
    values[-1, -1] = value

    def spoil(tensors: Tensors) -> None:
        tensors[name] = encode(values, dtype) if dtype != "BF16" else _upper_half(values)

    folder = edited(tmp_path / "m", "qwen3-dense", spoil)
    model = open_model(folder)
    with pytest.raises(ModelFileError, match="NaN or infinite") as caught:
        objects_of(model)
    assert (caught.value.path, caught.value.field) == (folder / "model.safetensors", name)


def _upper_half(values: Float32Array) -> RawTensor:
    codes = (values.view(np.uint32) >> 16).astype("<u2")
    return RawTensor("BF16", values.shape, codes.tobytes())


def test_a_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    case, embedding = "qwen3_5-dense-tied-realheads", "model.embed_tokens.weight"
    same = edited(
        tmp_path / "same",
        case,
        lambda tensors: tensors.update({"lm_head.weight": tensors[embedding]}),
    )
    assert "lm_head" not in objects_of(open_model(same))

    def change(tensors: Tensors) -> None:
        data = bytearray(tensors[embedding].data)
        data[-1] ^= 0x80
        tensors["lm_head.weight"] = replace(tensors[embedding], data=bytes(data))

    error = refused(edited(tmp_path / "other", case, change))
    assert error.field == "lm_head.weight"
    assert "tie_word_embeddings" in str(error)


def test_a_scalar_in_the_vision_tower_is_refused(tmp_path: Path) -> None:
    name = "model.visual.scale"
    extra = RawTensor("F32", (), bytes(4))
    error = refused(
        edited(tmp_path / "m", "qwen3_5-vl", lambda tensors: tensors.update({name: extra}))
    )
    assert error.field == name


def test_the_name_is_the_directory_also_when_it_is_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "Tiny Model")
    monkeypatch.chdir(folder)
    assert open_model(Path()).name == "Tiny Model"


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_damage_to_any_file_is_a_typed_error_or_a_load(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "m"
    shutil.rmtree(folder, ignore_errors=True)
    copy_golden(data.draw(st.sampled_from(["qwen3-moe", "qwen3_5-vl"])), folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    # The headers and the small files are where damage has the most ways to matter.
    length = min(len(content), 6000)
    if data.draw(st.booleans(), "truncate"):
        del content[data.draw(st.integers(0, length)) :]
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        if content:
            position = data.draw(st.integers(0, min(len(content), length) - 1))
            content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = objects_of(open_model(folder))
    except ModelFileError as error:
        where = error.path
    else:
        where = folder if all(np.isfinite(values).all() for values in found.values()) else Path()
    assert folder in (where, where.parent)
