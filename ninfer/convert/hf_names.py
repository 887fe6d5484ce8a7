"""Names and shapes under which HF checkpoints store the logical parameters.

Text tensors stand under `model.` (text-only classes) or `model.language_model.` (wrappers), the
head and `mtp.` at the top, vision under `model.visual.`. Experts come stacked (`[E, 2I, C]` and
`[E, C, I]`, without a `.weight` suffix) or as one matrix each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Final

from ninfer.contract.model import LogicalParameter
from ninfer.models.bindings import vision_object_name

StoredShape = tuple[str, tuple[int, ...]]
"""Name and shape of a stored tensor."""

WRAPPER_PREFIX: Final = "model.language_model."
TEXT_PREFIX: Final = "model."
VISION_PREFIXES: Final = ("model.visual.", "visual.")
HEAD_NAME: Final = "lm_head.weight"
MTP_PREFIX: Final = "mtp."
IGNORED_SUFFIXES: Final = (".inv_freq",)
"""Buffers that old library versions saved; they follow from the configuration."""

_LAYER_NAMES: Final = MappingProxyType(
    {
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        **{
            f"attn.{name}": f"self_attn.{name}.weight"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        },
        "gdn.in_qkv": "linear_attn.in_proj_qkv.weight",
        "gdn.in_z": "linear_attn.in_proj_z.weight",
        "gdn.in_b": "linear_attn.in_proj_b.weight",
        "gdn.in_a": "linear_attn.in_proj_a.weight",
        "gdn.conv": "linear_attn.conv1d.weight",
        "gdn.A_log": "linear_attn.A_log",
        "gdn.dt_bias": "linear_attn.dt_bias",
        "gdn.norm": "linear_attn.norm.weight",
        "gdn.out_proj": "linear_attn.out_proj.weight",
        "moe.router": "mlp.gate.weight",
        "moe.experts.gate_up": "mlp.experts.gate_up_proj",
        "moe.experts.down": "mlp.experts.down_proj",
        "moe.shared_gate": "mlp.shared_expert_gate.weight",
        **{
            f"{ours}.{name}": f"{theirs}.{name}.weight"
            for ours, theirs in (("mlp", "mlp"), ("moe.shared", "mlp.shared_expert"))
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    }
)
_TOP_NAMES: Final = MappingProxyType(
    {
        "lm_head": HEAD_NAME,
        "mtp.fc": "mtp.fc.weight",
        "mtp.norm": "mtp.norm.weight",
        "mtp.norm_embedding": "mtp.pre_fc_norm_embedding.weight",
        "mtp.norm_hidden": "mtp.pre_fc_norm_hidden.weight",
    }
)


def text_prefix(names: Iterable[str]) -> str:
    """The prefix this checkpoint uses for its text tensors."""
    is_wrapped = any(name.startswith(WRAPPER_PREFIX) for name in names)
    return WRAPPER_PREFIX if is_wrapped else TEXT_PREFIX


def stored_name(parameter: str, prefix: str) -> str:
    """HF name of a logical parameter."""
    if parameter in _TOP_NAMES:
        return _TOP_NAMES[parameter]
    if parameter.startswith(MTP_PREFIX):
        prefix, parameter = MTP_PREFIX, parameter.removeprefix(MTP_PREFIX)
    if not parameter.startswith("layers."):
        return f"{prefix}{parameter}.weight"
    _, index, leaf = parameter.split(".", 2)
    return f"{prefix}layers.{index}.{_LAYER_NAMES[leaf]}"


def stored_shape(parameter: LogicalParameter, prefix: str) -> StoredShape:
    """Name and shape of the one tensor that holds the parameter."""
    name, shape = stored_name(parameter.name, prefix), parameter.shape
    if parameter.name.endswith(".gdn.conv"):
        return name, (shape[0], 1, shape[1])
    return name, shape


def expert_shapes(parameter: LogicalParameter, prefix: str) -> Iterator[StoredShape]:
    """The matrices of a stacked parameter when every expert has its own; empty for others."""
    stacked = stored_name(parameter.name, prefix)
    stem, _, leaf = stacked.rpartition(".")
    if not stem.endswith(".experts"):
        return
    num_experts, rows, columns = parameter.shape
    for index in range(num_experts):
        if leaf == "down_proj":
            yield f"{stem}.{index}.down_proj.weight", (rows, columns)
        else:
            yield f"{stem}.{index}.gate_proj.weight", (rows // 2, columns)
            yield f"{stem}.{index}.up_proj.weight", (rows // 2, columns)


def vision_name(name: str) -> str | None:
    """Object name of a vision tensor, None for other tensors."""
    for prefix in VISION_PREFIXES:
        if name.startswith(prefix):
            return vision_object_name(name.removeprefix(prefix))
    return None
