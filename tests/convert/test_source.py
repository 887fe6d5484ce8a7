from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from tests.helpers.model_paths import DEMO_MODEL, copy_golden, golden_model


def refused(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    return caught.value


def test_directories_and_artifacts_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    write_artifact(open_model(golden_model("qwen3-dense")), tmp_path / "any.name")
    assert open_model(tmp_path / "any.name").kind == "ninfer"
    assert open_model(golden_model("qwen3-dense")).kind == "safetensors"


@pytest.mark.parametrize("name", ["nowhere", "Qwen/Qwen3-0.6B", "a" * 5000, "a\0b"])
def test_a_path_that_does_not_exist_is_named(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path / name).path == tmp_path / name


def test_a_directory_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    assert "it has no config.json" in str(refused(tmp_path))
    shutil.copy(golden_model("qwen3-dense") / "model.safetensors", tmp_path)
    assert "it has no config.json" in str(refused(tmp_path))


def test_a_directory_with_a_configuration_only_is_no_model(tmp_path: Path) -> None:
    shutil.copy(golden_model("qwen3-dense") / "config.json", tmp_path)
    assert "no safetensors weights" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"GGUF\3\0\0\0", "GGUF files are not supported"),
        (b"PK\3\4" + bytes(40), "not a safetensors file"),
        (b'{"architectures": ["Qwen3ForCausalLM"]}', "not a safetensors file"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.ninfer"
    path.write_bytes(content)
    error = refused(path)
    assert error.path == path
    assert message in str(error)


def test_a_weights_file_alone_is_no_model() -> None:
    assert "name its directory instead" in str(refused(DEMO_MODEL / "model.safetensors"))


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a directory nor a regular file" in str(refused(tmp_path / "pipe"))
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    for name in ("tokenizer.json", "generation_config.json", "config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        error = refused(folder)
        assert error.path == folder / name
        assert "not a regular file" in str(error)
        (folder / name).unlink()
        if (golden_model("qwen3-dense") / name).exists():
            shutil.copy(golden_model("qwen3-dense") / name, folder)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    (folder / "tokenizer.json").mkdir()
    assert refused(folder).path == folder / "tokenizer.json"


def test_files_may_be_links(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for path in golden_model("qwen3-dense").iterdir():
        (folder / path.name).symlink_to(path)
    assert open_model(folder).config == open_model(golden_model("qwen3-dense")).config
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "model.safetensors: a link that leads nowhere" in str(refused(folder))
