"""Draft models on real executors: random ones, and one that always guesses right.

A target whose layers add nothing chooses by its newest token alone. `write_bigram_pair` writes such
a target and a DFlash2 whose selector holds just these logits: its guesses are the target's choices,
greedy and drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.model import ModelSource
from ninfer.contract.units import Capacity
from ninfer.convert.dflash_checkpoint import open_dflash
from ninfer.convert.source import open_model
from ninfer.ops import rms_norm
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_dflash import DflashModel
from tests.helpers import executor_driver as driver
from tests.helpers.checkpoints import (
    CheckpointSpec,
    Values,
    checkpoint_values,
    encode,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from tests.helpers.dflash_checkpoints import DflashSpec, stored_shapes, write_dflash

BIGRAM_VOCAB = 40
_SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def weights_of(source: ModelSource) -> dict[str, Float32Array]:
    return {item.name: array for item, array in source.read_float32()}


def load_draft(folder: Path, num_token_ids: int) -> DflashModel:
    opened = open_dflash(folder)
    weights = {item.name: array for item, array in opened.read_float32()}
    return DflashModel(opened.config, weights, opened.token_ids, num_token_ids)


def build_executor(
    source: ModelSource, draft: Path, capacity: Capacity | None = None
) -> CpuExecutor:
    """As driver.build_executor, with a draft model."""
    return CpuExecutor(
        source.config,
        weights_of(source),
        driver.default_capacity() if capacity is None else capacity,
        draft_model=load_draft(draft, source.config.vocab_size),
        num_threads=1,
    )


def write_bigram_pair(folder: Path, *, block_size: int = 6) -> tuple[Path, Path]:
    """Directories of a target and of its draft."""
    spec = CheckpointSpec(vocab_size=BIGRAM_VOCAB, dtype="F32")
    target = write_checkpoint(folder / "target", spec)
    path = target / "model.safetensors"
    tensors = read_tensors(path)
    for name, values in checkpoint_values(spec).items():
        if name.endswith(_SILENT):
            tensors[name] = encode(np.zeros_like(values), "F32")
    write_safetensors(path, tensors)
    return target, write_dflash(folder / "draft", _bigram_draft(target, block_size))


def bigram_logits(source: ModelSource) -> Float32Array:
    """[V, V] logits behind each token."""
    weights = weights_of(source)
    hidden = rms_norm.reference(
        weights["embed_tokens"],
        weights["norm"] + np.float32(source.config.norm_offset),
        eps=source.config.rms_norm_eps,
    )
    return np.asarray(hidden @ weights["lm_head"].T, np.float32)


def _bigram_draft(target: Path, block_size: int) -> DflashSpec:
    source = open_model(target)
    mask = BIGRAM_VOCAB - 2
    sizes = DflashSpec(
        hidden_size=source.config.hidden_size,
        vocab_size=BIGRAM_VOCAB,
        block_size=block_size,
        mask_token_id=mask,
        is_second=True,
        selector_rank=BIGRAM_VOCAB,
        selector_top_k=BIGRAM_VOCAB,
        dtype="F32",
    )
    weights = weights_of(source)
    ones = np.ones(source.config.hidden_size, np.float32)
    hidden = rms_norm.reference(weights["embed_tokens"][mask], ones, eps=1e-6)
    unary = weights["lm_head"] @ hidden
    values: dict[str, Values] = {
        name: np.zeros(shape, np.float32)
        for name, shape in stored_shapes(sizes)
        if name.endswith(_SILENT)
    }
    values["norm.weight"] = ones
    values["candidate_selector.predecessor_codebook"] = np.identity(BIGRAM_VOCAB, np.float32)
    edges = bigram_logits(source) - unary
    values["candidate_selector.successor_codebook"] = edges.T.astype(np.float32)
    gate = np.tile(hidden / (hidden @ hidden), (BIGRAM_VOCAB, 1))
    values["candidate_selector.hidden_projection.weight"] = gate.astype(np.float32)
    return DflashSpec(**{**vars(sizes), "values": values})
