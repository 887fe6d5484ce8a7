"""One Gated DeltaNet layer as the device sees it: random codes, and its oracle in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.model import GdnConfig
from ninfer.ops import (
    gated_rms_norm,
    gdn_chunked,
    gdn_conv,
    gdn_gates,
    gdn_recurrent,
    l2_norm,
)
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16

HalfArray = NDArray[np.uint16]
Float64Array = NDArray[np.float64]

EPS = 1e-6
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class GdnLayer:
    """Shapes as in gdn_device; the rows' tokens follow each other in projection [T, width]."""

    config: GdnConfig
    conv: HalfArray
    a_log: NDArray[np.float32]
    dt_bias: NDArray[np.float32]
    norm: HalfArray
    windows: HalfArray
    states: NDArray[np.float32]
    projection: HalfArray
    row_starts: NDArray[np.int32]
    read_slots: NDArray[np.int32]
    write_slots: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return int(self.row_starts[-1])

    def only_row(self, row: int, tokens: slice = slice(None)) -> GdnLayer:
        """The layer with one row, or with some of its tokens."""
        first, last = self.row_starts[row : row + 2]
        projection = self.projection[first:last][tokens]
        return replace(
            self,
            projection=projection,
            row_starts=np.array([0, projection.shape[0]], np.int32),
            read_slots=self.read_slots[row : row + 1],
            write_slots=self.write_slots[row : row + 1],
        )


@dataclass(frozen=True)
class GdnResult:
    """y [T, Hv * dv] not rounded; windows [R, Cd, W - 1], states [R, Hv, dv, dk] of the rows."""

    y: Float64Array
    windows: HalfArray
    states: Float64Array


def random_layer(
    config: GdnConfig,
    lengths: list[int],
    seed: int = 0,
    *,
    scale: float = 1.0,
    likeness: float = 0.0,
    slowness: float = 1.0,
) -> GdnLayer:
    """Rows of `lengths` tokens.

    scale      of q, k and v before the convolution
    likeness   0: tokens are independent; towards 1: keys resemble each other
    slowness   larger: the state decays less from token to token
    """
    rng = np.random.default_rng([seed, *lengths, config.key_head_dim, config.value_head_dim])
    num_rows, num_tokens = len(lengths), sum(lengths)
    num_slots, channels = 2 * num_rows + 1, config.conv_dim
    heads = config.num_value_heads
    mixed = rng.standard_normal((num_tokens, channels)) * (1 - likeness)
    mixed += rng.standard_normal(channels) * likeness
    rest = rng.standard_normal((num_tokens, config.value_dim + 2 * heads))
    rest[:, -heads:] -= np.log(slowness)
    order = rng.permutation(np.arange(1, num_slots, dtype=np.int32))
    state = (num_slots, NUM_LAYERS, heads, config.value_head_dim, config.key_head_dim)
    windows = rng.standard_normal((num_slots, NUM_LAYERS, channels, config.conv_width - 1))
    states = rng.standard_normal(state).astype(np.float32) * np.float32(scale)
    windows[0], states[0] = 0.0, 0.0
    return GdnLayer(
        config=config,
        conv=_bf16(rng.standard_normal((channels, config.conv_width)) * 0.5),
        a_log=np.log(rng.uniform(0.2, 8.0, heads)).astype(np.float32),
        dt_bias=rng.standard_normal(heads).astype(np.float32),
        norm=_bf16(rng.uniform(0.5, 1.5, config.value_head_dim)),
        windows=_bf16(windows * scale),
        states=states,
        projection=_bf16(np.concatenate((mixed * scale, rest), axis=1)),
        row_starts=np.cumsum([0, *lengths], dtype=np.int32),
        read_slots=np.where(np.arange(num_rows) == 0, 0, order[:num_rows]).astype(np.int32),
        write_slots=order[num_rows : 2 * num_rows],
    )


def oracle(layer: GdnLayer, *, in_chunks: bool = False) -> GdnResult:
    """Row after row by the references; in_chunks for rows too long for single steps."""
    rows = [_oracle_row(layer, row, in_chunks=in_chunks) for row in range(len(layer.read_slots))]
    return GdnResult(
        np.concatenate([row.y for row in rows]),
        np.concatenate([row.windows for row in rows]),
        np.concatenate([row.states for row in rows]),
    )


def _oracle_row(layer: GdnLayer, row: int, *, in_chunks: bool) -> GdnResult:
    config, slot = layer.config, layer.read_slots[row]
    first, last = layer.row_starts[row : row + 2]
    start = layer.states[slot, LAYER].astype(np.float64).swapaxes(-1, -2)
    window = layer.windows[slot, LAYER]
    if first == last:
        y = np.zeros((0, config.value_dim))
        return GdnResult(y, window[None], start.swapaxes(-1, -2)[None])
    x = _wide(layer.projection[first:last])
    mixed, z, b, a = np.split(
        x,
        np.cumsum([config.conv_dim, config.value_dim, config.num_value_heads]),
        axis=1,
    )
    windows: Float64Array = np.stack((_wide(window), np.zeros(window.shape)))
    c = gdn_conv.reference(mixed[None], _wide(layer.conv), windows, np.array([0]), np.array([1]))
    c = _wide(_bf16(c[0]))
    keys = (-1, config.num_key_heads, config.key_head_dim)
    q = l2_norm.reference(c[:, : config.key_dim].reshape(keys), scale=config.key_head_dim**-0.5)
    k = l2_norm.reference(c[:, config.key_dim : 2 * config.key_dim].reshape(keys))
    v = c[:, 2 * config.key_dim :].reshape(-1, config.num_value_heads, config.value_head_dim)
    beta, g = gdn_gates.reference(
        b, a, layer.a_log.astype(np.float64), layer.dt_bias.astype(np.float64)
    )
    rule = gdn_chunked.reference if in_chunks else _steps
    o, state = rule(q, k, v, g, beta, start)
    normed = gated_rms_norm.reference(o, z.reshape(o.shape), _wide(layer.norm), eps=EPS)
    return GdnResult(
        normed.reshape(-1, config.value_dim).astype(np.float64),
        _bf16(windows[1:]),
        state.swapaxes(-1, -2)[None].astype(np.float64),
    )


def _steps(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    g: FloatArray,
    beta: FloatArray,
    start: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    states = np.stack((start, start))
    y = np.empty_like(v)
    slot = np.array([0])
    for t in range(v.shape[0]):
        one = slice(t, t + 1)
        y[t] = gdn_recurrent.reference(
            q[one], k[one], v[one], g[one], beta[one], states, slot, slot
        )[0]
    return y, states[0]


def _wide(codes: HalfArray) -> Float64Array:
    return bf16_to_float(codes).astype(np.float64)


def _bf16(values: FloatArray) -> HalfArray:
    return float_to_bf16(values.astype(np.float32))
