from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.convert.shards import open_checkpoint
from ninfer.convert.source import open_model
from tests.helpers.checkpoints import (
    CheckpointSpec,
    RawTensor,
    ShardStyle,
    read_tensors,
    write_checkpoint,
    write_json,
    write_safetensors,
    write_shards,
)

TENSORS = {name: RawTensor("U8", (2,), name.encode() * 2) for name in "abcde"}


def sharded(folder: Path) -> Path:
    """Five tensors in two shards."""
    folder.mkdir()
    write_shards(folder, TENSORS, 2)
    return folder


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-0000{number}-of-00002.safetensors"


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {key: value for key, value in index["weight_map"].items() if value != ""}
    write_json(path, index)


def refused(folder: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(folder)
    return caught.value


def bytes_of(folder: Path) -> dict[str, bytes]:
    tensors = open_checkpoint(folder).tensors
    return {name: bytes(file.view(entry)) for name, (file, entry) in tensors.items()}


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("style", ["model-00001-of-00002", "model.safetensors-00001-of-00002"])
def test_tensors_are_found_through_the_index(
    tmp_path: Path, num_shards: int, style: ShardStyle
) -> None:
    write_shards(tmp_path, TENSORS, num_shards, style)
    assert bytes_of(tmp_path) == {name: tensor.data for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("style", ["model-00001-of-00002", "model.safetensors-00001-of-00002"])
def test_a_model_is_the_same_in_one_file_and_in_shards(tmp_path: Path, style: ShardStyle) -> None:
    whole, parts = CheckpointSpec(), CheckpointSpec(num_shards=7, shard_style=style)
    expected = open_model(write_checkpoint(tmp_path / "whole", whole))
    found = open_model(write_checkpoint(tmp_path / "parts", parts))
    for (item, values), (other, others) in zip(
        expected.read_float32(), found.read_float32(), strict=True
    ):
        assert item == other
        assert np.array_equal(values, others)


def test_the_index_wins_over_other_files(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    write_safetensors(folder / "model.safetensors", {"z": TENSORS["a"]})
    write_safetensors(folder / "stray.safetensors", {"y": TENSORS["a"]})
    assert set(bytes_of(folder)) == set(TENSORS)


def test_one_file_of_any_name_is_enough(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", TENSORS)
    assert set(bytes_of(tmp_path)) == set(TENSORS)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", TENSORS)
    assert "2 safetensors files but no model.safetensors.index.json" in str(refused(tmp_path))
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    assert set(bytes_of(tmp_path)) == set(TENSORS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "files like pytorch_model.bin are not supported"),
        ("m.gguf", "files like m.gguf are not supported"),
        ("README.md", "no safetensors weights in this directory"),
    ],
)
def test_a_directory_without_safetensors_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).touch()
    error = refused(tmp_path)
    assert error.path == tmp_path
    assert message in str(error)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    shard(folder, 2).unlink()
    error = refused(folder)
    assert error.path.name == "model.safetensors.index.json"
    assert error.field in {"weight_map.b", "weight_map.d"}
    assert "shard model-00002-of-00002.safetensors is missing" in str(error)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    shard(folder, 2).write_bytes(shard(folder, 2).read_bytes()[:-1])
    error = refused(folder)
    assert error.path == shard(folder, 2)
    assert "truncated" in str(error)


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    tensors = {**read_tensors(shard(folder, 2)), "a": TENSORS["a"]}
    write_safetensors(shard(folder, 2), tensors)
    error = refused(folder)
    assert error.field == "a"
    assert {"model-00001-of-00002", "model-00002-of-00002"} <= set(
        str(error).replace(".safetensors", " ").replace("/", " ").split()
    )


def test_a_tensor_the_index_lacks_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    edit_index(folder, c="")
    error = refused(folder)
    assert (error.path, error.field) == (shard(folder, 1), "c")
    assert "not in model.safetensors.index.json" in str(error)


def test_a_tensor_the_shard_lacks_is_named(tmp_path: Path) -> None:
    for name, place in (("x", shard(tmp_path, 1).name), ("a", shard(tmp_path, 2).name)):
        folder = sharded(tmp_path / name)
        edit_index(folder, **{name: place})
        error = refused(folder)
        assert error.field == f"weight_map.{name}"
        assert f"not in {place}" in str(error)


@pytest.mark.parametrize(
    "name", ["../m/x.safetensors", "/x.safetensors", "a/b", "..", ".", "a\0b", "a" * 300]
)
def test_a_shard_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "m")
    write_safetensors(folder / "x.safetensors", {"x": TENSORS["a"]})
    edit_index(folder, x=name)
    assert refused(folder).field == "weight_map.x"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", None),
        ("[]", None),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map.a"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str, field: str | None) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    error = refused(tmp_path)
    assert (error.path, error.field) == (path, field)
