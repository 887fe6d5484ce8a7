"""CpuModel: the layers of a text model as Ops over float32 weights and CpuMemory.

    hidden = embed(tokens);  each layer: hidden += mixer(norm(hidden)); hidden += mlp(norm(hidden))
    logits = lm_head(norm(hidden))

Owns the order of the Ops. Weights are only read; the norm offset is added to copies of the norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from ninfer.contract.arrays import Float32Array, FloatArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import GdnConfig, LayerConfig, MixerKind, MlpKind, ModelConfig, MoeConfig
from ninfer.models.parameters import model_objects
from ninfer.ops import (
    embedding,
    gated_rms_norm,
    gdn_chunked,
    gdn_conv,
    gdn_gates,
    gdn_recurrent,
    kv_write,
    l2_norm,
    linear,
    moe_experts,
    moe_router,
    output_gate,
    paged_attention,
    qk_norm,
    rms_norm,
    rotary,
    swiglu,
)
from ninfer.program.executors.cpu_batch import TokenBatch
from ninfer.program.executors.cpu_memory import CpuMemory

Weights = Mapping[str, Float32Array]


class Block(Protocol):
    """A mixer or an MLP: normalised hidden [N, C] -> what is added to the residual [N, C]."""

    def run(self, x: FloatArray, batch: TokenBatch) -> FloatArray: ...


class CpuModel:
    """The text model. One unit at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, memory: CpuMemory) -> None:
        _check_weights(config, weights)
        self._eps = config.rms_norm_eps
        self._embed_tokens = weights["embed_tokens"]
        self._lm_head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
        self._norm = weights["norm"] + np.float32(config.norm_offset)
        self._layers = tuple(_Layer(config, layer, weights, memory) for layer in config.layers)

    def hidden_states(self, batch: TokenBatch) -> Iterator[FloatArray]:
        """The residual stream [N, C]: after the embedding, then after each layer.

        It is one array that the next layer changes; the last one yielded goes to `logits`.
        """
        hidden = embedding.reference(batch.token_ids, self._embed_tokens)
        yield hidden
        for layer in self._layers:
            layer.run(hidden, batch)
            yield hidden

    def final_norm(self, hidden: FloatArray) -> FloatArray:
        return rms_norm.reference(hidden, self._norm, eps=self._eps)

    def logits(self, hidden: FloatArray, project: linear.Projection) -> FloatArray:
        """[N, V] from the last residual stream [N, C]."""
        return project(self.final_norm(hidden), self._lm_head)


class _Layer:
    def __init__(
        self, config: ModelConfig, layer: LayerConfig, weights: Weights, memory: CpuMemory
    ) -> None:
        prefix = f"layers.{layer.index}"
        offset = np.float32(config.norm_offset)
        self._eps = config.rms_norm_eps
        self._input_norm = weights[f"{prefix}.input_norm"] + offset
        self._post_norm = weights[f"{prefix}.post_norm"] + offset
        self._mixer = _mixer(config, layer, prefix, weights, memory)
        self._mlp = _mlp(config, layer, prefix, weights)

    def run(self, hidden: FloatArray, batch: TokenBatch) -> None:
        """Add this layer's two contributions in place."""
        hidden += self._mixer.run(
            rms_norm.reference(hidden, self._input_norm, eps=self._eps), batch
        )
        hidden += self._mlp.run(rms_norm.reference(hidden, self._post_norm, eps=self._eps), batch)


class _AttentionMixer:
    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        prefix: str,
        weights: Weights,
        memory: CpuMemory,
    ) -> None:
        att = config.attention
        self._config = att
        self._eps = config.rms_norm_eps
        self._scale = att.head_dim**-0.5
        self._qkv_proj = weights[f"{prefix}.attn.qkv_proj"]
        self._o_proj = weights[f"{prefix}.attn.o_proj"]
        self._qk_norm = qk_norm.stack_weights(
            weights[f"{prefix}.attn.q_norm"],
            weights[f"{prefix}.attn.k_norm"],
            att.num_heads,
            att.num_kv_heads,
            offset=config.norm_offset,
        )
        self._k_pages = memory.k_pages[layer.kind_index]
        self._v_pages = memory.v_pages[layer.kind_index]

    def run(self, x: FloatArray, batch: TokenBatch) -> FloatArray:
        heads = self._config.num_heads
        q, gate, k, v = self._split(batch.project(x, self._qkv_proj))
        qk = qk_norm.reference(q, k, self._qk_norm, eps=self._eps)
        rotary.reference(qk, batch.cos, batch.sin)
        kv_write.reference(qk[:, heads:], v, self._k_pages, self._v_pages, batch.slot_mapping)
        y = np.empty(q.shape, x.dtype)
        for segment in batch.segments:
            y[segment.first : segment.last] = paged_attention.reference(
                qk[segment.first : segment.last, :heads],
                self._k_pages,
                self._v_pages,
                segment.blocks,
                start=segment.start,
                scale=self._scale,
            )
        if gate is not None:
            output_gate.reference(y, gate)
        return batch.project(y.reshape(x.shape[0], -1), self._o_proj)

    def _split(
        self, projected: FloatArray
    ) -> tuple[FloatArray, FloatArray | None, FloatArray, FloatArray]:
        """Views of the fused projection: q, gate [N, H, D], k and v [N, Hk, D]."""
        att = self._config
        num_tokens, dim = projected.shape[0], att.head_dim
        v_first = projected.shape[1] - att.num_kv_heads * dim
        k_first = v_first - att.num_kv_heads * dim
        q = projected[:, :k_first].reshape(num_tokens, att.num_heads, -1)
        k, v = projected[:, k_first:v_first], projected[:, v_first:]
        gate = q[:, :, dim:] if att.has_output_gate else None
        shape = (num_tokens, att.num_kv_heads, dim)
        return q[:, :, :dim], gate, k.reshape(shape), v.reshape(shape)


class _GdnMixer:
    def __init__(
        self,
        config: ModelConfig,
        gdn: GdnConfig,
        layer: LayerConfig,
        prefix: str,
        weights: Weights,
        memory: CpuMemory,
    ) -> None:
        prefix = f"{prefix}.gdn"
        self._config = gdn
        self._eps = config.rms_norm_eps
        self._q_scale = gdn.key_head_dim**-0.5
        self._in_proj = weights[f"{prefix}.in_proj"]
        # Contiguous by tap, because the convolution multiplies all channels by one tap at a time.
        self._conv = np.ascontiguousarray(weights[f"{prefix}.conv"].T).T
        self._a_log = weights[f"{prefix}.A_log"]
        self._dt_bias = weights[f"{prefix}.dt_bias"]
        self._norm = weights[f"{prefix}.norm"]
        self._out_proj = weights[f"{prefix}.out_proj"]
        self._windows = memory.windows[:, layer.kind_index]
        self._states = memory.states[:, layer.kind_index]

    def run(self, x: FloatArray, batch: TokenBatch) -> FloatArray:
        gdn, num_tokens = self._config, x.shape[0]
        mixed, z, b, a = self._split(batch.project(x, self._in_proj))
        q, k, v = self._heads(self._convolve(mixed, batch))
        beta, g = gdn_gates.reference(b, a, self._a_log, self._dt_bias)
        if batch.window is None:
            y = self._delta_rule(q, k, v, g, beta, batch)
        else:
            y = batch.window.delta_rule(mixed, q, k, v, g, beta, self._windows, self._states)
        y = gated_rms_norm.reference(y, z.reshape(y.shape), self._norm, eps=self._eps)
        return batch.project(y.reshape(num_tokens, gdn.value_dim), self._out_proj)

    def _split(
        self, projected: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Views of the fused projection: qkv [N, Cd], z [N, vd], b and a [N, Hv]."""
        gdn = self._config
        z, b = gdn.conv_dim, gdn.conv_dim + gdn.value_dim
        a = b + gdn.num_value_heads
        return projected[:, :z], projected[:, z:b], projected[:, b:a], projected[:, a:]

    def _convolve(self, mixed: FloatArray, batch: TokenBatch) -> FloatArray:
        """[N, Cd]"""
        if batch.window is not None:
            return batch.window.convolve(mixed, self._conv, self._windows)
        return gdn_conv.reference(
            mixed.reshape(len(batch.segments), -1, mixed.shape[1]),
            self._conv,
            self._windows,
            batch.read_slots,
            batch.write_slots,
        ).reshape(mixed.shape)

    def _heads(self, convolved: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        gdn, num_tokens = self._config, convolved.shape[0]
        q, k = convolved[:, : gdn.key_dim], convolved[:, gdn.key_dim : 2 * gdn.key_dim]
        v = convolved[:, 2 * gdn.key_dim :]
        keys = (num_tokens, gdn.num_key_heads, gdn.key_head_dim)
        return (
            l2_norm.reference(q.reshape(keys), scale=self._q_scale),
            l2_norm.reference(k.reshape(keys)),
            v.reshape(num_tokens, gdn.num_value_heads, gdn.value_head_dim),
        )

    def _delta_rule(
        self,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        g: FloatArray,
        beta: FloatArray,
        batch: TokenBatch,
    ) -> FloatArray:
        if batch.is_decode:
            return gdn_recurrent.reference(
                q, k, v, g, beta, self._states, batch.read_slots, batch.write_slots
            )
        state = self._states[batch.read_slots[0]]
        y, self._states[batch.write_slots[0]] = gdn_chunked.reference(q, k, v, g, beta, state)
        return y


class _DenseMlp:
    def __init__(self, prefix: str, weights: Weights) -> None:
        self._gate_up = weights[f"{prefix}.mlp.gate_up"]
        self._down_proj = weights[f"{prefix}.mlp.down_proj"]

    def run(self, x: FloatArray, batch: TokenBatch) -> FloatArray:
        inner = swiglu.reference(batch.project(x, self._gate_up))
        return batch.project(inner, self._down_proj)


class _MoeMlp:
    def __init__(self, moe: MoeConfig, prefix: str, weights: Weights) -> None:
        prefix = f"{prefix}.moe"
        self._config = moe
        self._router = weights[f"{prefix}.router"]
        self._gate_up = weights[f"{prefix}.experts.gate_up"]
        self._down = weights[f"{prefix}.experts.down"]
        self._shared: tuple[Float32Array, Float32Array, Float32Array] | None = None
        if moe.shared_intermediate_size is not None:
            self._shared = (
                weights[f"{prefix}.shared_gate"],
                weights[f"{prefix}.shared.gate_up"],
                weights[f"{prefix}.shared.down_proj"],
            )

    def run(self, x: FloatArray, batch: TokenBatch) -> FloatArray:
        expert_ids, weights = moe_router.reference(
            batch.project(x, self._router),
            experts_per_token=self._config.experts_per_token,
            renormalise=self._config.renormalise,
        )
        y = moe_experts.reference(
            x, expert_ids, weights, self._gate_up, self._down, project=batch.project
        )
        if self._shared is not None:
            y += moe_experts.shared(x, *self._shared, project=batch.project)
        return y


def _mixer(
    config: ModelConfig, layer: LayerConfig, prefix: str, weights: Weights, memory: CpuMemory
) -> Block:
    if layer.mixer is MixerKind.ATTENTION:
        return _AttentionMixer(config, layer, prefix, weights, memory)
    if config.gdn is None:
        raise InvariantError(f"{prefix} is a GDN layer of a model without GDN sizes")
    return _GdnMixer(config, config.gdn, layer, prefix, weights, memory)


def _mlp(config: ModelConfig, layer: LayerConfig, prefix: str, weights: Weights) -> Block:
    if layer.mlp is MlpKind.DENSE:
        return _DenseMlp(prefix, weights)
    if config.moe is None:
        raise InvariantError(f"{prefix} is a MoE layer of a model without MoE sizes")
    return _MoeMlp(config.moe, prefix, weights)


def _check_weights(config: ModelConfig, weights: Weights) -> None:
    for item in model_objects(config):
        if item.component != "text":
            continue
        weight = weights.get(item.name)
        if weight is None:
            raise InvariantError(f"weight {item.name} is missing")
        if weight.shape != item.shape or weight.dtype != np.float32:
            found = f"{weight.dtype} {weight.shape}"
            raise InvariantError(f"weight {item.name} is {found}, expected float32 {item.shape}")
