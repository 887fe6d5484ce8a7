"""gdn_chunked: the gated delta rule over many tokens of one sequence, a chunk at a time.

Equal, up to rounding, to T steps of gdn_recurrent. Inside a chunk with start state S, cumulative
log decay G_i = g_0 + .. + g_i and D_ij = exp(G_i - G_j) for i >= j (else 0):

    A_ij = beta_i (k_i . k_j) D_ij for i > j (else 0)
    U = (I + A)^-1 (diag(beta) V - diag(beta exp(G)) K S)
    Y = diag(exp(G)) Q S + ((Q K^T) * D) U
    S' = exp(G_last) S + K^T diag(exp(G_last - G)) U

Shapes     q and k [T, Hk, dk], v [T, Hv, dv], g and beta [T, Hv], state [Hv, dk, dv]
           -> y [T, Hv, dv], the state after the last token [Hv, dk, dv]; Hv % Hk == 0
Dtypes     all the same floating dtype; G and its differences in float64
Units      q and k already l2-normalised, q also times dk ** -0.5; g <= 0
Effects    new arrays; state is only read
Workspace  about 4 * T * Hv * (CHUNK_TOKENS + dk + dv) elements
Errors     OpContractError for a shape or dtype outside the above
Tolerance  FLOAT32_RECURRENCE
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464), chunkwise form; WY representation of
           Yang et al. 2024 (arXiv:2406.06484)
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import require_same_dtype, require_shape
from ninfer.ops.gdn_checks import require_delta_inputs

_OP = "gdn_chunked"

CHUNK_TOKENS: Final = 64
_BASE: Final = 8
"""Side of the triangular blocks that are inverted row by row."""


def reference(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    g: FloatArray,
    beta: FloatArray,
    state: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """All T tokens; shorter inputs take one smaller chunk."""
    state_shape = require_delta_inputs(_OP, q, k, v, g, beta)
    require_shape(_OP, "state", state, state_shape)
    require_same_dtype(_OP, k, state)
    num_tokens, num_key_heads, key_dim = k.shape
    num_value_heads, value_dim = v.shape[1:]
    chunk = min(CHUNK_TOKENS, _power_of_two(num_tokens))
    # Axes from here on: chunk n, key head, value head of the key head, token in the chunk, feature.
    # The padding of the last chunk has k = 0, beta = 0 and g = 0, so it leaves the state alone.
    keys = _chunks(k, chunk)[:, :, None]
    queries = _chunks(q, chunk)[:, :, None]
    values = _grouped(_chunks(v, chunk), num_key_heads)
    strength = _grouped(_chunks(beta[..., None], chunk), num_key_heads)
    total = np.cumsum(
        _grouped(_chunks(g[..., None], chunk), num_key_heads), axis=3, dtype=np.float64
    )
    decay = _pair_decay(total, k.dtype)
    since_start = np.exp(total).astype(k.dtype)
    until_end = np.exp(total[:, :, :, -1:] - total).astype(k.dtype)

    inverse = _inverse_unit_lower(_strictly_lower(keys @ _transposed(keys) * decay * strength))
    new_values = inverse @ (values * strength)
    state_readers = inverse @ (keys * (strength * since_start))
    attention = queries @ _transposed(keys) * decay
    queries = queries * since_start
    writers = _transposed(keys * until_end)
    chunk_decay = since_start[:, :, :, -1:]

    y = np.empty_like(values)
    current = state.reshape(num_key_heads, -1, key_dim, value_dim)
    for n in range(values.shape[0]):
        update = new_values[n] - state_readers[n] @ current
        y[n] = queries[n] @ current + attention[n] @ update
        current = current * chunk_decay[n] + writers[n] @ update
    y = y.reshape(-1, num_value_heads, chunk, value_dim).transpose(0, 2, 1, 3)
    return (
        y.reshape(-1, num_value_heads, value_dim)[:num_tokens],
        current.reshape(num_value_heads, key_dim, value_dim),
    )


def _power_of_two(count: int) -> int:
    return max(_BASE, 1 << (count - 1).bit_length())


def _chunks(x: FloatArray, chunk: int) -> FloatArray:
    """[T, H, d] -> [N, H, chunk, d], zeros behind the last token."""
    num_tokens, num_heads, features = x.shape
    num_chunks = -(-num_tokens // chunk)
    padded: FloatArray = np.zeros((num_chunks, num_heads, chunk, features), x.dtype)
    whole = num_tokens // chunk
    padded[:whole] = x[: whole * chunk].reshape(whole, chunk, num_heads, features).swapaxes(1, 2)
    rest = x[whole * chunk :]
    if rest.shape[0]:
        padded[whole, :, : rest.shape[0]] = rest.swapaxes(0, 1)
    return padded


def _grouped(x: FloatArray, num_key_heads: int) -> FloatArray:
    """[N, Hv, chunk, d] -> [N, Hk, Hv / Hk, chunk, d]."""
    return x.reshape(x.shape[0], num_key_heads, -1, *x.shape[2:])


def _transposed(x: FloatArray) -> FloatArray:
    return x.swapaxes(-1, -2)


def _pair_decay(total: NDArray[np.float64], dtype: np.dtype[Any]) -> FloatArray:
    """exp(G_i - G_j) where i >= j, else 0; the exponent of the other half could overflow."""
    chunk = total.shape[-2]
    difference = total - total.swapaxes(-1, -2)
    visible = np.tri(chunk, dtype=np.bool_)
    decay: FloatArray = np.exp(np.where(visible, difference, -np.inf).astype(dtype))
    return decay


def _strictly_lower(x: FloatArray) -> FloatArray:
    visible = np.tri(x.shape[-1], k=-1, dtype=np.bool_)
    return np.where(visible, x, x.dtype.type(0))


def _inverse_unit_lower(a: FloatArray) -> FloatArray:
    """(I + a)^-1 for strictly lower triangular a [.., n, n], n = _BASE times a power of two.

    Diagonal blocks of _BASE rows by forward substitution, then pairs of blocks merge:
    inverse of [[P, 0], [R, Q]] = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. As stable as substitution; a
    product of powers of a is not, its terms cancel when keys repeat.
    """
    size = a.shape[-1]
    inverse = np.zeros_like(a)
    for start in range(0, size, _BASE):
        span = slice(start, start + _BASE)
        inverse[..., span, span] = _substitute(a[..., span, span])
    side = _BASE
    while side < size:
        for start in range(0, size, 2 * side):
            upper, lower = slice(start, start + side), slice(start + side, start + 2 * side)
            corner = inverse[..., lower, lower] @ a[..., lower, upper]
            inverse[..., lower, upper] = -(corner @ inverse[..., upper, upper])
        side *= 2
    return inverse


def _substitute(a: FloatArray) -> FloatArray:
    size = a.shape[-1]
    inverse = np.zeros_like(a)
    for row in range(size):
        inverse[..., row, row] = 1.0
        if row:
            inverse[..., row, :row] = -(a[..., row : row + 1, :row] @ inverse[..., :row, :row])[
                ..., 0, :
            ]
    return inverse
