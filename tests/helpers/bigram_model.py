"""A model of fixed logits: what comes next depends on the newest token alone.

Its layers add nothing, its embedding tells tokens apart and its output matrix is the table. So the
law of every choice can be written down, and the whole engine can be asked to make it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.units import Capacity
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.models.parameters import model_objects
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.program import ModelProgram
from tests.helpers.model_configs import hybrid_config

HIDDEN = 64
"""Most tokens of a vocabulary."""


def bigram_program(table: Float32Array, lanes: int, draft_tokens: int) -> ModelProgram:
    """`table` [V, V] has the logits behind each token, up to rounding."""
    vocab_size = table.shape[0]
    config = replace(
        hybrid_config(mixers="GA", vocab_size=vocab_size, hidden_size=HIDDEN),
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    weights = {
        item.name: np.zeros(item.shape, np.float32)
        for item in model_objects(config)
        if item.component == "text"
    }
    embedding = weights["embed_tokens"]
    embedding[:, :vocab_size] = np.eye(vocab_size, dtype=np.float32)
    # A vector with a single one comes out of the final norm as long as the root of its size.
    weights["lm_head"][:, :vocab_size] = table.T / np.float32(HIDDEN**0.5)
    limits = Capacity(lanes, 64, lanes, 2 * lanes + 1, 64, 0, draft_tokens)
    executor = CpuExecutor(config, weights, limits, num_threads=1)
    return ModelProgram(config, executor, limits)


@asynccontextmanager
async def bigram_engine(
    table: Float32Array, make_drafter: MakeDrafter, *, lanes: int = 8, draft_tokens: int = 3
) -> AsyncIterator[Engine]:
    engine = Engine(
        bigram_program(table, lanes, draft_tokens),
        max_pending=10_000,
        queue_timeout_s=600.0,
        make_drafter=make_drafter,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()
