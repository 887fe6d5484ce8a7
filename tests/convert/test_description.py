from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.convert.description import describe_model
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from tests.helpers.checkpoints import CheckpointSpec, checkpoint_values, write_checkpoint
from tests.helpers.model_paths import DEMO_MODEL, all_models, golden_model
from tests.helpers.quantised_checkpoints import quantise_checkpoint


def test_the_demo_model_in_figures() -> None:
    found = describe_model(open_model(DEMO_MODEL))
    assert (found.name, found.kind) == ("demo_model", "safetensors")
    assert found.architecture == "Qwen3_5ForCausalLM"
    assert (found.num_layers, found.num_gdn_layers, found.num_attention_layers) == (12, 9, 3)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 2, 64)
    assert (found.gdn_heads, found.experts, found.num_moe_layers) == ((2, 4), None, 0)
    assert (found.vocab_size, found.hidden_size, found.max_context) == (4096, 384, 2048)
    assert (found.has_mtp, found.has_vision, found.is_tied) == (True, False, True)
    assert found.active_parameters == found.parameters["text"]
    assert found.num_parameters * 2 == sum(found.bytes_by_dtype.values())
    assert found.file_bytes == (DEMO_MODEL / "model.safetensors").stat().st_size
    assert found.resources == (
        "tokenizer",
        "tokenizer config",
        "chat template",
        "generation config",
    )


def test_experts_that_are_not_chosen_are_not_active(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3_5_moe", num_mtp_layers=1, num_experts=8)
    found = describe_model(open_model(write_checkpoint(tmp_path / "m", spec)))
    sizes = {name: values.size for name, values in checkpoint_values(spec).items()}
    text = {name: size for name, size in sizes.items() if not name.startswith("mtp.")}
    experts = sum(size for name, size in text.items() if ".experts." in name)
    assert found.experts == (2, 8)
    assert found.num_moe_layers == 4
    assert found.parameters == {
        "text": sum(text.values()),
        "mtp": sum(sizes.values()) - sum(text.values()),
    }
    assert found.active_parameters == sum(text.values()) - experts * 6 // 8


def test_bytes_are_counted_by_dtype_and_file() -> None:
    found = describe_model(open_model(golden_model("qwen3-moe")))
    assert found.num_files == 2
    assert found.bytes_by_dtype == {"BF16": 2 * found.num_parameters}
    mixed = describe_model(open_model(golden_model("qwen3_5-vl")))
    assert mixed.has_vision
    assert set(mixed.bytes_by_dtype) == {"BF16", "F32"}
    assert mixed.bytes_by_dtype["F32"] == 3 * (4 + 32) * 4


@pytest.mark.parametrize("folder", all_models(), ids=lambda path: path.parent.name)
def test_an_artifact_has_the_figures_of_its_source(tmp_path: Path, folder: Path) -> None:
    source = describe_model(open_model(folder))
    write_artifact(open_model(folder), tmp_path / "x.ninfer")
    artifact = describe_model(open_model(tmp_path / "x.ninfer"))
    assert artifact.parameters == source.parameters
    assert artifact.bytes_by_dtype == source.bytes_by_dtype
    assert artifact.resources == source.resources
    assert artifact.num_files == 1


def test_codes_are_counted_by_their_encoding(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3_5-moe"), tmp_path / "q", "modelopt-mixed")
    model = describe_model(open_model(folder))
    experts = 4 * 8 * (64 * 64 + 64 * 32)
    shared = 4 * 3 * 48 * 64
    assert model.encoded_parameters["nvfp4"] == experts + shared
    assert set(model.encoded_parameters) == {"fp8_row", "nvfp4"}
    assert model.unused_scales == (4 + 1) * 3 * (8 + 1), "the MTP layer has some too"
    plain = describe_model(open_model(golden_model("qwen3_5-moe")))
    assert (plain.encoded_parameters, plain.unused_scales) == ({}, 0)
