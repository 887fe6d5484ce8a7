from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors

from ninfer.artifact.bindings import ActivationPrecision, Binding, Use
from ninfer.artifact.checksum import Checksum
from ninfer.artifact.container import (
    PENDING_CHECKSUM,
    Contents,
    ObjectRecord,
    check_tensors,
    decode_metadata,
    header_checksum,
    is_container,
    read_resource,
)
from ninfer.artifact.container_writer import HEADER_ALIGNMENT, PlannedTensor, write_container
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry, open_safetensors
from ninfer.contract.errors import InvariantError, ModelFileError
from tests.helpers.checkpoints import read_raw, write_raw

CONTENTS = Contents(
    name="modèle",
    config_text='{"a": 1.0}',
    objects={
        "w": ObjectRecord("text", PENDING_CHECKSUM),
        "v": ObjectRecord("text", PENDING_CHECKSUM),
    },
    bindings=(Binding("q", "w", 0, 1), Binding("k", "w", 1, 3)),
    uses=(Use("w", "attention", (ActivationPrecision.A16, ActivationPrecision.A8)),),
    resources={"tokenizer.json": PENDING_CHECKSUM},
)
BYTES = {"w": bytes(range(12)), "v": bytes(range(8)), "resources/tokenizer.json": b"{}!"}
Edit = Callable[[dict[str, Any]], None]


def planned(name: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
    data = memoryview(BYTES[name])
    return PlannedTensor(name, dtype, shape, len(data), lambda: iter((data[:1], data[1:])))


def written(path: Path) -> Path:
    tensors = [
        planned("resources/tokenizer.json", "U8", (3,)),
        planned("w", "BF16", (3, 2)),
        planned("v", "F32", (2,)),
    ]
    write_container(path, CONTENTS, tensors, lambda done, total: None)
    return path


def edited(path: Path, edit: Edit) -> SafetensorsFile:
    """The container with its metadata changed and the header checksum made right again."""
    header, data = read_raw(written(path))
    metadata = header.pop("__metadata__")
    edit(metadata)
    entries = [
        TensorEntry(name, info["dtype"], tuple(info["shape"]), *info["data_offsets"])
        for name, info in header.items()
    ]
    if "header_checksum" in metadata:
        metadata["header_checksum"] = header_checksum(metadata, entries)
    write_raw(path, {"__metadata__": metadata, **header}, data)
    return open_safetensors(path)


def test_contents_come_back_with_checksums_of_the_bytes(tmp_path: Path) -> None:
    file = open_safetensors(written(tmp_path / "x.ninfer"))
    assert is_container(file)
    contents = decode_metadata(file)
    check_tensors(contents, file)
    assert contents == replace(
        CONTENTS,
        objects={name: ObjectRecord("text", Checksum(BYTES[name]).text) for name in ("w", "v")},
        resources={"tokenizer.json": Checksum(BYTES["resources/tokenizer.json"]).text},
    )
    for name, data in BYTES.items():
        assert bytes(file.view(file.entries[name])) == data
    assert read_resource(contents, file, "tokenizer.json") == b"{}!"


def test_the_official_reader_opens_it(tmp_path: Path) -> None:
    content = written(tmp_path / "x.ninfer").read_bytes()
    found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    assert {name: bytes(info["data"]) for name, info in found.items()} == BYTES


def test_data_starts_on_a_page_and_every_tensor_on_its_element(tmp_path: Path) -> None:
    path = written(tmp_path / "x.ninfer")
    file = open_safetensors(path)
    data_bytes = sum(len(data) for data in BYTES.values())
    assert (path.stat().st_size - data_bytes) % HEADER_ALIGNMENT == 0
    assert file.entries["v"].start % 4 == 0
    assert file.entries["w"].start % 2 == 0


def test_progress_counts_the_bytes_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensors = [planned("w", "BF16", (3, 2)), planned("v", "F32", (2,))]
    write_container(
        tmp_path / "x", replace(CONTENTS, resources={}), tensors, lambda *item: seen.append(item)
    )
    assert seen == [(1, 20), (8, 20), (9, 20), (20, 20)]


def test_a_tensor_of_another_length_than_planned_is_our_mistake(tmp_path: Path) -> None:
    wrong = replace(planned("v", "F32", (2,)), num_bytes=9)
    with pytest.raises(InvariantError, match="8 bytes, not 9"):
        write_container(tmp_path / "x", CONTENTS, [wrong], lambda done, total: None)
    assert list(tmp_path.iterdir()) == []


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path / "a").read_bytes() == written(tmp_path / "b").read_bytes()


def set_entry(key: str, value: Any) -> Edit:
    return lambda metadata: metadata.update(
        {key: value if isinstance(value, str) else json.dumps(value)}
    )


@pytest.mark.parametrize(
    ("edit", "field", "message"),
    [
        (set_entry("format_version", "4"), "format_version", "version '4' is not supported"),
        (lambda metadata: metadata.pop("format_version"), "format_version", "missing"),
        (set_entry("extra", "x"), "extra", "unknown entry"),
        (lambda metadata: metadata.pop("header_checksum"), "header_checksum", "missing"),
        (lambda metadata: metadata.pop("name"), "name", "missing"),
        (lambda metadata: metadata.pop("objects"), "objects", "missing"),
        (set_entry("objects", "{"), "objects", "not valid JSON"),
        (set_entry("objects", []), "objects", "expected a JSON object"),
        (set_entry("objects", {"w": 1}), "objects.w", "expected an object"),
        (set_entry("objects", {"w": {}}), "objects.w.component", "missing"),
        (
            set_entry("objects", {"w": {"component": "text", "checksum": "", "x": 1}}),
            "objects.w.x",
            "unknown entry",
        ),
        (
            set_entry("bindings", {"q": {"object": "w", "rows": [2, 1]}}),
            "bindings.q.rows",
            "not a range",
        ),
        (
            set_entry("bindings", {"q": {"object": "w", "rows": [1]}}),
            "bindings.q.rows",
            "not a range",
        ),
        (set_entry("bindings", {"q": {"rows": [0, 1]}}), "bindings.q.object", "missing"),
        (set_entry("uses", "["), "uses", "not valid JSON"),
        (set_entry("uses", {}), "uses", "expected a JSON array"),
        (set_entry("uses", [1]), "uses[0]", "expected a JSON object"),
        (
            set_entry("uses", [{"object": "w", "consumer": "a", "activations": ["A3"]}]),
            "uses[0].activations",
            "expected some of A16, A4, A8",
        ),
        (
            set_entry("uses", [{"object": "w", "consumer": "a", "activations": []}]),
            "uses[0].activations",
            "expected some of",
        ),
        (
            set_entry("uses", [{"object": "w", "activations": ["A8"]}]),
            "uses[0].consumer",
            "missing",
        ),
        (set_entry("resources", {"a": 1}), "resources.a", "expected a string"),
    ],
)
def test_metadata_outside_the_schema_is_refused(
    tmp_path: Path, edit: Edit, field: str, message: str
) -> None:
    file = edited(tmp_path / "x.ninfer", edit)
    with pytest.raises(ModelFileError) as caught:
        decode_metadata(file)
    assert caught.value.field == f"__metadata__.{field}"
    assert message in str(caught.value)


def test_a_changed_header_does_not_pass_its_checksum(tmp_path: Path) -> None:
    path = written(tmp_path / "x.ninfer")
    content = path.read_bytes()
    assert b"1.0}" in content
    path.write_bytes(content.replace(b"1.0}", b"1.5}"))
    with pytest.raises(ModelFileError, match="header is damaged"):
        decode_metadata(open_safetensors(path))


def test_tensors_and_metadata_must_name_the_same_objects(tmp_path: Path) -> None:
    def drop_object(metadata: dict[str, Any]) -> None:
        metadata["objects"] = json.dumps({"w": json.loads(metadata["objects"])["w"]})

    def add_object(metadata: dict[str, Any]) -> None:
        objects = json.loads(metadata["objects"])
        metadata["objects"] = json.dumps({**objects, "z": objects["w"]})

    file = edited(tmp_path / "a", drop_object)
    with pytest.raises(ModelFileError, match="v: unexpected tensor"):
        check_tensors(decode_metadata(file), file)
    file = edited(tmp_path / "b", add_object)
    with pytest.raises(ModelFileError, match="z: missing tensor"):
        check_tensors(decode_metadata(file), file)


def test_a_damaged_resource_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x.ninfer")
    content = path.read_bytes()
    assert content.endswith(b"{}!")
    path.write_bytes(content[:-1] + b"?")
    file = open_safetensors(path)
    with pytest.raises(ModelFileError, match=r"resources/tokenizer.json: checksum mismatch"):
        read_resource(decode_metadata(file), file, "tokenizer.json")


def test_a_resource_must_be_bytes(tmp_path: Path) -> None:
    contents = replace(CONTENTS, objects={}, resources={"v": PENDING_CHECKSUM})
    tensor = PlannedTensor("resources/v", "F32", (2,), 8, planned("v", "F32", (2,)).chunks)
    write_container(tmp_path / "x", contents, [tensor], lambda done, total: None)
    file = open_safetensors(tmp_path / "x")
    with pytest.raises(ModelFileError, match="U8 tensor of one axis"):
        read_resource(decode_metadata(file), file, "v")
