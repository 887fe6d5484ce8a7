"""Rotary settings of HF configurations in all their spellings -> RopeConfig.

rope_parameters {rope_theta, rope_type, partial_rotary_factor, mrope_section, ...}
rope_theta + rope_scaling null
rope_theta + rope_scaling {rope_type | type, mrope_section, ...}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ninfer.artifact.json_document import Fields
from ninfer.contract.model import RopeConfig

Sections = tuple[int, int, int]
ROPE_TYPES: Final = ("default", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a model family assumes for keys its configuration leaves out.

    theta            with a rope block, or without one
    bare_theta       when the configuration says nothing at all about rope
    partial_factor   share of the head that is rotated
    is_partial       whether any other share than 1 is legal
    """

    theta: float
    bare_theta: float
    partial_factor: float
    is_partial: bool
    mrope_section: Sections | None


def parse_rope(
    text: Fields, defaults: RopeDefaults, head_dim: int, max_position: int
) -> RopeConfig:
    """Raises ModelFileError naming the key."""
    block = _rope_block(text)
    rope_type = _rope_type(block)
    mrope_section = _mrope_section(block, defaults)
    theta = _theta(text, block, defaults)
    rotary_dim = _rotary_dim(text, block, defaults, head_dim)
    if rope_type == "default":
        return RopeConfig(theta, rotary_dim, mrope_section)
    original = _original_max_position(text, block)
    beta_fast = block.number("beta_fast", 0.0, 1e6, default=32.0, above=True)
    beta_slow = block.number("beta_slow", 0.0, 1e6, default=1.0, above=True)
    if rope_type == "yarn":
        _check_yarn(text, block, theta, beta_fast, beta_slow)
    return RopeConfig(
        theta,
        rotary_dim,
        mrope_section,
        rope_type,
        factor=_factor(block, max_position, original),
        original_max_position=max_position if original is None else original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_attention_factor(block) if rope_type == "yarn" else None,
    )


def extended_max_position(rope: RopeConfig, max_position: int) -> int:
    """Positions a scaled rope reaches: `factor` times what the model was trained on."""
    if rope.original_max_position is None:
        return max_position
    return max(max_position, int(rope.factor * rope.original_max_position))


def _rope_block(text: Fields) -> Fields:
    """`rope_parameters`, else `rope_scaling`, else an empty object."""
    if text.has("rope_parameters"):
        block = text.child("rope_parameters")
        if text.has("rope_scaling") and text.child("rope_scaling").values != block.values:
            raise text.error("rope_scaling", "contradicts rope_parameters")
    elif text.has("rope_scaling"):
        block = text.child("rope_scaling")
    else:
        return Fields(text.path, {}, text.prefix + "rope_parameters.")
    for key, value in block.values.items():
        if isinstance(value, dict):
            raise block.error(key, "rope settings per layer type are not supported")
    return block


def _rope_type(block: Fields) -> str:
    key = "rope_type" if block.has("rope_type") else "type"
    rope_type = block.text(key, default="default")
    # Early Qwen-VL files call plain multi-axis rope "mrope".
    if rope_type == "mrope" and block.has("mrope_section"):
        return "default"
    if rope_type not in ROPE_TYPES:
        raise block.error(key, f"{rope_type!r} is not supported ({', '.join(ROPE_TYPES)})")
    return rope_type


def _theta(text: Fields, block: Fields, defaults: RopeDefaults) -> float:
    if block.has("rope_theta"):
        return block.number("rope_theta", 0.0, 1e12, above=True)
    says_nothing = not (text.has("rope_theta") or block.values)
    default = defaults.bare_theta if says_nothing else defaults.theta
    return text.number("rope_theta", 0.0, 1e12, default=default, above=True)


def _rotary_dim(text: Fields, block: Fields, defaults: RopeDefaults, head_dim: int) -> int:
    fields = block if block.has("partial_rotary_factor") else text
    factor = fields.number(
        "partial_rotary_factor", 0.0, 1.0, default=defaults.partial_factor, above=True
    )
    if factor != 1.0 and not defaults.is_partial:
        raise fields.error("partial_rotary_factor", f"{factor:g}: this architecture rotates all")
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"{factor:g} of head_dim {head_dim} gives {rotary_dim} rotary dimensions; "
            "an even number is needed",
        )
    return rotary_dim


def _mrope_section(block: Fields, defaults: RopeDefaults) -> Sections | None:
    if not block.has("mrope_section"):
        return defaults.mrope_section
    sections = block.integers("mrope_section", 0, 65_536)
    if len(sections) != 3:
        raise block.error("mrope_section", f"expected three integers, found {len(sections)}")
    if not block.flag("mrope_interleaved", True):
        raise block.error("mrope_interleaved", "only interleaved sections are supported")
    return sections[0], sections[1], sections[2]


def _original_max_position(text: Fields, block: Fields) -> int | None:
    """The key beside the rope block wins over the one in it, as in transformers."""
    key = "original_max_position_embeddings"
    fields = text if text.has(key) else block
    return fields.integer(key, 1) if fields.has(key) else None


def _check_yarn(
    text: Fields, block: Fields, theta: float, beta_fast: float, beta_slow: float
) -> None:
    """The ramp between the two betas needs frequencies that fall and betas in order."""
    if theta <= 1.0:
        fields = block if block.has("rope_theta") else text
        raise fields.error("rope_theta", f"{theta:g}: yarn needs more than 1")
    if beta_fast < beta_slow:
        raise block.error("beta_fast", f"{beta_fast:g} is below beta_slow {beta_slow:g}")


def _factor(block: Fields, max_position: int, original: int | None) -> float:
    if block.has("factor") or original is None:
        return block.number("factor", 1.0, 1e6)
    return max(1.0, max_position / original)


def _attention_factor(block: Fields) -> float | None:
    if not block.flag("truncate", True):
        raise block.error("truncate", "false is not supported")
    if block.has("attention_factor"):
        return block.number("attention_factor", 0.0, 1e6, above=True)
    if not (block.has("mscale") and block.has("mscale_all_dim")):
        return None
    factor = block.number("factor", 1.0, 1e6)
    scales = [
        0.1 * block.number(key, 0.0, 1e6, above=True) * math.log(factor) + 1.0
        for key in ("mscale", "mscale_all_dim")
    ]
    return scales[0] / scales[1]
