"""CpuModel: a text model over float32 weights and CpuMemory.

    hidden = embed(tokens);  hidden = layers(hidden);  logits = head(final_norm(hidden))

Owns the order of the layers. Weights are only read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.model import ModelConfig
from ninfer.ops import embedding, linear, rms_norm
from ninfer.program.executors.cpu_batch import TokenBatch
from ninfer.program.executors.cpu_layers import Weights, check_weights, text_layer
from ninfer.program.executors.cpu_memory import CpuMemory


class CpuModel:
    """The text model. One unit at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, memory: CpuMemory) -> None:
        check_weights(config, weights, "text")
        self._eps = config.rms_norm_eps
        self._embed_tokens = weights["embed_tokens"]
        self._lm_head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
        self._norm = weights["norm"] + np.float32(config.norm_offset)
        self._layers = tuple(text_layer(config, layer, weights, memory) for layer in config.layers)

    def embed(self, token_ids: IntArray) -> FloatArray:
        """[N, C]"""
        return embedding.reference(token_ids, self._embed_tokens)

    def hidden_states(self, batch: TokenBatch) -> Iterator[FloatArray]:
        """The residual stream [N, C]: after the embedding, then after each layer.

        It is one array that the next layer changes; the last one yielded goes to `final_norm`.
        """
        hidden = self.embed(batch.token_ids)
        yield hidden
        for layer in self._layers:
            layer.run(hidden, batch)
            yield hidden

    def final_norm(self, hidden: FloatArray) -> FloatArray:
        """[N, C] from the last residual stream."""
        return rms_norm.reference(hidden, self._norm, eps=self._eps)

    def head(self, hidden: FloatArray, project: linear.Projection) -> FloatArray:
        """Logits [N, V] of what is behind the final norm."""
        return project(hidden, self._lm_head)
