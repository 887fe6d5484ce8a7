"""Layers of a DFlash draft model on the CPU: what the context leaves in the pages, and the passes
of blocks over it.

    context   keys and values of ordinal p are projections of what the target made of token p, the
              same for every layer; they never go through the layers
    blocks    hidden += attention(norm(hidden)); hidden += mlp(norm(hidden)), in a DFlash2 with a
              convolution before and behind both; a block's own keys and values are kept nowhere

All products are `tiled`, so what a sequence gets depends neither on how its context was cut into
units nor on the blocks beside its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, FloatArray, IntArray
from ninfer.models.dflash_config import BlockConvConfig, DflashConfig, DflashLayer
from ninfer.ops import (
    dflash_attention,
    dflash_conv,
    kv_write,
    linear,
    qk_norm,
    rms_norm,
    rotary,
    swiglu,
)

Weights: TypeAlias = Mapping[str, Float32Array]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of several sequences, one behind another.

    spans        (first row, row behind the last, cache ordinal of the first, page table) of each
    columns      [N] place of each row in its block
    cos, sin     [N, half]
    """

    spans: tuple[tuple[int, int, int, IntArray], ...]
    columns: NDArray[np.int64]
    cos: FloatArray
    sin: FloatArray


class DflashLayerModel:
    """One layer over its own pages [P, 64, Hk, D]."""

    def __init__(
        self,
        config: DflashConfig,
        layer: DflashLayer,
        prefix: str,
        weights: Weights,
        k_pages: Float32Array,
        v_pages: Float32Array,
    ) -> None:
        self._config = config
        self._layer = layer
        self._eps = config.rms_norm_eps
        self._pages = k_pages, v_pages
        att = config.attention
        self._scale = att.head_dim**-0.5
        self._q_proj = weights[f"{prefix}.attn.q_proj"]
        self._kv_proj = weights[f"{prefix}.attn.kv_proj"]
        self._o_proj = weights[f"{prefix}.attn.o_proj"]
        self._k_norm = weights[f"{prefix}.attn.k_norm"]
        self._qk_norm = qk_norm.stack_weights(
            weights[f"{prefix}.attn.q_norm"],
            self._k_norm,
            att.num_heads,
            att.num_kv_heads,
            offset=0.0,
        )
        self._gate_up = weights[f"{prefix}.mlp.gate_up"]
        self._down_proj = weights[f"{prefix}.mlp.down_proj"]
        self._attention = _Sublayer(config, prefix, "input_norm", "attention_conv", weights)
        self._mlp = _Sublayer(config, prefix, "post_norm", "mlp_conv", weights)

    def absorb(
        self, context: FloatArray, cos: FloatArray, sin: FloatArray, slots: NDArray[np.int64]
    ) -> None:
        """Write the keys and values of tokens whose context features are `context` [N, C]."""
        k, v = self._keys_and_values(context)
        k = rms_norm.reference(k, self._k_norm, eps=self._eps)
        rotary.reference(k, cos, sin)
        kv_write.reference(k, v, *self._pages, slots)

    def run(self, hidden: FloatArray, blocks: Blocks) -> None:
        """Add this layer's two contributions to hidden [N, C] in place."""
        self._attention.add(hidden, blocks, lambda x: self._attend(x, blocks))
        self._mlp.add(hidden, blocks, self._multiply)

    def _attend(self, x: FloatArray, blocks: Blocks) -> FloatArray:
        att = self._config.attention
        heads = att.num_heads
        q = linear.tiled(x, self._q_proj).reshape(x.shape[0], heads, att.head_dim)
        k, v = self._keys_and_values(x)
        qk = qk_norm.reference(q, k, self._qk_norm, eps=self._eps)
        rotary.reference(qk, blocks.cos, blocks.sin)
        y = np.empty(q.shape, x.dtype)
        for first, last, start, page_table in blocks.spans:
            y[first:last] = dflash_attention.reference(
                qk[first:last, :heads],
                qk[first:last, heads:],
                v[first:last],
                *self._pages,
                page_table,
                start=start,
                window=self._layer.window,
                is_causal=self._layer.is_causal,
                scale=self._scale,
            )
        return linear.tiled(y.reshape(x.shape[0], -1), self._o_proj)

    def _keys_and_values(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[N, Hk, D] both; keys neither normed nor rotated."""
        att = self._config.attention
        projected = linear.tiled(x, self._kv_proj)
        k, v = projected.reshape(-1, 2, att.num_kv_heads, att.head_dim).swapaxes(0, 1)
        return k, v * np.float32(self._config.value_scale)

    def _multiply(self, x: FloatArray) -> FloatArray:
        return linear.tiled(swiglu.reference(linear.tiled(x, self._gate_up)), self._down_proj)


class _Sublayer:
    """Norm, residual and the convolutions of a DFlash2 round attention or MLP."""

    def __init__(
        self, config: DflashConfig, prefix: str, norm: str, conv: str, weights: Weights
    ) -> None:
        self._eps = config.rms_norm_eps
        self._norm = weights[f"{prefix}.{norm}"]
        self._conv = None
        if config.conv is not None:
            self._conv = _BlockConv(config.conv, f"{prefix}.{conv}", weights)

    def add(
        self, hidden: FloatArray, blocks: Blocks, run: Callable[[FloatArray], FloatArray]
    ) -> None:
        x = rms_norm.reference(hidden, self._norm, eps=self._eps)
        hidden += run(x) if self._conv is None else self._conv.around(run, x, blocks.columns)


class _BlockConv:
    """Two convolutions whose taps both follow from what goes into the first."""

    def __init__(self, conv: BlockConvConfig, prefix: str, weights: Weights) -> None:
        self._num_taps = conv.num_taps
        self._base = weights[f"{prefix}.base"]
        self._kernel = weights[f"{prefix}.kernel"]

    def around(
        self,
        run: Callable[[FloatArray], FloatArray],
        x: FloatArray,
        columns: NDArray[np.int64],
    ) -> FloatArray:
        dynamic = linear.tiled(x, self._kernel).reshape(x.shape[0], 2, self._num_taps, -1)
        y = run(dflash_conv.reference(x, dynamic[:, 0], self._base[0], columns))
        return dflash_conv.reference(y, dynamic[:, 1], self._base[1], columns)
