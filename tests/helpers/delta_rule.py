"""The gated delta rule token by token and head by head in float64: the oracle of both forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer.contract.arrays import FloatArray
from tests.helpers.arrays import Float64Array, normal, unit


@dataclass(frozen=True)
class DeltaCase:
    """Inputs of one sequence: q, k [T, Hk, dk], v [T, Hv, dv], g, beta [T, Hv], state."""

    q: Float64Array
    k: Float64Array
    v: Float64Array
    g: Float64Array
    beta: Float64Array
    state: Float64Array

    def inputs(
        self, dtype: type[np.floating[Any]]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """q, k, v, g, beta in one dtype."""
        return (
            self.q.astype(dtype),
            self.k.astype(dtype),
            self.v.astype(dtype),
            self.g.astype(dtype),
            self.beta.astype(dtype),
        )

    def run(self) -> tuple[Float64Array, Float64Array]:
        """(outputs [T, Hv, dv], final state [Hv, dk, dv])."""
        num_heads = self.v.shape[1]
        ratio = num_heads // self.k.shape[1]
        y, state = np.empty_like(self.v), self.state.copy()
        for t in range(self.v.shape[0]):
            for head in range(num_heads):
                k, q = self.k[t, head // ratio], self.q[t, head // ratio]
                state[head] *= np.exp(self.g[t, head])
                delta = self.beta[t, head] * (self.v[t, head] - state[head].T @ k)
                state[head] += np.outer(k, delta)
                y[t, head] = state[head].T @ q
        return y, state


def delta_case(
    seed: int,
    num_tokens: int,
    *,
    num_key_heads: int = 2,
    ratio: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
) -> DeltaCase:
    """Unit keys and queries, decays from hardly any to strong, a start state that matters."""
    rng = np.random.default_rng(seed)
    heads = num_key_heads * ratio
    g = -np.exp(rng.uniform(-7.0, 1.0, (num_tokens, heads))).astype(np.float32)
    beta = rng.uniform(0.02, 0.999, (num_tokens, heads)).astype(np.float32)
    return DeltaCase(
        q=unit(rng, num_tokens, num_key_heads, key_dim) * 0.25,
        k=unit(rng, num_tokens, num_key_heads, key_dim),
        v=normal(rng, num_tokens, heads, value_dim),
        g=g.astype(np.float64),
        beta=beta.astype(np.float64),
        state=normal(rng, heads, key_dim, value_dim),
    )
