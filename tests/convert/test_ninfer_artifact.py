from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.artifact.checksum import Checksum
from ninfer.artifact.container import header_checksum
from ninfer.artifact.safetensors_file import TensorEntry
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import ModelFileError
from ninfer.convert.opened_model import COMPONENTS
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from tests.helpers.checkpoints import RawTensor, read_raw, read_tensors, write_raw
from tests.helpers.model_paths import DEMO_MODEL, golden_model

Metadata = dict[str, Any]
Edit = Callable[[Metadata, dict[str, RawTensor]], object]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = {}
    for case in ("qwen3_5-dense", "qwen3-dense", "qwen3_5-vl"):
        paths[case] = folder / f"{case}.ninfer"
        write_artifact(open_model(golden_model(case)), paths[case])
    return paths


def objects_of(path: Path) -> dict[str, Float32Array]:
    model = open_model(path)
    return {
        item.name: values
        for component in COMPONENTS
        for item, values in model.read_float32(component)
    }


def rewritten(source: Path, path: Path, edit: Edit) -> Path:
    """A copy with metadata and tensors changed, and all checksums made right again."""
    header, _ = read_raw(source)
    metadata, tensors = header["__metadata__"], read_tensors(source)
    documents = {
        key: json.loads(metadata[key]) for key in ("objects", "bindings", "uses", "resources")
    }
    opened = {**metadata, **documents}
    edit(opened, tensors)
    for name, record in opened["objects"].items():
        if name in tensors and record.get("checksum"):
            record["checksum"] = Checksum(tensors[name].data).text
    for key in documents:
        opened[key] = json.dumps(opened[key])
    entries, start = [], 0
    for name, tensor in tensors.items():
        stop = start + len(tensor.data)
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, start, stop))
        start = stop
    opened["header_checksum"] = header_checksum(opened, entries)
    table = {
        entry.name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
        for entry in entries
    }
    data = b"".join(tensor.data for tensor in tensors.values())
    write_raw(path, {"__metadata__": opened, **table}, data)
    return path


def refused(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        objects_of(path)
    assert caught.value.path == path
    return caught.value


def test_rewriting_without_a_change_still_opens(tmp_path: Path, artifacts: dict[str, Path]) -> None:
    source = artifacts["qwen3_5-dense"]
    copy = rewritten(source, tmp_path / "x", lambda metadata, tensors: None)
    expected, found = objects_of(source), objects_of(copy)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def drop_object(name: str) -> Edit:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        del metadata["objects"][name], tensors[name]

    return edit


def add_object(name: str, component: str, shape: tuple[int, ...] = (2,)) -> Edit:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        data = bytes(4 * int(np.prod(shape)))
        tensors[name] = RawTensor("F32", shape, data)
        metadata["objects"][name] = {"component": component, "checksum": "x"}

    return edit


def recode(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> Edit:
    return lambda metadata, tensors: tensors.update(
        {name: RawTensor(dtype, shape, bytes(num_bytes))}
    )


def set_component(name: str, component: str) -> Edit:
    return lambda metadata, tensors: metadata["objects"][name].update(component=component)


def set_config(**changes: Any) -> Edit:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        metadata["config"] = json.dumps({**json.loads(metadata["config"]), **changes})

    return edit


@pytest.mark.parametrize(
    ("edit", "field", "message"),
    [
        (drop_object("layers.0.gdn.in_proj"), "layers.0.gdn.in_proj", "missing object"),
        (drop_object("mtp.fc"), "mtp.fc", "missing object"),
        (add_object("layers.9.x", "text"), "layers.9.x", "unexpected object"),
        (add_object("other", "vision"), "other", "not an object of the vision component"),
        (add_object("visual.s", "vision", ()), "visual.s", "not an object of the vision"),
        (recode("norm", "F32", (95,), 380), "norm", "shape [95], the configuration says [96]"),
        (recode("norm", "U8", (96,), 96), "norm", "dtype U8 is not supported"),
        (set_component("norm", "mtp"), "norm", "component 'mtp', not 'text'"),
        (set_component("mtp.fc", "text"), "mtp.fc", "component 'text', not 'mtp'"),
        (set_config(hidden_size="x"), "hidden_size", "expected an integer"),
        (set_config(architectures=["A"]), "architectures", "'A' is not supported"),
        (set_config(vocab_size=513), "embed_tokens", "shape [512, 96]"),
        (
            lambda metadata, tensors: metadata.update(config="{"),
            "__metadata__.config",
            "not valid JSON",
        ),
        (
            lambda metadata, tensors: metadata["bindings"].pop("layers.0.gdn.in_z"),
            "__metadata__.bindings.layers.0.gdn.in_z",
            "not what the configuration asks for",
        ),
        (
            lambda metadata, tensors: metadata["bindings"]["norm"].update(rows=[0, 95]),
            "__metadata__.bindings.norm",
            "not what the configuration asks for",
        ),
        (
            lambda metadata, tensors: metadata["bindings"].update(
                x={"object": "y", "rows": [0, 1]}
            ),
            "__metadata__.bindings.x",
            "not what the configuration asks for",
        ),
        (
            lambda metadata, tensors: metadata["uses"].pop(0),
            "__metadata__.uses.embed_tokens",
            "not what the configuration asks for",
        ),
        (
            lambda metadata, tensors: metadata["uses"][0].update(activations=["A4"]),
            "__metadata__.uses.embed_tokens",
            "not what the configuration asks for",
        ),
    ],
)
def test_contents_that_are_not_the_model_are_refused_by_name(
    tmp_path: Path, artifacts: dict[str, Path], edit: Edit, field: str, message: str
) -> None:
    error = refused(rewritten(artifacts["qwen3_5-dense"], tmp_path / "x.ninfer", edit))
    assert error.field == field
    assert message in str(error)


def test_an_unknown_resource_is_refused(tmp_path: Path, artifacts: dict[str, Path]) -> None:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        metadata["resources"]["script.py"] = Checksum(b"x").text
        tensors["resources/script.py"] = RawTensor("U8", (1,), b"x")

    error = refused(rewritten(artifacts["qwen3-dense"], tmp_path / "x.ninfer", edit))
    assert error.field == "script.py"


def test_a_resource_with_bad_content_names_artifact_and_file(
    tmp_path: Path, artifacts: dict[str, Path]
) -> None:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        metadata["resources"]["generation_config.json"] = Checksum(b"[]").text
        tensors["resources/generation_config.json"] = RawTensor("U8", (2,), b"[]")

    path = rewritten(artifacts["qwen3-dense"], tmp_path / "x.ninfer", edit)
    with pytest.raises(ModelFileError, match=r"x.ninfer/generation_config.json: expected a JSON"):
        open_model(path)


def test_a_weight_that_is_no_number_is_named_even_with_a_right_checksum(
    tmp_path: Path, artifacts: dict[str, Path]
) -> None:
    def edit(metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        tensors["norm"] = RawTensor("BF16", (96,), b"\xc0\x7f" * 96)

    error = refused(rewritten(artifacts["qwen3-dense"], tmp_path / "x.ninfer", edit))
    assert error.field == "norm"
    assert "NaN or infinite" in str(error)


def test_a_damaged_object_is_named_when_it_is_read(
    tmp_path: Path, artifacts: dict[str, Path]
) -> None:
    path = Path(shutil.copy(artifacts["qwen3-dense"], tmp_path / "x.ninfer"))
    header, data = read_raw(path)
    start = header["layers.1.mlp.down_proj"]["data_offsets"][0]
    content = bytearray(path.read_bytes())
    content[len(content) - len(data) + start] ^= 1
    path.write_bytes(content)
    model = open_model(path)
    with pytest.raises(ModelFileError, match="checksum mismatch") as caught:
        list(model.read_float32())
    assert caught.value.field == "layers.1.mlp.down_proj"
    with pytest.raises(ModelFileError, match="checksum mismatch"):
        write_artifact(model, tmp_path / "y.ninfer")
    assert not (tmp_path / "y.ninfer").exists()


def test_an_artifact_cut_short_is_refused(tmp_path: Path, artifacts: dict[str, Path]) -> None:
    content = artifacts["qwen3-dense"].read_bytes()
    path = tmp_path / "x.ninfer"
    for length in (0, 7, 8, 4096, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path)


def test_opening_does_not_read_weights(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Damage to weights shows when they are read, and not before."""
    path = Path(shutil.copy(artifacts["qwen3_5-vl"], tmp_path / "x.ninfer"))
    header, data = read_raw(path)
    header.pop("__metadata__")
    content = bytearray(path.read_bytes())
    first = min(info["data_offsets"][0] for info in header.values() if info["dtype"] == "BF16")
    content[len(content) - len(data) + first] ^= 1
    path.write_bytes(content)
    assert open_model(path).config.vocab_size == 320


@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_flipped_byte_anywhere_is_refused_or_harmless(
    tmp_path: Path, artifacts: dict[str, Path], data: st.DataObject
) -> None:
    source = artifacts["qwen3-dense"]
    content = bytearray(source.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    limit = data.draw(st.sampled_from([header_bytes, len(content)]), "limit")
    position = data.draw(st.integers(0, limit - 1), "position")
    content[position] ^= data.draw(st.integers(1, 255), "mask")
    path = tmp_path / "x.ninfer"
    path.write_bytes(content)
    try:
        found = objects_of(path)
    except ModelFileError:
        return
    expected = objects_of(source)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert open_model(path).config == open_model(source).config


def test_the_name_of_the_model_stays_when_the_file_is_renamed(tmp_path: Path) -> None:
    write_artifact(open_model(DEMO_MODEL), tmp_path / "renamed.ninfer")
    assert open_model(tmp_path / "renamed.ninfer").name == "demo_model"
