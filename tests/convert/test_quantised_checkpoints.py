"""Quantised checkpoints as float32, as codes, and through an artifact; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import ModelFileError
from ninfer.contract.weights import AnyBand, WeightBand, WeightEncoding
from ninfer.convert.opened_model import OpenedModel
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from ninfer.ops import encoded_weights
from tests.helpers.checkpoints import (
    RawTensor,
    decode,
    edit_json,
    read_raw,
    read_tensors,
    write_json,
    write_safetensors,
)
from tests.helpers.model_paths import golden_model
from tests.helpers.quantised_checkpoints import (
    LAYOUTS,
    decode_checkpoint,
    e4m3_values,
    fp8_tensor,
    quantise_checkpoint,
)

CASES = ("qwen3-dense", "qwen3-moe", "qwen3-vl", "qwen3_5-dense", "qwen3_5-moe")
ROUNDINGS = 2 * 2.0**-23


def pair(tmp_path: Path, case: str, layout: str) -> tuple[OpenedModel, OpenedModel]:
    """The quantised golden, and its numbers by the independent formula."""
    source = golden_model(case)
    return (
        open_model(quantise_checkpoint(source, tmp_path / "q", layout)),
        open_model(decode_checkpoint(source, tmp_path / "f", layout)),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_decoded_to_the_numbers_it_stands_for(
    tmp_path: Path, case: str, layout: str
) -> None:
    quantised, plain = pair(tmp_path, case, layout)
    expected = {item.name: values for item, values in plain.read_float32()}
    found = {item.name: values for item, values in quantised.read_float32()}
    assert list(found) == list(expected)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=ROUNDINGS, atol=0, err_msg=name)
    kinds = {band.encoding for bands in quantised.bands.values() for band in bands}
    assert kinds - {WeightEncoding.FLOAT}


def test_codes_are_those_of_the_file(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "modelopt-nvfp4")
    source, tensors = open_model(folder), read_tensors(folder / "model.safetensors")
    read = {item.name: bands for item, bands in source.read_bands({"layers.1.attn.qkv_proj"})}
    bands = read["layers.1.attn.qkv_proj"]
    assert [band.encoding for band in bands] == [WeightEncoding.NVFP4] * 3
    for band, part in zip(bands, "qkv", strict=True):
        module = f"model.layers.1.self_attn.{part}_proj"
        assert band.codes.tobytes() == tensors[f"{module}.weight"].data
        assert band.scales is not None
        assert band.scales.tobytes() == tensors[f"{module}.weight_scale"].data
        factor = np.frombuffer(tensors[f"{module}.weight_scale_2"].data, "<f4")
        assert band.row_factors is not None
        np.testing.assert_array_equal(band.row_factors, np.full(band.codes.shape[0], factor[0]))
    (plain,) = read["layers.1.mlp.down_proj"]
    assert plain.encoding is WeightEncoding.FLOAT


@pytest.mark.parametrize("case", ["qwen3-dense", "qwen3_5-moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bands_decode_to_what_is_read_as_float32(tmp_path: Path, case: str, layout: str) -> None:
    source = open_model(quantise_checkpoint(golden_model(case), tmp_path / "q", layout))
    names = set(source.bands)
    for (item, values), (_, bands) in zip(
        source.read_float32(), source.read_bands(names), strict=True
    ):
        assert [band.encoding for band in bands] == [
            band.encoding for band in source.bands[item.name]
        ]
        rows = [decoded(band) for band in bands]
        axis = -2 if values.ndim > 1 else 0
        np.testing.assert_array_equal(np.concatenate(rows, axis=axis), values, err_msg=item.name)


def decoded(band: AnyBand) -> Float32Array:
    if band.encoding is WeightEncoding.FLOAT:
        return np.asarray(band.codes, np.float32)
    return encoded_weights.reference(band)


@pytest.mark.parametrize("case", ["qwen3-dense", "qwen3_5-moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_artifact_holds_the_same_codes(tmp_path: Path, case: str, layout: str) -> None:
    source = open_model(quantise_checkpoint(golden_model(case), tmp_path / "q", layout))
    write_artifact(source, tmp_path / "m.ninfer")
    artifact = open_model(tmp_path / "m.ninfer")
    assert artifact.kind == "ninfer"
    assert artifact.bands == source.bands
    names = set(source.bands)
    for (_, ours), (item, theirs) in zip(
        source.read_bands(names), artifact.read_bands(names), strict=True
    ):
        for first, second in zip(ours, theirs, strict=True):
            for field in ("codes", "scales", "row_factors"):
                np.testing.assert_array_equal(
                    getattr(first, field), getattr(second, field), err_msg=f"{item.name} {field}"
                )
    for (item, expected), (_, found) in zip(
        source.read_float32(), artifact.read_float32(), strict=True
    ):
        np.testing.assert_array_equal(found, expected, err_msg=item.name)
    assert {tensor.dtype for tensor in artifact.tensors} & {"F8_E4M3", "U8"}


def test_an_artifact_of_codes_is_not_larger_than_the_checkpoint(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3_5-dense"), tmp_path / "q", "fp8-block")
    write_artifact(open_model(folder), tmp_path / "m.ninfer")
    stored = sum(tensor.num_bytes for tensor in open_model(folder).tensors)
    written = sum(tensor.num_bytes for tensor in open_model(tmp_path / "m.ninfer").tensors)
    assert written < 1.01 * stored


def test_stacked_experts_of_block_fp8_are_one_band(tmp_path: Path) -> None:
    """As transformers saves them: blocks of the whole stack of gate and up rows."""
    folder = quantise_checkpoint(golden_model("qwen3_5-moe"), tmp_path / "q", "fp8-block")
    tensors = read_tensors(folder / "model.safetensors")
    stem, expected = "model.layers.0.mlp.experts", []
    for leaf, parts, shape in (
        ("gate_up_proj", ("gate_proj", "up_proj"), (8, 64, 64)),
        ("down_proj", ("down_proj",), (8, 64, 32)),
    ):
        codes, scales = b"", b""
        for index in range(8):
            found = [tensors.pop(f"{stem}.{index}.{part}.weight").data for part in parts]
            given = [tensors.pop(f"{stem}.{index}.{part}.weight_scale_inv") for part in parts]
            codes, scales = codes + b"".join(found), scales + given[0].data
            numbers = e4m3_values(np.frombuffer(b"".join(found), np.uint8))
            expected.append(numbers * decode(given[0])[0, 0])
        tensors[f"{stem}.{leaf}"] = RawTensor("F8_E4M3", shape, codes)
        tensors[f"{stem}.{leaf}_scale_inv"] = RawTensor("BF16", (8, 1, 1), scales)
    write_safetensors(folder / "model.safetensors", tensors)
    source = open_model(folder)
    bands = source.bands["layers.0.moe.experts.gate_up"]
    assert bands == (WeightBand(WeightEncoding.FP8_BLOCK, 64),)
    found_values = {item.name: values for item, values in source.read_float32()}
    got = [found_values[f"layers.0.moe.experts.{leaf}"].reshape(-1) for leaf in ("gate_up", "down")]
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(expected).astype(np.float32))


def test_experts_of_different_formats_are_read_as_numbers(tmp_path: Path) -> None:
    plain = decode_checkpoint(golden_model("qwen3-moe"), tmp_path / "f", "ct-channel")
    folder = quantise_checkpoint(golden_model("qwen3-moe"), tmp_path / "q", "ct-channel")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    other = read_tensors(plain / "model.safetensors")[name]
    edit(folder, lambda tensors: tensors.pop(name + "_scale") and tensors.update({name: other}))
    source = open_model(folder)
    gate, up = source.bands["layers.0.moe.experts.gate_up"]
    assert (gate.encoding, up.encoding) == (WeightEncoding.FP8_ROW, WeightEncoding.FLOAT)
    write_artifact(source, tmp_path / "m.ninfer")
    for model in (source, open_model(tmp_path / "m.ninfer")):
        found = {item.name: values for item, values in model.read_float32()}
        for item, values in open_model(plain).read_float32():
            np.testing.assert_array_equal(found[item.name], values, err_msg=item.name)


def test_a_quantised_convolution_is_decoded(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3_5-dense"), tmp_path / "q", "fp8-tensor")
    name = "model.layers.0.linear_attn.conv1d.weight"
    weight = read_tensors(folder / "model.safetensors")[name]
    quantised = fp8_tensor(decode(weight).astype(np.float64).reshape(weight.shape[0], -1))
    codes = RawTensor("F8_E4M3", weight.shape, quantised.tensors[".weight"].data)
    scale = quantised.tensors[".weight_scale"]
    edit(folder, lambda tensors: tensors.update({name: codes, name + "_scale": scale}))
    found = {item.name: values for item, values in open_model(folder).read_float32()}
    np.testing.assert_array_equal(found["layers.0.gdn.conv"], quantised.values)


def test_modelopt_may_describe_itself_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "modelopt-nvfp4")
    document = json.loads((folder / "config.json").read_text())
    config = document.pop("quantization_config")
    write_json(folder / "config.json", document)
    quantisation = {"quant_algo": "NVFP4", "exclude_modules": config["ignore"]}
    write_json(folder / "hf_quant_config.json", {"quantization": quantisation})
    source = open_model(folder)
    assert source.bands["layers.0.mlp.down_proj"] == (WeightBand(WeightEncoding.NVFP4, 96),)
    assert source.unused_scales == 3 * 7


UP = "model.layers.1.mlp.up_proj"


def edit(folder: Path, change: Callable[[dict[str, RawTensor]], object]) -> None:
    tensors = read_tensors(folder / "model.safetensors")
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def set_tensor(suffix: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    def change(tensors: dict[str, RawTensor]) -> None:
        tensors[UP + suffix] = RawTensor(dtype, shape, data)

    return change


def patch(suffix: str, data: bytes) -> Any:
    """Other first bytes."""

    def change(tensors: dict[str, RawTensor]) -> None:
        old = tensors[UP + suffix]
        tensors[UP + suffix] = RawTensor(old.dtype, old.shape, data + old.data[len(data) :])

    return change


def drop(suffix: str) -> Any:
    return lambda tensors: tensors.pop(UP + suffix)


def single(value: float) -> bytes:
    return np.array([value], "<f4").tobytes()


BF16_NAN, BF16_NEGATIVE, BF16_INFINITY = b"\xc0\x7f", b"\x80\xbf", b"\x80\x7f"


@pytest.mark.parametrize(
    ("layout", "change", "suffix", "message"),
    [
        ("fp8-block", drop(".weight_scale_inv"), ".weight_scale_inv", "missing scale of"),
        (
            "fp8-block",
            set_tensor(".weight_scale_inv", "BF16", (1, 1), bytes(2)),
            ".weight_scale_inv",
            r"shape \[1, 1\], FP8, one scale a 128 x 128 block has \[2, 1\]",
        ),
        (
            "fp8-block",
            set_tensor(".weight_scale_inv", "F8_E4M3", (2, 1), bytes(2)),
            ".weight_scale_inv",
            "dtype F8_E4M3",
        ),
        ("fp8-block", patch(".weight_scale_inv", BF16_NAN), ".weight_scale_inv", "NaN or infinite"),
        (
            "fp8-block",
            patch(".weight_scale_inv", BF16_INFINITY),
            ".weight_scale_inv",
            "NaN or infinite",
        ),
        (
            "fp8-block",
            patch(".weight_scale_inv", BF16_NEGATIVE),
            ".weight_scale_inv",
            "a scale is negative",
        ),
        ("fp8-block", patch(".weight", b"\x7f"), ".weight", "a code is NaN"),
        ("fp8-block", patch(".weight", b"\x00\xff"), ".weight", "a code is NaN"),
        (
            "fp8-block",
            set_tensor(".weight", "F8_E5M2", (160, 96), bytes(160 * 96)),
            ".weight",
            "dtype F8_E5M2",
        ),
        (
            "fp8-block",
            set_tensor(".weight", "F8_E4M3", (96, 160), bytes(160 * 96)),
            ".weight",
            r"shape \[96, 160\], .* has \[160, 96\]",
        ),
        ("fp8-tensor", patch(".weight_scale", single(0.0)), ".weight_scale", "matrix is zero"),
        ("fp8-tensor", patch(".weight_scale", single(-1.0)), ".weight_scale", "negative"),
        (
            "ct-channel",
            set_tensor(".weight_scale", "BF16", (1,), b"\x80\x3f"),
            ".weight_scale",
            r"has \[160, 1\] or \[160\]",
        ),
        ("ct-channel", drop(".weight_scale"), ".weight_scale", "missing scale of"),
        ("ct-nvfp4", drop(".weight_global_scale"), ".weight_global_scale", "missing scale of"),
        ("ct-nvfp4", drop(".weight_scale"), ".weight_scale", "missing scale of"),
        ("ct-nvfp4", drop(".weight_packed"), ".weight", "missing tensor"),
        ("ct-nvfp4", patch(".weight_scale", b"\x7f"), ".weight_scale", "a code is NaN"),
        ("ct-nvfp4", patch(".weight_scale", b"\x81"), ".weight_scale", "a scale is negative"),
        (
            "ct-nvfp4",
            patch(".weight_global_scale", single(0.0)),
            ".weight_global_scale",
            "not above zero",
        ),
        (
            "ct-nvfp4",
            patch(".weight_global_scale", single(-2.0)),
            ".weight_global_scale",
            "not above zero",
        ),
        (
            "ct-nvfp4",
            patch(".weight_global_scale", single(1e-45)),
            ".weight_global_scale",
            "too small",
        ),
        (
            "ct-nvfp4",
            patch(".weight_global_scale", single(float("inf"))),
            ".weight_global_scale",
            "NaN or infinite",
        ),
        (
            "ct-nvfp4",
            set_tensor(".weight_global_scale", "F32", (2,), bytes(8)),
            ".weight_global_scale",
            r"has \[\] or \[1\]",
        ),
        (
            "ct-nvfp4",
            set_tensor(".weight_packed", "U8", (160, 96), bytes(160 * 96)),
            ".weight_packed",
            r"has \[160, 48\]",
        ),
        ("modelopt-nvfp4", patch(".weight_scale_2", single(0.0)), ".weight_scale_2", "above zero"),
        (
            "modelopt-nvfp4",
            set_tensor(".weight_scale", "F8_E4M3", (160, 3), bytes(480)),
            ".weight_scale",
            r"has \[160, 6\]",
        ),
        (
            "modelopt-nvfp4",
            set_tensor(".pre_quant_scale", "BF16", (96,), bytes(192)),
            ".pre_quant_scale",
            "unexpected tensor",
        ),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, layout: str, change: Any, suffix: str, message: str
) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", layout)
    edit(folder, change)
    with pytest.raises(ModelFileError, match=message) as caught:
        list(open_model(folder).read_float32())
    assert caught.value.field == UP + suffix


def test_codes_of_a_module_that_the_configuration_leaves_alone_are_refused(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "fp8-block")
    config = {**LAYOUTS["fp8-block"][0], "modules_to_not_convert": [UP]}
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(ModelFileError, match=f"leaves {UP} as it was") as caught:
        open_model(folder)
    assert caught.value.field == f"{UP}.weight"
    assert "quantization_config.modules_to_not_convert" in str(caught.value)


def test_codes_without_a_configuration_are_refused(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "fp8-block")
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(ModelFileError, match=r"dtype F8_E4M3 is not supported .* without"):
        open_model(folder)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("codes", lambda data: b"\x7f" + data[1:]),
        ("scales", lambda data: b"\0\0\x80\xbf" + data[4:]),
    ],
)
def test_a_damaged_plane_of_an_artifact_is_named(
    tmp_path: Path, field: str, change: Callable[[bytes], bytes]
) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "fp8-block")
    path = tmp_path / "m.ninfer"
    write_artifact(open_model(folder), path)
    name = f"layers.1.mlp.down_proj/0/{field}"
    header, data = read_raw(path)
    start, stop = header[name]["data_offsets"]
    content = path.read_bytes()
    first = len(content) - len(data)
    part = change(content[first + start : first + stop])
    path.write_bytes(content[: first + start] + part + content[first + stop :])
    with pytest.raises(ModelFileError, match="checksum mismatch") as caught:
        list(open_model(path).read_float32())
    assert caught.value.field == name
