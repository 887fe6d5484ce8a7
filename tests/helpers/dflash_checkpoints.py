"""Random DFlash and DFlash2 checkpoints in the published layout.

    folder = write_dflash(tmp_path / "draft", DflashSpec(hidden_size=96, vocab_size=512))

Names and shapes are written out here on their own, so that a mistake in the product's mapping
shows. Everything follows from the spec and its seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.helpers.checkpoints import (
    RawTensor,
    Values,
    decode,
    encode,
    write_json,
    write_safetensors,
)


@dataclass(frozen=True)
class DflashSpec:
    """Sizes and layout; the defaults fit the golden model qwen3_5-dense.

    is_second       a DFlash2: convolutions and selector
    style           how config.json is spelled
    token_ids       tokens of a smaller head of its own, for `d2t`
    overrides       top keys of config.json (None removes one); draft_overrides of dflash_config
    values          tensors whose values are given, by stored name
    """

    hidden_size: int = 96
    vocab_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 80
    tap_layers: tuple[int, ...] = (0, 2)
    num_target_layers: int = 4
    block_size: int = 6
    mask_token_id: int = 500
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")
    sliding_window: int = 8
    is_causal: bool | None = None
    is_second: bool = False
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 12
    selector_top_k: int = 6
    style: Literal["flat", "speculators"] = "flat"
    token_ids: tuple[int, ...] | None = None
    has_embedding: bool = False
    dtype: Literal["BF16", "F16", "F32"] = "BF16"
    seed: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    draft_overrides: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)

    @property
    def head_rows(self) -> int:
        return self.vocab_size if self.token_ids is None else len(self.token_ids)


DEMO_DRAFT = DflashSpec(
    hidden_size=384,
    vocab_size=4096,
    num_target_layers=12,
    mask_token_id=4090,
    tap_layers=(2, 6, 10),
    intermediate_size=128,
)
"""For the embedded demo model."""


def variants(first: DflashSpec, second: DflashSpec) -> dict[str, DflashSpec]:
    """Of a DFlash and a DFlash2: everything that a configuration may change, by a name."""
    return {
        "first": first,
        "second": second,
        "free": replace(first, is_causal=False),
        "causal": replace(second, is_causal=True, conv_taps=3),
        "narrow": replace(first, sliding_window=3, is_causal=False),
        "exported": replace(
            first, style="speculators", token_ids=tuple(range(2, 500, 5)), has_embedding=True
        ),
        "scaled": replace(
            second,
            draft_overrides={
                "attention_value_scale": 0.6,
                "input_embedding_scale": 1.7,
                "output_multiplier": 0.4,
                "final_logit_softcapping": 5.0,
            },
        ),
    }


def write_dflash(folder: Path, spec: DflashSpec) -> Path:
    """Write config.json and the weights; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dflash_config(spec))
    write_safetensors(folder / "model.safetensors", dflash_tensors(spec))
    return folder


def dflash_tensors(spec: DflashSpec) -> dict[str, RawTensor]:
    """What the file holds, by stored name."""
    rng = np.random.default_rng(spec.seed)
    tensors = {}
    for name, shape in stored_shapes(spec):
        values = _draw(rng, name, shape)
        tensors[name] = encode(spec.values.get(name, values), spec.dtype)
    if spec.token_ids is not None:
        offsets = np.array(spec.token_ids, "<i8") - np.arange(len(spec.token_ids))
        tensors["d2t"] = RawTensor("I64", offsets.shape, offsets.astype("<i8").tobytes())
        is_drafted = np.isin(np.arange(spec.vocab_size), spec.token_ids)
        tensors["t2d"] = RawTensor("U8", is_drafted.shape, is_drafted.astype(np.uint8).tobytes())
    return tensors


def dflash_values(spec: DflashSpec) -> dict[str, Values]:
    """Stored name -> what the file holds, as float32."""
    tensors = dflash_tensors(spec).items()
    return {
        name: decode(tensor) for name, tensor in tensors if tensor.dtype in ("BF16", "F16", "F32")
    }


def dflash_config(spec: DflashSpec) -> dict[str, Any]:
    """The config.json of a spec."""
    second = {
        "conv_kernel_size": spec.conv_taps,
        "conv_group_size": spec.conv_group,
        "selector_rank": spec.selector_rank,
        "selector_top_k": spec.selector_top_k,
    }
    top: dict[str, Any]
    draft: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        **(second if spec.is_second else {}),
    }
    if spec.style == "speculators":
        top = {
            "architectures": ["DFlash2DraftModel" if spec.is_second else "DFlashSpeculator"],
            "speculators_model_type": "dflash2" if spec.is_second else "dflash",
            "transformer_layer_config": _body(spec),
            "draft_vocab_size": spec.head_rows,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.tap_layers],
            "sliding_window_non_causal": not spec.is_causal,
            **draft,
        }
    else:
        name = "DFlash2DraftModel" if spec.is_second else "DFlashDraftModel"
        draft |= {"target_layer_ids": list(spec.tap_layers), **spec.draft_overrides}
        top = {
            "architectures": [name],
            "is_causal": spec.is_causal,
            **_body(spec),
            "num_target_layers": spec.num_target_layers,
            "draft_vocab_size": None if spec.token_ids is None else spec.head_rows,
            "dflash_config": {key: value for key, value in draft.items() if value is not None},
        }
    merged = {**top, **spec.overrides}
    return {key: value for key, value in merged.items() if value is not None}


def _body(spec: DflashSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
    }


def stored_shapes(spec: DflashSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, but for the token map."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield "fc.weight", (hidden, len(spec.tap_layers) * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for index in range(spec.num_layers):
        prefix = f"layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (width, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_width, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_width, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, width)
        yield f"{prefix}.self_attn.q_norm.weight", (spec.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (spec.head_dim,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        if spec.is_second:
            rows = 2 * spec.conv_taps * hidden // spec.conv_group
            for conv in ("attention_conv", "mlp_conv"):
                yield f"{prefix}.{conv}.base_kernel", (2, spec.conv_taps, hidden)
                yield f"{prefix}.{conv}.kernel_projection.weight", (rows, hidden)
    if spec.is_second:
        codebook = (spec.vocab_size, spec.selector_rank)
        yield "candidate_selector.predecessor_codebook", codebook
        yield "candidate_selector.successor_codebook", codebook
        yield "candidate_selector.hidden_projection.weight", (spec.selector_rank, hidden)
    if spec.has_embedding:
        yield "embed_tokens.weight", (spec.vocab_size, hidden)
    if spec.token_ids is not None:
        yield "lm_head.weight", (spec.head_rows, hidden)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Values:
    """Scaled so that no part of a block is dead and the selector has a say."""
    if len(shape) == 1:
        values = rng.normal(1.0, 0.2, shape)
    elif name.endswith("base_kernel"):
        values = rng.normal(0.0, 0.3, shape)
        values[:, 0] += 1.0
    elif "codebook" in name or name.startswith("embed"):
        values = rng.normal(0.0, 1.0, shape)
    elif name.endswith("kernel_projection.weight"):
        values = rng.normal(0.0, 0.3 / math.sqrt(shape[-1]), shape)
    else:
        values = rng.normal(0.0, 1.0 / math.sqrt(shape[-1]), shape)
    return values.astype(np.float32)
