"""What a model is, in figures: the facts that `info` prints. Headers only; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ninfer.contract.model import (
    FrontendResources,
    MlpKind,
    ModelConfig,
    ModelObject,
    ModelSource,
)
from ninfer.contract.weights import WeightEncoding


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Figures of one model.

    parameters          by component (text, mtp, vision), only those that are there
    active_parameters   text parameters one token meets: of the experts, only the chosen ones
    bytes_by_dtype      stored bytes of weights, by safetensors dtype
    encoded_parameters  text parameters stored as codes, by encoding (fp8_row, fp8_block, nvfp4)
    unused_scales       scales of activations and of the KV cache, which play no part
    file_bytes          size of the files that hold them
    max_context         tokens the positions reach
    gdn_heads           (key heads, value heads), None without GDN layers
    experts             (per token, all), None without mixture-of-experts layers
    resources           frontend files that are there, in words
    """

    name: str
    path: Path
    kind: str
    architecture: str
    parameters: Mapping[str, int]
    active_parameters: int
    bytes_by_dtype: Mapping[str, int]
    encoded_parameters: Mapping[str, int]
    unused_scales: int
    num_tensors: int
    num_files: int
    file_bytes: int
    num_layers: int
    num_attention_layers: int
    num_gdn_layers: int
    num_moe_layers: int
    num_mtp_layers: int
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gdn_heads: tuple[int, int] | None
    experts: tuple[int, int] | None
    max_context: int
    is_tied: bool
    resources: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def has_mtp(self) -> bool:
        return "mtp" in self.parameters

    @property
    def has_vision(self) -> bool:
        return "vision" in self.parameters


def describe_model(source: ModelSource) -> ModelDescription:
    config, files = source.config, {tensor.path for tensor in source.tensors}
    gdn, moe = config.gdn, config.moe
    return ModelDescription(
        name=source.name,
        path=source.path,
        kind=source.kind,
        architecture=config.architecture,
        parameters=_parameters(source.objects),
        active_parameters=_active_parameters(config, source.objects),
        bytes_by_dtype=_bytes_by_dtype(source),
        encoded_parameters=_encoded_parameters(source),
        unused_scales=source.unused_scales,
        num_tensors=len(source.tensors),
        num_files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        num_layers=len(config.layers),
        num_attention_layers=config.num_attention_layers,
        num_gdn_layers=config.num_gdn_layers,
        num_moe_layers=sum(layer.mlp is MlpKind.MOE for layer in config.layers),
        num_mtp_layers=config.num_mtp_layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.attention.num_heads,
        num_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        gdn_heads=(gdn.num_key_heads, gdn.num_value_heads) if gdn is not None else None,
        experts=(moe.experts_per_token, moe.num_experts) if moe is not None else None,
        max_context=config.max_position_embeddings,
        is_tied=config.tie_word_embeddings,
        resources=_resources(source.resources),
    )


def _parameters(objects: Iterable[ModelObject]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in objects:
        counts[item.component] = counts.get(item.component, 0) + math.prod(item.shape)
    return counts


def _active_parameters(config: ModelConfig, objects: Iterable[ModelObject]) -> int:
    active = 0
    for item in objects:
        if item.component != "text":
            continue
        size = math.prod(item.shape)
        if ".moe.experts." in item.name and config.moe is not None:
            size = size * config.moe.experts_per_token // config.moe.num_experts
        active += size
    return active


def _bytes_by_dtype(source: ModelSource) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in source.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return sizes


def _encoded_parameters(source: ModelSource) -> dict[str, int]:
    counts: dict[str, int] = {}
    all_bands = source.bands
    for item in source.objects:
        if item.component != "text":
            continue
        bands = all_bands[item.name]
        row = math.prod(item.shape) // sum(band.num_rows for band in bands)
        for band in bands:
            if band.encoding is not WeightEncoding.FLOAT:
                name = band.encoding.value
                counts[name] = counts.get(name, 0) + band.num_rows * row
    return counts


def _resources(resources: FrontendResources) -> tuple[str, ...]:
    present = {
        "tokenizer": resources.tokenizer_json is not None,
        "tokenizer config": bool(resources.tokenizer_config),
        "chat template": resources.chat_template is not None,
        "generation config": bool(resources.generation_config),
    }
    return tuple(name for name, is_there in present.items() if is_there)
