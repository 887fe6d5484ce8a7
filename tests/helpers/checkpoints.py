"""Random Hugging Face checkpoints of every supported family, and raw safetensors files.

    folder = write_checkpoint(tmp_path / "m", CheckpointSpec(family="qwen3_5_moe", num_shards=3))

Everything follows from the spec and its seed. Names and shapes are written out here on their own,
so that a mistake in the product's mapping shows. Weights are scaled so that logits are spread and
no part of a block is dead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Family: TypeAlias = Literal["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_moe"]
ShardStyle: TypeAlias = Literal["model-00001-of-00002", "model.safetensors-00001-of-00002"]
RopeStyle: TypeAlias = Literal["rope_parameters", "flat", "rope_scaling"]
Values: TypeAlias = NDArray[np.float32]

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I32": 4, "F8_E4M3": 1}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a file stores it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class CheckpointSpec:
    """Sizes and layout of a checkpoint; the defaults make a small model of any family.

    layer_types       None: the family's own rule (`full_attention_interval` 4)
    dense_layers      `mlp_only_layers`; qwen3_5_moe has the key and experts all the same
    is_wrapper        nested `text_config` and `model.language_model.` names
    per_expert        one matrix per expert instead of stacked ones
    f32_vectors       A_log and the GDN norm as F32, as part of the releases have them
    has_vision        a few `model.visual.` tensors (a wrapper's)
    overrides         keys to set in the text configuration (None removes one)
    """

    family: Family = "qwen3_5"
    seed: int = 0
    vocab_size: int = 128
    hidden_size: int = 32
    num_layers: int = 4
    layer_types: tuple[str, ...] | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 48
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 8
    gdn_value_dim: int = 8
    conv_width: int = 4
    num_experts: int = 4
    experts_per_token: int = 2
    moe_intermediate_size: int = 24
    shared_intermediate_size: int = 16
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    is_tied: bool = False
    is_wrapper: bool = False
    per_expert: bool = False
    f32_vectors: bool = False
    has_vision: bool = False
    dtype: Literal["BF16", "F16", "F32"] = "BF16"
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] | None = None
    rope_theta: float = 10_000.0
    rope_style: RopeStyle = "rope_parameters"
    max_position_embeddings: int = 4096
    num_shards: int = 1
    shard_style: ShardStyle = "model-00001-of-00002"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_hybrid(self) -> bool:
        return self.family.startswith("qwen3_5")

    @property
    def has_moe(self) -> bool:
        return self.family.endswith("_moe")

    @property
    def mixers(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple(
            "full_attention" if not self.is_hybrid or (index + 1) % 4 == 0 else "linear_attention"
            for index in range(self.num_layers)
        )

    @property
    def conv_dim(self) -> int:
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def value_dim(self) -> int:
        return self.gdn_value_heads * self.gdn_value_dim


def write_checkpoint(folder: Path, spec: CheckpointSpec) -> Path:
    """Write config.json, generation_config.json and the weights; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", hf_config(spec))
    write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": spec.vocab_size - 1}
    )
    tensors = {name: encode(values, dtype) for name, (values, dtype) in _tensors(spec).items()}
    if spec.num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        write_shards(folder, tensors, spec.num_shards, spec.shard_style)
    return folder


def checkpoint_values(spec: CheckpointSpec) -> dict[str, Values]:
    """Stored name -> what the file holds, as float32."""
    return {name: decode(encode(values, dtype)) for name, (values, dtype) in _tensors(spec).items()}


def hf_config(spec: CheckpointSpec) -> dict[str, Any]:
    """The config.json of a spec."""
    text = {**_text_config(spec), **spec.overrides}
    text = {key: value for key, value in text.items() if value is not None}
    wrapped = spec.is_wrapper or spec.family == "qwen3_vl"
    architecture = {
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_5": "Qwen3_5ForConditionalGeneration" if wrapped else "Qwen3_5ForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration" if wrapped else "Qwen3_5MoeForCausalLM",
    }[spec.family]
    if not wrapped:
        return {"architectures": [architecture], **text}
    top = {"architectures": [architecture], "model_type": spec.family, "text_config": text}
    return {**top, "tie_word_embeddings": spec.is_tied, "vision_config": {"depth": 1}}


def _text_config(spec: CheckpointSpec) -> dict[str, Any]:
    is_nested = spec.is_wrapper or spec.family == "qwen3_vl"
    config: dict[str, Any] = {
        "model_type": f"{spec.family}_text" if is_nested else spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.is_tied,
        "dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[spec.dtype],
        "eos_token_id": spec.vocab_size - 1,
        **_rope_config(spec),
    }
    if not spec.has_moe or spec.dense_layers:
        config["intermediate_size"] = spec.intermediate_size
    if spec.has_moe:
        config |= _moe_config(spec)
    if spec.is_hybrid:
        config |= _hybrid_config(spec)
    return config


def _rope_config(spec: CheckpointSpec) -> dict[str, Any]:
    block: dict[str, Any] = {"rope_type": "default"}
    if spec.is_hybrid:
        block["partial_rotary_factor"] = spec.partial_rotary_factor
    if spec.mrope_section is not None:
        block |= {"mrope_section": list(spec.mrope_section), "mrope_interleaved": True}
    if spec.rope_style == "rope_parameters":
        return {"rope_parameters": {"rope_theta": spec.rope_theta, **block}}
    flat = {"rope_theta": spec.rope_theta}
    return {**flat, "rope_scaling": block if spec.rope_style == "rope_scaling" else None}


def _moe_config(spec: CheckpointSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "mlp_only_layers": list(spec.dense_layers),
    }
    if spec.is_hybrid:
        return {**config, "shared_expert_intermediate_size": spec.shared_intermediate_size}
    return {**config, "norm_topk_prob": spec.norm_topk_prob, "decoder_sparse_step": 1}


def _hybrid_config(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "layer_types": list(spec.mixers),
        "attn_output_gate": True,
        "linear_conv_kernel_dim": spec.conv_width,
        "linear_key_head_dim": spec.gdn_key_dim,
        "linear_value_head_dim": spec.gdn_value_dim,
        "linear_num_key_heads": spec.gdn_key_heads,
        "linear_num_value_heads": spec.gdn_value_heads,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": spec.num_mtp_layers,
    }


def _tensors(spec: CheckpointSpec) -> dict[str, tuple[Values, str]]:
    """Stored name -> values and the dtype they are stored in, in the order they were drawn."""
    random = np.random.default_rng(spec.seed)
    tensors: dict[str, tuple[Values, str]] = {}
    for name, shape in stored_shapes(spec):
        is_f32 = spec.f32_vectors and name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = _draw(random, name, shape, spec), "F32" if is_f32 else spec.dtype
    return tensors


def _draw(
    random: np.random.Generator, name: str, shape: tuple[int, ...], spec: CheckpointSpec
) -> Values:
    if name.endswith("A_log"):
        values = random.uniform(math.log(0.01), math.log(4.0), shape)
    elif name.endswith("dt_bias"):
        values = random.uniform(-4.0, 1.0, shape)
    elif len(shape) == 1:
        is_plain = not spec.is_hybrid or "linear_attn" in name or ".visual." in name
        values = random.normal(1.0 if is_plain else 0.0, 0.2, shape)
    elif "embed_tokens" in name:
        scale = 2.2 / math.sqrt(spec.hidden_size) if spec.is_tied else 1.0
        values = random.normal(0.0, scale, shape)
    else:
        values = random.normal(0.0, _gain(name) / math.sqrt(shape[-1]), shape)
    return values.astype(np.float32)


def _gain(name: str) -> float:
    """Factor on 1 / sqrt(fan in): decided routers and heads, quieter residual branches."""
    if name.endswith("mlp.gate.weight"):
        return 3.0
    if name.startswith("lm_head"):
        return 2.5
    return 0.8 if "o_proj" in name or "out_proj" in name or "down_proj" in name else 1.0


def stored_shapes(spec: CheckpointSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors."""
    prefix = "model.language_model" if spec.is_wrapper or spec.family == "qwen3_vl" else "model"
    hidden = spec.hidden_size
    yield f"{prefix}.embed_tokens.weight", (spec.vocab_size, hidden)
    for index, mixer in enumerate(spec.mixers):
        has_dense = spec.family == "qwen3_moe" and index in spec.dense_layers
        is_moe = spec.has_moe and not has_dense
        yield from _layer_shapes(spec, f"{prefix}.layers.{index}", mixer, is_moe)
    yield f"{prefix}.norm.weight", (hidden,)
    if not spec.is_tied:
        yield "lm_head.weight", (spec.vocab_size, hidden)
    if spec.num_mtp_layers:
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", (hidden,)
    for index in range(spec.num_mtp_layers):
        yield from _layer_shapes(spec, f"mtp.layers.{index}", "full_attention", spec.has_moe)
    if spec.has_vision:
        yield "model.visual.patch_embed.proj.weight", (8, 3, 2, 4, 4)
        for index in range(11):
            yield f"model.visual.blocks.{index}.norm1.weight", (8,)


def _layer_shapes(
    spec: CheckpointSpec, prefix: str, mixer: str, is_moe: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.input_layernorm.weight", (spec.hidden_size,)
    yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)
    if mixer == "full_attention":
        yield from _attention_shapes(spec, f"{prefix}.self_attn")
    else:
        yield from _gdn_shapes(spec, f"{prefix}.linear_attn")
    if is_moe:
        yield from _moe_shapes(spec, f"{prefix}.mlp")
    else:
        yield from _mlp_shapes(f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size)


def _attention_shapes(spec: CheckpointSpec, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    yield f"{prefix}.q_proj.weight", (2 * width if spec.is_hybrid else width, hidden)
    yield f"{prefix}.k_proj.weight", (kv_width, hidden)
    yield f"{prefix}.v_proj.weight", (kv_width, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, width)
    yield f"{prefix}.q_norm.weight", (spec.head_dim,)
    yield f"{prefix}.k_norm.weight", (spec.head_dim,)


def _gdn_shapes(spec: CheckpointSpec, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = spec.hidden_size, spec.gdn_value_heads
    yield f"{prefix}.in_proj_qkv.weight", (spec.conv_dim, hidden)
    yield f"{prefix}.in_proj_z.weight", (spec.value_dim, hidden)
    yield f"{prefix}.in_proj_b.weight", (heads, hidden)
    yield f"{prefix}.in_proj_a.weight", (heads, hidden)
    yield f"{prefix}.conv1d.weight", (spec.conv_dim, 1, spec.conv_width)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (spec.gdn_value_dim,)
    yield f"{prefix}.out_proj.weight", (hidden, spec.value_dim)


def _moe_shapes(spec: CheckpointSpec, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    yield f"{prefix}.gate.weight", (spec.num_experts, hidden)
    if spec.per_expert:
        for index in range(spec.num_experts):
            yield from _mlp_shapes(f"{prefix}.experts.{index}", hidden, inner)
    else:
        yield f"{prefix}.experts.gate_up_proj", (spec.num_experts, 2 * inner, hidden)
        yield f"{prefix}.experts.down_proj", (spec.num_experts, hidden, inner)
    if spec.is_hybrid:
        yield from _mlp_shapes(f"{prefix}.shared_expert", hidden, spec.shared_intermediate_size)
        yield f"{prefix}.shared_expert_gate.weight", (1, hidden)


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def encode(values: Values, dtype: str) -> RawTensor:
    """Round to BF16 (nearest, ties to even), F16 or F32."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        codes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        return RawTensor(dtype, values.shape, codes.tobytes())
    return RawTensor(dtype, values.shape, values.astype(f"<f{ITEM_BYTES[dtype]}").tobytes())


def decode(tensor: RawTensor) -> Values:
    """The exact float32 values of a BF16, F16 or F32 tensor."""
    if tensor.dtype == "BF16":
        codes = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return codes.astype("<u4").view("<f4").reshape(tensor.shape).astype(np.float32)
    codes = np.frombuffer(tensor.data, f"<f{ITEM_BYTES[tensor.dtype]}")
    return codes.reshape(tensor.shape).astype(np.float32)


def write_safetensors(
    path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file with the tensors' bytes in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name, tensor in tensors.items():
        stop = start + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    write_raw(path, header, b"".join(tensor.data for tensor in tensors.values()))


def write_raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """Write any header, legal or not, and any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header (with `__metadata__`) and data section of a well-formed file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def read_tensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of a well-formed file, in the order of their bytes."""
    header, data = read_raw(path)
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: RawTensor(info["dtype"], tuple(info["shape"]), data[slice(*info["data_offsets"])])
        for name, info in ordered
    }


def write_shards(
    folder: Path,
    tensors: Mapping[str, RawTensor],
    num_shards: int,
    style: ShardStyle = "model-00001-of-00002",
) -> None:
    """Deal the tensors out to shards in no layer order, with an index."""
    weight_map = {}
    for index in range(num_shards):
        number = f"{index + 1:05d}-of-{num_shards:05d}"
        is_prefix = style == "model-00001-of-00002"
        file = (
            f"model-{number}.safetensors"
            if is_prefix
            else f"model.safetensors-{number}.safetensors"
        )
        names = list(tensors)[index::num_shards][::-1]
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(len(tensor.data) for tensor in tensors.values())
    index_document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index_document)


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file's object; `None` writes a null."""
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})
