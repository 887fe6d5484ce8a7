from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from ninfer.contract.errors import InvariantError, ModelFileError, OptionError, OutputError
from ninfer.contract.model import ModelSource
from ninfer.convert.opened_model import COMPONENTS, OpenedModel
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from tests.helpers.checkpoints import (
    CheckpointSpec,
    Family,
    edit_json,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from tests.helpers.model_paths import DEMO_MODEL, all_models, copy_golden, golden_model


def converted(folder: Path, out: Path) -> tuple[OpenedModel, OpenedModel]:
    source = open_model(folder)
    write_artifact(source, out)
    return source, open_model(out)


def assert_same_model(source: ModelSource, artifact: ModelSource) -> None:
    """Equal in all a user of a model sees, and bit for bit in the weights."""
    assert artifact.config == source.config
    assert artifact.hf_config == source.hf_config
    assert replace(artifact.resources, folder=source.resources.folder) == source.resources
    assert artifact.objects == source.objects
    assert artifact.name == source.name
    for component in COMPONENTS:
        pairs = zip(source.read_float32(component), artifact.read_float32(component), strict=True)
        for (item, values), (other, others) in pairs:
            assert item == other
            assert np.array_equal(values.view(np.uint32), others.view(np.uint32)), item.name


@pytest.mark.parametrize("folder", all_models(), ids=lambda path: path.parent.name)
def test_an_artifact_is_the_same_model(tmp_path: Path, folder: Path) -> None:
    source, artifact = converted(folder, tmp_path / "x.ninfer")
    assert artifact.kind == "ninfer"
    assert artifact.path == tmp_path / "x.ninfer"
    assert_same_model(source, artifact)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    "changes",
    [
        {"is_tied": True, "num_shards": 4, "dtype": "F16"},
        {"per_expert": True, "f32_vectors": True, "dense_layers": (0,)},
        {"has_vision": True, "is_wrapper": True, "dtype": "F32"},
    ],
)
def test_other_shapes_and_layouts_survive_as_well(
    tmp_path: Path, family: Family, changes: dict[str, Any]
) -> None:
    spec = replace(CheckpointSpec(family=family, seed=3), **changes)
    if spec.is_hybrid:
        spec = replace(spec, num_mtp_layers=1)
    folder = write_checkpoint(tmp_path / "m", spec)
    assert_same_model(*converted(folder, tmp_path / "x.ninfer"))


def test_converting_an_artifact_again_changes_nothing(tmp_path: Path) -> None:
    _, artifact = converted(golden_model("qwen3_5-vl"), tmp_path / "a.ninfer")
    write_artifact(artifact, tmp_path / "b.ninfer")
    assert (tmp_path / "a.ninfer").read_bytes() == (tmp_path / "b.ninfer").read_bytes()
    assert_same_model(artifact, open_model(tmp_path / "b.ninfer"))


def test_objects_keep_their_format_and_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    _, artifact = converted(golden_model("qwen3_5-dense"), tmp_path / "x.ninfer")
    dtypes = {tensor.name: tensor.dtype for tensor in artifact.tensors}
    assert dtypes["layers.0.gdn.in_proj"] == "BF16"
    assert dtypes["layers.0.gdn.A_log"] == "F32"
    assert dtypes["layers.0.gdn.norm"] == "F32"
    _, tied = converted(DEMO_MODEL, tmp_path / "y.ninfer")
    assert "lm_head" not in {tensor.name for tensor in tied.tensors}
    assert [use.consumer for use in tied.uses if use.object_name == "embed_tokens"] == [
        "embed_tokens",
        "lm_head",
        "mtp.embed_tokens",
        "mtp.lm_head",
    ]


def test_parts_of_different_formats_are_stored_as_f32(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    tensors = read_tensors(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    values = np.random.default_rng(0).normal(size=tensors[name].shape).astype("<f4")
    tensors[name] = replace(tensors[name], dtype="F32", data=values.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    source, artifact = converted(folder, tmp_path / "x.ninfer")
    dtypes = {tensor.name: tensor.dtype for tensor in artifact.tensors}
    assert dtypes["layers.0.attn.qkv_proj"] == "F32"
    assert dtypes["layers.1.attn.qkv_proj"] == "BF16"
    assert_same_model(source, artifact)


def test_large_objects_are_written_in_pieces(tmp_path: Path) -> None:
    spec = CheckpointSpec(family="qwen3", vocab_size=20_000, hidden_size=128, num_layers=1)
    folder = write_checkpoint(tmp_path / "m", spec)
    seen: list[tuple[int, int]] = []
    source = open_model(folder)
    write_artifact(source, tmp_path / "x.ninfer", progress=lambda *item: seen.append(item))
    assert_same_model(source, open_model(tmp_path / "x.ninfer"))
    done = [item[0] for item in seen]
    total = seen[0][1]
    assert done == sorted(done)
    assert done[-1] == total
    assert {item[1] for item in seen} == {total}
    assert max(b - a for a, b in pairwise(done)) <= 1 << 21


def test_any_safetensors_reader_opens_an_artifact(tmp_path: Path) -> None:
    _, artifact = converted(DEMO_MODEL, tmp_path / "x.ninfer")
    with safetensors.safe_open(tmp_path / "x.ninfer", "np") as file:
        names = set(file.keys())
        assert {tensor.name for tensor in artifact.tensors} < names
        tokenizer = file.get_tensor("resources/tokenizer.json").tobytes()
        assert file.metadata()["format_version"] == "3"
    assert tokenizer == (DEMO_MODEL / "tokenizer.json").read_bytes()


def test_a_file_of_the_source_is_not_overwritten(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-moe", tmp_path / "m")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder / "config.json")
    for out in (*before, tmp_path / "link"):
        with pytest.raises(OptionError, match=f"--out: {out} is a file of the model"):
            write_artifact(open_model(folder), out)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_artifact_is_not_converted_onto_itself(tmp_path: Path) -> None:
    _, artifact = converted(golden_model("qwen3-dense"), tmp_path / "x.ninfer")
    (tmp_path / "y.ninfer").hardlink_to(tmp_path / "x.ninfer")
    for name in ("x.ninfer", "y.ninfer"):
        with pytest.raises(OptionError, match="is a file of the model"):
            write_artifact(artifact, tmp_path / name)


def test_an_older_artifact_is_replaced(tmp_path: Path) -> None:
    converted(golden_model("qwen3-dense"), tmp_path / "x.ninfer")
    _, artifact = converted(golden_model("qwen3_5-dense"), tmp_path / "x.ninfer")
    assert artifact.config.architecture == "Qwen3_5ForCausalLM"
    assert [path.name for path in tmp_path.iterdir()] == ["x.ninfer"]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    source = open_model(golden_model("qwen3-dense"))
    with pytest.raises(OutputError, match="there is no directory"):
        write_artifact(source, tmp_path / "no" / "x.ninfer")
    with pytest.raises(OutputError, match="is a directory"):
        write_artifact(source, tmp_path)
    with pytest.raises(OutputError, match="name too long"):
        write_artifact(source, tmp_path / ("a" * 300))


def spoiled(folder: Path) -> Path:
    """A checkpoint whose last tensor holds an infinity."""
    copy_golden("qwen3-dense", folder)
    tensors = read_tensors(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = replace(tensors[name], data=b"\x80\x7f" + tensors[name].data[2:])
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_bad_weights_are_not_converted_and_nothing_is_left_behind(tmp_path: Path) -> None:
    source = open_model(spoiled(tmp_path / "m"))
    (tmp_path / "x.ninfer").write_bytes(b"old")
    with pytest.raises(ModelFileError, match=r"model.norm.weight: a weight is NaN or infinite"):
        write_artifact(source, tmp_path / "x.ninfer")
    assert (tmp_path / "x.ninfer").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"m", "x.ninfer"}


def test_a_contradicting_head_is_not_converted(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ModelFileError, match="tie_word_embeddings"):
        write_artifact(open_model(folder), tmp_path / "x.ninfer")
    assert not (tmp_path / "x.ninfer").exists()


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_artifact(
            open_model(golden_model("qwen3-dense")), tmp_path / "x.ninfer", progress=interrupt
        )
    assert list(tmp_path.iterdir()) == []


def test_conversions_to_one_place_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    cases = ("qwen3-dense", "qwen3_5-moe", "qwen3-moe")
    threads = [
        threading.Thread(
            target=lambda case=case: write_artifact(open_model(golden_model(case)), tmp_path / "x")
        )
        for case in cases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert len(list(open_model(tmp_path / "x").read_float32())) > 0


def test_only_opened_models_can_be_converted(tmp_path: Path) -> None:
    other: Any = object()
    with pytest.raises(InvariantError, match="cannot convert"):
        write_artifact(other, tmp_path / "x.ninfer")
