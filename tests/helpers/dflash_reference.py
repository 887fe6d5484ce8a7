"""A DFlash draft in float64, written down from its definition: no pages, no batches, no tiles.

draft = DflashReference(spec, target_embedding, target_head)
logits = draft.logits(taps, anchor, num_guesses)      # [num_guesses, rows of the head]
"""

from __future__ import annotations

import numpy as np

from tests.helpers.arrays import Float64Array
from tests.helpers.dflash_checkpoints import DflashSpec, dflash_values

EPS = 1e-6
THETA = 10_000.0


class DflashReference:
    """`embedding` [V, C] and `head` [V, C] are the target's; the draft's own come before them."""

    def __init__(self, spec: DflashSpec, embedding: Float64Array, head: Float64Array) -> None:
        self.spec = spec
        self.values = {
            name: array.astype(np.float64) for name, array in dflash_values(spec).items()
        }
        self.embedding = self.values.get("embed_tokens.weight", embedding.astype(np.float64))
        self.head = self.values.get("lm_head.weight", head.astype(np.float64))

    def context(self, taps: Float64Array) -> list[tuple[Float64Array, Float64Array]]:
        """Keys and values [n, Hk, D] of each layer, from taps [n, taps * C]."""
        features = norm(taps @ self._matrix("fc"), self.values["hidden_norm.weight"])
        return [
            self._keys_values(f"layers.{index}.self_attn", features, 0)
            for index in range(self.spec.num_layers)
        ]

    def hidden(self, taps: Float64Array, anchor: int, num_guesses: int) -> Float64Array:
        """[1 + num_guesses, C] behind the final norm."""
        spec, start = self.spec, taps.shape[0]
        scale = spec.draft_overrides.get("input_embedding_scale", 1.0)
        u = self.embedding[[anchor] + [spec.mask_token_id] * num_guesses] * scale
        for index, (k, v) in enumerate(self.context(taps)):
            prefix = f"layers.{index}"
            x = norm(u, self.values[f"{prefix}.input_layernorm.weight"])
            kernels = self._kernels(f"{prefix}.attention_conv", x)
            x = self._convolve(f"{prefix}.attention_conv", kernels, 0, x)
            own_k, own_v = self._keys_values(f"{prefix}.self_attn", x, start)
            y = self._attend(index, x, np.concatenate((k, own_k)), np.concatenate((v, own_v)))
            u = u + self._convolve(f"{prefix}.attention_conv", kernels, 1, y)
            x = norm(u, self.values[f"{prefix}.post_attention_layernorm.weight"])
            kernels = self._kernels(f"{prefix}.mlp_conv", x)
            x = self._convolve(f"{prefix}.mlp_conv", kernels, 0, x)
            gate, up = (x @ self._matrix(f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            y = (gate / (1.0 + np.exp(-gate)) * up) @ self._matrix(f"{prefix}.mlp.down_proj")
            u = u + self._convolve(f"{prefix}.mlp_conv", kernels, 1, y)
        return norm(u, self.values["norm.weight"])

    def logits(self, taps: Float64Array, anchor: int, num_guesses: int) -> Float64Array:
        overrides = self.spec.draft_overrides
        logits = self.hidden(taps, anchor, num_guesses)[1:] @ self.head.T
        logits *= overrides.get("output_multiplier", 1.0)
        cap = overrides.get("final_logit_softcapping", np.inf)
        return logits if cap == np.inf else np.tanh(logits / cap) * cap

    def guesses(self, taps: Float64Array, anchor: int, num_guesses: int) -> list[int]:
        """Greedy ones."""
        logits = self.logits(taps, anchor, num_guesses)
        if not self.spec.is_second:
            rows = [int(row.argmax()) for row in logits]
            tokens = self.spec.token_ids
            return rows if tokens is None else [tokens[row] for row in rows]
        prefix = "candidate_selector"
        gates = self.hidden(taps, anchor, num_guesses)[1:] @ self._matrix(
            f"{prefix}.hidden_projection"
        )
        before, path = anchor, list[int]()
        for row, gate in zip(logits, gates, strict=True):
            best = np.argsort(-row, kind="stable")[: self.spec.selector_top_k]
            edges = self.values[f"{prefix}.predecessor_codebook"][before] * gate
            scores = row[best] + self.values[f"{prefix}.successor_codebook"][best] @ edges
            before = int(best[scores.argmax()])
            path.append(before)
        return path

    def _matrix(self, name: str) -> Float64Array:
        return self.values[f"{name}.weight"].T

    def _keys_values(
        self, prefix: str, x: Float64Array, start: int
    ) -> tuple[Float64Array, Float64Array]:
        shape = (x.shape[0], self.spec.num_kv_heads, self.spec.head_dim)
        k = norm((x @ self._matrix(f"{prefix}.k_proj")).reshape(shape), self._norm_of(prefix, "k"))
        v = (x @ self._matrix(f"{prefix}.v_proj")).reshape(shape)
        return rotate(k, start), v * self.spec.draft_overrides.get("attention_value_scale", 1.0)

    def _norm_of(self, prefix: str, which: str) -> Float64Array:
        return self.values[f"{prefix}.{which}_norm.weight"]

    def _attend(
        self, index: int, x: Float64Array, keys: Float64Array, values: Float64Array
    ) -> Float64Array:
        spec, prefix = self.spec, f"layers.{index}.self_attn"
        start = keys.shape[0] - x.shape[0]
        q = (x @ self._matrix(f"{prefix}.q_proj")).reshape(-1, spec.num_heads, spec.head_dim)
        q = rotate(norm(q, self._norm_of(prefix, "q")), start)
        is_sliding = spec.layer_types[index] == "sliding_attention"
        is_causal = is_sliding if spec.is_causal is None else spec.is_causal
        if spec.style == "speculators":
            is_causal = is_sliding and bool(spec.is_causal)
        y = np.empty_like(q)
        for i in range(q.shape[0]):
            distance = start + i - np.arange(keys.shape[0])
            seen = np.abs(distance) < spec.sliding_window if is_sliding else distance == distance
            if is_causal:
                seen &= distance >= 0
            for head in range(spec.num_heads):
                kv = head * spec.num_kv_heads // spec.num_heads
                scores = keys[seen, kv] @ q[i, head] / np.sqrt(spec.head_dim)
                weights = np.exp(scores - scores.max())
                y[i, head] = weights @ values[seen, kv] / weights.sum()
        return y.reshape(q.shape[0], -1) @ self._matrix(f"{prefix}.o_proj")

    def _kernels(self, prefix: str, x: Float64Array) -> Float64Array:
        """[N, 2, taps, C]"""
        if not self.spec.is_second:
            return np.empty(0)
        dynamic = (x @ self._matrix(f"{prefix}.kernel_projection")).reshape(
            x.shape[0], 2, self.spec.conv_taps, -1
        )
        kernels: Float64Array = np.repeat(dynamic, self.spec.conv_group, axis=-1)
        kernels += self.values[f"{prefix}.base_kernel"]
        return kernels

    def _convolve(
        self, prefix: str, kernels: Float64Array, side: int, x: Float64Array
    ) -> Float64Array:
        if not self.spec.is_second:
            return x
        y = np.zeros_like(x)
        for tap in range(self.spec.conv_taps):
            for i in range(tap, x.shape[0]):
                y[i] += kernels[i, side, tap] * x[i - tap]
        return y


def norm(x: Float64Array, weight: Float64Array) -> Float64Array:
    size: Float64Array = np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)
    return x / size * weight


def rotate(x: Float64Array, start: int) -> Float64Array:
    """[n, heads, D] at positions start, start + 1, ..: pairs (j, j + D / 2) by position over
    theta^(2 j / D)."""
    half = x.shape[2] // 2
    angle = np.arange(start, start + x.shape[0])[:, None] / THETA ** (np.arange(half) / half)
    turn = np.exp(1j * angle)[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate((turned.real, turned.imag), axis=-1)
