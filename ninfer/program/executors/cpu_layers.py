"""CpuLayers: the blocks of a decoder layer as Ops over float32 weights and CpuMemory.

    x += mixer(norm(x));  x += mlp(norm(x))

A target's layers and those of its MTP module are the same ones. Weights are only read; the norm
offset is added to copies of the norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ninfer.contract.arrays import Float32Array, FloatArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import GdnConfig, LayerConfig, MixerKind, MlpKind, ModelConfig, MoeConfig
from ninfer.models.parameters import model_objects
from ninfer.ops import (
    gated_rms_norm,
    gdn_chunked,
    gdn_conv,
    gdn_gates,
    gdn_recurrent,
    kv_write,
    l2_norm,
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


class DecoderLayer:
    """`prefix` names its weights."""

    def __init__(
        self, config: ModelConfig, prefix: str, weights: Weights, mixer: Block, mlp: Block
    ) -> None:
        offset = np.float32(config.norm_offset)
        self._eps = config.rms_norm_eps
        self._input_norm = weights[f"{prefix}.input_norm"] + offset
        self._post_norm = weights[f"{prefix}.post_norm"] + offset
        self._mixer = mixer
        self._mlp = mlp

    def mixer_input(self, hidden: FloatArray) -> FloatArray:
        """What the mixer gets of the residual stream."""
        return rms_norm.reference(hidden, self._input_norm, eps=self._eps)

    def run(self, hidden: FloatArray, batch: TokenBatch) -> None:
        """Add this layer's two contributions in place."""
        hidden += self._mixer.run(self.mixer_input(hidden), batch)
        hidden += self._mlp.run(rms_norm.reference(hidden, self._post_norm, eps=self._eps), batch)


class AttentionMixer:
    """Attention over keys and values in `k_pages` and `v_pages`."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        weights: Weights,
        k_pages: Float32Array,
        v_pages: Float32Array,
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
        self._k_pages = k_pages
        self._v_pages = v_pages

    def write_keys(self, x: FloatArray, batch: TokenBatch) -> None:
        """Keys and values of a batch that asks nothing."""
        att = self._config
        num_rows = 2 * att.num_kv_heads * att.head_dim
        projected = batch.project(x, self._qkv_proj[-num_rows:])
        k, v = projected.reshape(x.shape[0], 2, att.num_kv_heads, att.head_dim).swapaxes(0, 1)
        k = rms_norm.reference(k, self._qk_norm[att.num_heads :], eps=self._eps)
        rotary.reference(k, batch.cos, batch.sin)
        kv_write.reference(k, v, self._k_pages, self._v_pages, batch.slot_mapping)

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


def text_layer(
    config: ModelConfig, layer: LayerConfig, weights: Weights, memory: CpuMemory
) -> DecoderLayer:
    """A layer of the target."""
    prefix = f"layers.{layer.index}"
    mixer = _mixer_of(config, layer, prefix, weights, memory)
    return DecoderLayer(config, prefix, weights, mixer, mlp_of(config, layer.mlp, prefix, weights))


def _mixer_of(
    config: ModelConfig, layer: LayerConfig, prefix: str, weights: Weights, memory: CpuMemory
) -> Block:
    if layer.mixer is MixerKind.ATTENTION:
        pages = memory.k_pages[layer.kind_index], memory.v_pages[layer.kind_index]
        return AttentionMixer(config, prefix, weights, *pages)
    if config.gdn is None:
        raise InvariantError(f"{prefix} is a GDN layer of a model without GDN sizes")
    return _GdnMixer(config, config.gdn, layer, prefix, weights, memory)


def mlp_of(config: ModelConfig, kind: MlpKind, prefix: str, weights: Weights) -> Block:
    """The MLP whose weights `prefix` names."""
    if kind is MlpKind.DENSE:
        return _DenseMlp(prefix, weights)
    if config.moe is None:
        raise InvariantError(f"{prefix} is a MoE layer of a model without MoE sizes")
    return _MoeMlp(config.moe, prefix, weights)


def check_weights(config: ModelConfig, weights: Weights, component: str) -> None:
    """Raise InvariantError unless all weights of a component are there, float32 and in shape."""
    for item in model_objects(config):
        if item.component != component:
            continue
        weight = weights.get(item.name)
        if weight is None:
            raise InvariantError(f"weight {item.name} is missing")
        if weight.shape != item.shape or weight.dtype != np.float32:
            found = f"{weight.dtype} {weight.shape}"
            raise InvariantError(f"weight {item.name} is {found}, expected float32 {item.shape}")
