from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.artifact.safetensors_file import SafetensorsFile, open_safetensors
from ninfer.contract.errors import ModelFileError
from tests.helpers.checkpoints import RawTensor, read_raw, write_raw, write_safetensors
from tests.helpers.model_paths import all_models

TENSORS = {
    "b": RawTensor("BF16", (2, 3), bytes(range(12))),
    "a": RawTensor("F32", (2,), bytes(range(8))),
    "empty": RawTensor("F32", (0, 4), b""),
    "scalar": RawTensor("U8", (), b"\x07"),
}


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        open_safetensors(path)
    assert caught.value.path == path
    return caught.value


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, TENSORS, {"format": "pt", "note": "ü"})
    file = open_safetensors(path)
    assert file.metadata == {"format": "pt", "note": "ü"}
    assert list(file.entries) == ["b", "a", "empty", "scalar"]
    for name, tensor in TENSORS.items():
        found = file.entries[name]
        assert (found.dtype, found.shape, found.num_bytes) == (
            tensor.dtype,
            tensor.shape,
            len(tensor.data),
        )
        assert bytes(file.view(found)) == tensor.data
        assert file.stored(found).path == path


def test_a_view_cannot_be_written_through(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", TENSORS)
    file = open_safetensors(tmp_path / "x")
    assert file.view(file.entries["a"]).readonly


def test_headers_of_real_files_agree_with_the_official_reader() -> None:
    for folder in all_models():
        for path in folder.glob("*.safetensors"):
            assert_same_as_official(open_safetensors(path), path.read_bytes())


def test_files_of_the_official_writer_are_read(tmp_path: Path) -> None:
    values = np.array([1.5, -2.0], np.float32)
    safetensors.numpy.save_file({"x": values}, tmp_path / "x", {"k": "v"})
    file = open_safetensors(tmp_path / "x")
    assert file.metadata == {"k": "v"}
    assert bytes(file.view(file.entries["x"])) == values.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "only 0 bytes"),
        (b"\x02\0\0", "only 3 bytes"),
        (b"\0" * 8, "not a safetensors header"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors header"),
        (b"\x09\0\0\0\0\0\0\0{}", "truncated: header of 9 bytes"),
        (b"\x09\0\0\0\0\0\0\0PK", "not a safetensors file"),
        (b"\xff" * 8, "not a safetensors file"),
        (b'{\n "architectures": []}', "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_files_without_a_header_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    assert message in str(refused(tmp_path / "x"))


@pytest.mark.parametrize(
    ("header", "data", "field", "message"),
    [
        ({"x": 3}, b"", "x", "expected an object"),
        ({"x": {}}, b"", "x.dtype", "missing"),
        ({"x": entry("F31")}, b"0000", "x.dtype", "unknown dtype 'F31'"),
        ({"x": entry(shape=None)}, b"0000", "x.shape", "must not be null"),
        ({"x": entry(shape=[1.0])}, b"0000", "x.shape", "array of integers"),
        ({"x": entry(shape=[-1])}, b"0000", "x.shape", "-1 is not in"),
        ({"x": entry(shape=[True])}, b"0000", "x.shape", "array of integers"),
        ({"x": entry(shape=[2])}, b"0000", "x.data_offsets", r"4 bytes for shape [2] of F32"),
        ({"x": entry(shape=[2**62, 2**62])}, b"0000", "x.shape", "too large"),
        ({"x": entry(offsets=[4, 0])}, b"0000", "x.data_offsets", "not a byte range"),
        ({"x": entry(offsets=[0])}, b"0000", "x.data_offsets", "not a byte range"),
        ({"x": entry(offsets="04")}, b"0000", "x.data_offsets", "expected an array"),
        ({"x": entry(offsets=[-4, 0])}, b"0000", "x.data_offsets", "-4 is not in"),
        ({"x": entry(offsets=[4, 8])}, b"0" * 8, "x.data_offsets", "leaves a gap"),
        ({"x": entry(), "y": entry(offsets=[0, 4])}, b"0000", "y.data_offsets", "overlaps"),
        ({"x": entry(), "y": entry(offsets=[2, 6])}, b"0" * 6, "y.data_offsets", "overlaps"),
        ({"x": entry()}, b"000", "x", "truncated: 4 bytes of data needed, 3 present"),
        ({"x": entry()}, b"00000", None, "1 bytes behind the last tensor"),
        ({}, b"0", None, "1 bytes behind the last tensor"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__", "object of strings"),
        ({"__metadata__": []}, b"", "__metadata__", "object of strings"),
        (b'{"x": ', b"", "header", "not valid JSON"),
    ],
)
def test_broken_headers_are_refused_by_name(
    tmp_path: Path, header: Any, data: bytes, field: str | None, message: str
) -> None:
    write_raw(tmp_path / "x", header, data)
    error = refused(tmp_path / "x")
    assert error.field == field
    assert message in str(error)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    assert "no such file" in str(refused(tmp_path / "x"))
    assert "not a regular file" in str(refused(tmp_path))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in str(refused(tmp_path / "pipe"))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.sampled_from(["F32", "BF16", "U8", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
LEGAL_ENTRIES = st.builds(
    entry,
    st.sampled_from(["F32", "BF16", "U8"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted),
)
FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_same_as_official(file: SafetensorsFile, content: bytes) -> None:
    """The official reader accepts the content and sees the same tensors."""
    found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    assert set(found) == set(file.entries)
    for name, info in found.items():
        assert list(file.entries[name].shape) == info["shape"]
        assert bytes(file.view(file.entries[name])) == bytes(info["data"])


@FUZZ
@given(
    header=st.dictionaries(
        st.sampled_from(["x", "y", "__metadata__"]), LEGAL_ENTRIES | JSON_VALUES
    ),
    num_bytes=st.integers(0, 16),
)
def test_any_header_is_read_as_officially_or_refused(
    tmp_path: Path, header: dict[str, Any], num_bytes: int
) -> None:
    path = tmp_path / "x"
    write_raw(path, header, bytes(num_bytes))
    try:
        file = open_safetensors(path)
    except ModelFileError:
        return
    assert_same_as_official(file, path.read_bytes())


@FUZZ
@given(data=st.data())
def test_any_damage_to_a_file_is_refused_or_read_as_officially(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "x"
    write_safetensors(path, TENSORS)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "truncate"):
        del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        if content:
            position = data.draw(st.integers(0, len(content) - 1))
            content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        file = open_safetensors(path)
    except ModelFileError:
        return
    assert_same_as_official(file, bytes(content))


def test_helpers_agree_with_each_other(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", TENSORS)
    header, data = read_raw(tmp_path / "x")
    write_raw(tmp_path / "y", json.dumps(header).encode(), data)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
