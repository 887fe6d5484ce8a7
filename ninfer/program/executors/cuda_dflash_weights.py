"""Which weights of a DFlash draft model lie on the device, and which such models have kernels.

Every object is named `draft.` and its own name. A guess needs no exact numbers: where the target's
projections have fewer than 16 bits, those of the draft are e4m3 with a scale a row. Convolutions,
the selector, embedding and head stay bf16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ninfer.contract.model import ModelObject
from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import dflash_block, dflash_selector
from ninfer.ops.device_sampling import MAX_TOP
from ninfer.ops.dflash_block import BlockRules, LayerKind
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.program.executors.cuda_support import unsupported_layers
from ninfer.program.executors.cuda_weights import MatrixSpec, VectorSpec, WeightPlan
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.executors.draft_shape import dflash_shape

PREFIX: Final = "draft."
_GATHERED: Final = ("embed_tokens", "predecessors", "successors")
"""Objects of two axes of which rows are read by their number."""
_WIDE: Final = ("kernel", "hidden", "lm_head")
"""Matrices that stay bf16."""


def with_dflash(plan: WeightPlan, setup: DflashSetup) -> WeightPlan:
    """The plan of a target with the draft's weights behind. Raises OpContractError for sizes that
    have no image."""
    fmt = _format_beside(plan)
    matrices = tuple(_matrix(item, fmt) for item in setup.objects if _is_multiplied(item))
    vectors = tuple(
        VectorSpec(PREFIX + item.name, item.shape, "uint16")
        for item in setup.objects
        if not _is_multiplied(item)
    )
    return replace(
        plan,
        matrices=(*plan.matrices, *matrices),
        vectors=(*plan.vectors, *vectors),
        draft_shape=dflash_shape(setup.config),
        dflash=setup,
    )


def layer_kinds(config: DflashConfig) -> tuple[LayerKind, ...]:
    """Of its layers, each once."""
    return tuple(dict.fromkeys((layer.window, layer.is_causal) for layer in config.layers))


def block_rules(setup: DflashSetup) -> BlockRules:
    """What the blocks of a draft share."""
    config, candidates = setup.config, 0
    if config.selector is not None:
        candidates = min(config.selector.top_k, setup.num_token_ids)
    return BlockRules(config.mask_token_id, layer_kinds(config), candidates)


def unsupported_reason(config: DflashConfig) -> str | None:
    """What of the draft model has no kernel, or None."""
    num_kinds, selector = len(layer_kinds(config)), config.selector
    reason = unsupported_layers(config.attention, config.hidden_size, config.intermediate_size)
    if reason is not None:
        return reason
    if num_kinds > dflash_block.MAX_KINDS:
        return f"{num_kinds} kinds of layers, at most {dflash_block.MAX_KINDS}"
    if selector is None:
        return None
    if selector.top_k > MAX_TOP:
        return f"a selector of {selector.top_k} candidates, at most {MAX_TOP}"
    if selector.rank % 8 or selector.rank > dflash_selector.MAX_RANK:
        return (
            f"a selector of rank {selector.rank}, not a multiple of 8 up to"
            f" {dflash_selector.MAX_RANK}"
        )
    return None


def _format_beside(plan: WeightPlan) -> WeightFormat:
    widths = {matrix.layout.format for matrix in plan.matrices}
    return WeightFormat.BF16 if widths <= {WeightFormat.BF16} else WeightFormat.FP8_ROW


def _is_multiplied(item: ModelObject) -> bool:
    return len(item.shape) == 2 and _leaf(item) not in _GATHERED


def _matrix(item: ModelObject, fmt: WeightFormat) -> MatrixSpec:
    rows, columns = item.shape
    used = WeightFormat.BF16 if _leaf(item) in _WIDE else fmt
    return MatrixSpec(
        PREFIX + item.name,
        ImageLayout.of(used, rows, columns),
        is_interleaved=_leaf(item) == "gate_up",
    )


def _leaf(item: ModelObject) -> str:
    return item.name.rpartition(".")[2]
