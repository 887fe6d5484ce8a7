"""Quantised checkpoints in every published layout, and what their numbers are.

    quantise_checkpoint(source, tmp_path / "q", "ct-nvfp4")   codes, scales, a configuration
    decode_checkpoint(source, tmp_path / "f", "ct-nvfp4")     the same numbers as F32

Quantising and decoding are written here once more, in float64 and from the formats' definitions,
so that a mistake in the product's own codecs, names or formulas shows. Experts come as one matrix
each, as quantised releases have them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.checkpoints import (
    RawTensor,
    Values,
    decode,
    encode,
    read_tensors,
    write_json,
    write_safetensors,
)

Wide = NDArray[np.float64]
Codes = NDArray[np.uint8]
KEPT = ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "conv1d", "lm_head")
"""What releases leave in BF16."""


def _e4m3_numbers() -> Wide:
    numbers = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        scale = 2.0 ** (max(exponent, 1) - 7)
        numbers.append(scale * ((1.0 if exponent else 0.0) + fraction / 8.0))
    return np.array(numbers)


E4M3 = _e4m3_numbers()
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(numbers: Wide, values: Wide) -> Codes:
    """Index of the number nearest to each magnitude."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    return np.searchsorted(middles, np.abs(values)).astype(np.uint8)


def e4m3_codes(values: Wide) -> Codes:
    return nearest(E4M3, values) | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def e4m3_values(codes: Codes) -> Wide:
    numbers: Wide = E4M3[codes & 0x7F]
    signed: Wide = np.where(codes & 0x80, -numbers, numbers)
    return signed


@dataclass(frozen=True)
class Quantised:
    """The tensors of one matrix by suffix of the module's name, and the matrix they stand for."""

    tensors: dict[str, RawTensor]
    values: Values


def fp8(codes: Codes) -> RawTensor:
    return RawTensor("F8_E4M3", codes.shape, codes.tobytes())


def floats(values: Wide, dtype: str = "F32") -> RawTensor:
    return encode(np.asarray(values, np.float32), dtype)


def fp8_scaled(weight: Wide, scales: Wide) -> tuple[Codes, Values]:
    """`scales` broadcast against the weight."""
    codes = e4m3_codes(np.divide(weight, scales, out=np.zeros_like(weight), where=scales > 0))
    return codes, (e4m3_values(codes) * scales).astype(np.float32)


def rounded(scales: Wide, dtype: str) -> Wide:
    """As a file of this dtype holds them."""
    return decode(floats(scales, dtype)).astype(np.float64)


def fp8_tensor(weight: Wide, suffix: str = ".weight_scale") -> Quantised:
    scale = rounded(np.array(np.abs(weight).max() / 448), "F32")
    codes, values = fp8_scaled(weight, np.broadcast_to(scale, weight.shape))
    return Quantised({".weight": fp8(codes), suffix: floats(scale)}, values)


def fp8_channel(weight: Wide) -> Quantised:
    scales = rounded(np.abs(weight).max(axis=1, keepdims=True) / 448, "BF16")
    codes, values = fp8_scaled(weight, np.broadcast_to(scales, weight.shape))
    return Quantised({".weight": fp8(codes), ".weight_scale": floats(scales, "BF16")}, values)


def fp8_block(weight: Wide, suffix: str = ".weight_scale_inv") -> Quantised:
    rows, columns = weight.shape
    row_of, column_of = np.arange(rows) // 128, np.arange(columns) // 128
    scales = np.zeros((row_of[-1] + 1, column_of[-1] + 1))
    np.maximum.at(scales, (row_of[:, None], column_of[None, :]), np.abs(weight))
    scales = rounded(scales / 448, "BF16")
    codes, values = fp8_scaled(weight, scales[row_of[:, None], column_of[None, :]])
    return Quantised({".weight": fp8(codes), suffix: floats(scales, "BF16")}, values)


def nvfp4(weight: Wide) -> tuple[Codes, Codes, Wide]:
    """e2m1 bytes [N, K / 2], e4m3 scales [N, K / 16] and the factor that both are multiplied by."""
    factor = rounded(np.array(np.abs(weight).max() / (6 * 448)), "F32")
    groups = weight.reshape(weight.shape[0], -1, 16)
    scales = e4m3_codes(np.abs(groups).max(axis=2) / 6 / factor)
    steps = e4m3_values(scales)[..., None] * factor
    numbers = np.divide(groups, steps, out=np.zeros_like(groups), where=steps > 0)
    nibbles = nearest(E2M1, numbers) | (np.signbit(numbers).astype(np.uint8) << np.uint8(3))
    nibbles = nibbles.reshape(weight.shape)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4)), scales, factor


def nvfp4_values(codes: Codes, scales: Codes, factor: float) -> Values:
    nibbles = np.empty((codes.shape[0], 2 * codes.shape[1]), np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = codes & 15, codes >> 4
    numbers = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
    values: Wide = numbers * np.repeat(e4m3_values(scales), 16, axis=1) * factor
    return values.astype(np.float32)


def nvfp4_packed(weight: Wide) -> Quantised:
    """compressed-tensors: the global scale divides."""
    codes, scales, factor = nvfp4(weight)
    inverse = rounded(1.0 / factor, "F32")
    tensors = {
        ".weight_packed": RawTensor("U8", codes.shape, codes.tobytes()),
        ".weight_scale": fp8(scales),
        ".weight_global_scale": floats(inverse.reshape(1)),
        ".input_global_scale": floats(np.array([3.0])),
    }
    return Quantised(tensors, nvfp4_values(codes, scales, float(1.0 / inverse)))


def nvfp4_modelopt(weight: Wide) -> Quantised:
    """ModelOpt: the second scale multiplies."""
    codes, scales, factor = nvfp4(weight)
    tensors = {
        ".weight": RawTensor("U8", codes.shape, codes.tobytes()),
        ".weight_scale": fp8(scales),
        ".weight_scale_2": floats(factor),
        ".input_scale": floats(np.array(0.01)),
    }
    return Quantised(tensors, nvfp4_values(codes, scales, float(factor)))


def _compressed(weights: dict[str, Any], name: str = "float-quantized") -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*in_proj_[ab]$", r"re:.*mlp\.gate$", "re:.*shared_expert_gate"],
    }


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.embed_tokens", "in_proj_a", "in_proj_b", "gate"],
}
MODELOPT_IGNORED = ["lm_head", "*in_proj_[ab]", "*.mlp.gate", "*shared_expert_gate"]

Quantiser = Callable[[str, Wide], Quantised]


def _mixed(module: str, weight: Wide) -> Quantised:
    return nvfp4_modelopt(weight) if ".mlp." in module else fp8_tensor(weight)


LAYOUTS: dict[str, tuple[dict[str, Any], Quantiser]] = {
    "fp8-block": (FP8_CONFIG, lambda _, weight: fp8_block(weight)),
    "fp8-tensor": (
        {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
        lambda _, weight: fp8_tensor(weight),
    ),
    "ct-channel": (
        _compressed({"num_bits": 8, "strategy": "channel"}),
        lambda _, weight: fp8_channel(weight),
    ),
    "ct-tensor": (
        _compressed({"num_bits": 8, "strategy": "tensor"}),
        lambda _, weight: fp8_tensor(weight),
    ),
    "ct-block": (
        _compressed({"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
        lambda _, weight: fp8_block(weight, ".weight_scale"),
    ),
    "ct-nvfp4": (
        _compressed(
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"
        ),
        lambda _, weight: nvfp4_packed(weight),
    ),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": MODELOPT_IGNORED},
        lambda _, weight: fp8_tensor(weight),
    ),
    "modelopt-nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": MODELOPT_IGNORED,
        },
        lambda _, weight: nvfp4_modelopt(weight),
    ),
    "modelopt-mixed": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, _mixed),
}
"""Configuration and quantiser by name."""


def quantise_checkpoint(source: Path, folder: Path, layout: str) -> Path:
    """A copy of the checkpoint `source` with its linear layers quantised."""
    config, _ = LAYOUTS[layout]
    tensors: dict[str, RawTensor] = {}
    modules = []
    for name, tensor in split_experts(_copied(source, folder)):
        quantised = _quantised(name, tensor, layout)
        if quantised is None:
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        modules.append(module)
        tensors |= {module + suffix: part for suffix, part in quantised.tensors.items()}
    if layout == "modelopt-mixed":
        algorithms = {
            module: {"quant_algo": "NVFP4" if ".mlp." in module else "FP8"} for module in modules
        }
        config = {**config, "quantized_layers": algorithms}
    write_safetensors(folder / "model.safetensors", tensors)
    document = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**document, "quantization_config": config})
    return folder


def decode_checkpoint(source: Path, folder: Path, layout: str, dtype: str = "F32") -> Path:
    """A copy of `source` with the numbers that `quantise_checkpoint` leaves of it."""
    tensors = {}
    for name, tensor in split_experts(_copied(source, folder)):
        quantised = _quantised(name, tensor, layout)
        tensors[name] = tensor if quantised is None else encode(quantised.values, dtype)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _copied(source: Path, folder: Path) -> dict[str, RawTensor]:
    """Copy all but the weights; the weights."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    files = sorted(source.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def split_experts(tensors: dict[str, RawTensor]) -> Iterator[tuple[str, RawTensor]]:
    """Stacked experts as one matrix each."""
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, tensor
            continue
        stack = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:2], -1)
        for index, matrix in enumerate(stack):
            parts = {"down_proj": matrix}
            if leaf == "gate_up_proj":
                half = matrix.shape[0] // 2
                parts = {"gate_proj": matrix[:half], "up_proj": matrix[half:]}
            for part, rows in parts.items():
                shape = (rows.shape[0], tensor.shape[2])
                expert = RawTensor(tensor.dtype, shape, rows.tobytes())
                yield f"{stem}.{index}.{part}.weight", expert


def _quantised(name: str, tensor: RawTensor, layout: str) -> Quantised | None:
    """None for what stays as it is."""
    module = name.removesuffix(".weight")
    is_linear = module.endswith("_proj") or ".in_proj_" in module
    if not is_linear or ".visual." in module or module.endswith(KEPT):
        return None
    return LAYOUTS[layout][1](module, decode(tensor).astype(np.float64))
