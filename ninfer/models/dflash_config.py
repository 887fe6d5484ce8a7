"""Configurations of DFlash and DFlash2 draft models -> DflashConfig, strictly.

Three spellings are read:
    flat          body keys at the top, the rest in `dflash_config`, or beside them in older files
    speculators   body keys in `transformer_layer_config`, the rest at the top; layer ids count from
                  the embedding, so they are one above ours

A draft continues one target: it reads the residual streams behind some of its layers, and has its
embedding and mostly its head. What would change the mathematics in a way we do not implement is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ninfer.artifact.json_document import Fields
from ninfer.contract.model import AttentionConfig, ModelConfig
from ninfer.models.config import MAX_LAYERS, MAX_WIDTH
from ninfer.models.rope_config import RopeDefaults, parse_rope

ARCHITECTURES: Final = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator")
MAX_BLOCK: Final = 64
_SECOND: Final = "DFlash2DraftModel"
_SECOND_KEYS: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"
_ROPE: Final = RopeDefaults(1e4, 1e4, 1.0, False, None)
_SPECULATORS_TYPES: Final = ("dflash", "dflash2")


@dataclass(frozen=True, slots=True)
class DflashLayer:
    """How a layer's queries see keys.

    window      positions a key may lie away, itself included; None: any
    is_causal   tokens of a block see only those before them
    """

    window: int | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class BlockConvConfig:
    """DFlash2: convolutions over the tokens of a block, `num_taps` wide; `group_size` channels
    share what depends on the token. hidden_size % group_size == 0."""

    num_taps: int
    group_size: int


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """DFlash2: of the `top_k` best tokens of each place, pairs are scored by factors of `rank`."""

    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DflashConfig:
    """Checked geometry of a draft model.

    head_vocab_size    rows of its head; below vocab_size, a map says which tokens they are
    tap_layers         layers of the target whose residual stream (behind the layer) it reads,
                       ascending
    num_target_layers  layers of its target, as far as the file says
    block_size         tokens of a block it was trained on: the newest one and those it guesses
    value_scale        factor on values; embedding_scale on embeddings; logit_scale on logits
    logit_softcap      logits become cap * tanh(logits / cap)
    conv, selector     both of a DFlash2, else neither
    """

    architecture: str
    vocab_size: int
    head_vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[DflashLayer, ...]
    attention: AttentionConfig
    rms_norm_eps: float
    tap_layers: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    block_size: int
    value_scale: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    conv: BlockConvConfig | None
    selector: SelectorConfig | None


def parse_dflash_config(raw: Mapping[str, Any], path: Path) -> DflashConfig:
    """Read a parsed config.json. Raises ModelFileError(path, key, message)."""
    file = _File.of(Fields(path, raw))
    architecture = _architecture(file.top)
    file.refuse_unsupported()
    body = file.body
    vocab_size = body.integer("vocab_size", 1, MAX_WIDTH)
    hidden_size = body.integer("hidden_size", 1, MAX_WIDTH)
    num_layers = body.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_second = architecture == _SECOND or any(map(file.has, _SECOND_KEYS))
    _check_target_width(file.top, hidden_size)
    return DflashConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        head_vocab_size=_head_vocab_size(file, vocab_size, is_second),
        hidden_size=hidden_size,
        intermediate_size=body.integer("intermediate_size", 1, MAX_WIDTH),
        layers=_layers(file, num_layers, is_second),
        attention=_attention(body),
        rms_norm_eps=body.number("rms_norm_eps", 0.0, 1.0, default=1e-6, above=True),
        tap_layers=_tap_layers(file),
        num_target_layers=_num_target_layers(file.top),
        mask_token_id=file.holder("mask_token_id").integer("mask_token_id", 0, vocab_size - 1),
        block_size=file.holder("block_size").integer("block_size", 2, MAX_BLOCK, default=16),
        value_scale=file.scale("attention_value_scale"),
        embedding_scale=file.scale("input_embedding_scale"),
        logit_scale=file.scale("output_multiplier"),
        logit_softcap=_logit_softcap(file),
        conv=_conv(file, hidden_size) if is_second else None,
        selector=_selector(file, vocab_size) if is_second else None,
    )


def target_mismatch(config: DflashConfig, target: ModelConfig) -> str | None:
    """What keeps the draft from continuing `target`, in words; None when nothing does."""
    for what, ours, theirs in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            return f"it was made for a model of {what} {ours}, and this one has {theirs}"
    num_layers = len(target.layers)
    # Some files count the target's MTP layer.
    if config.num_target_layers not in (None, num_layers, num_layers + 1):
        return (
            f"it was made for a model of {config.num_target_layers} layers, and this one has"
            f" {num_layers}"
        )
    if config.tap_layers[-1] >= num_layers:
        return f"it reads layer {config.tap_layers[-1]}, and this model has {num_layers} layers"
    return None


@dataclass(frozen=True, slots=True)
class _File:
    """A configuration's parts: `body` holds the layers' sizes, `draft` the keys of DFlash."""

    top: Fields
    body: Fields
    draft: Fields
    is_speculators: bool

    @classmethod
    def of(cls, top: Fields) -> _File:
        is_speculators = top.has("speculators_model_type")
        if is_speculators:
            kind = top.text("speculators_model_type")
            if kind not in _SPECULATORS_TYPES:
                raise top.error(
                    "speculators_model_type",
                    f"{kind!r} is not supported ({', '.join(_SPECULATORS_TYPES)})",
                )
        body = top.child("transformer_layer_config") if is_speculators else top
        empty = Fields(top.path, {}, f"{top.prefix}dflash_config.")
        draft = top.child("dflash_config") if top.has("dflash_config") else empty
        return cls(top, body, draft, is_speculators)

    def holder(self, key: str) -> Fields:
        """Where a key of DFlash stands, or should: of a flat file, `dflash_config`."""
        if self.draft.has(key) or not (self.is_speculators or self.top.has(key)):
            return self.draft
        return self.top

    def has(self, key: str) -> bool:
        return self.holder(key).has(key)

    def scale(self, key: str) -> float:
        return self.holder(key).number(key, 0.0, 1e6, default=1.0, above=True)

    def attention_key(self, key: str) -> Fields:
        """Where a key of the layers' attention stands: exports may repeat it above the body."""
        return self.top if self.top.has(key) else self.body

    def refuse_unsupported(self) -> None:
        """Raises ModelFileError."""
        for fields, key in (
            (self.body, "attention_bias"),
            (self.holder("attention_sink_bias"), "attention_sink_bias"),
            (self.top, "add_swa_attention_sink_bias"),
            (self.holder("sample_from_anchor"), "sample_from_anchor"),
            (self.holder("shift_label"), "shift_label"),
        ):
            if fields.flag(key, False):
                raise fields.error(key, "true is not supported")
        for fields, key, allowed in (
            (self.body, "hidden_act", "silu"),
            (self.holder("projector_type"), "projector_type", "dflash"),
            (self.top, "draft_ffn_type", "dense"),
        ):
            value = fields.text(key, default=allowed)
            if value != allowed:
                raise fields.error(key, f"{value!r} is not supported ({allowed})")
        if self.top.has("quantization_config"):
            raise self.top.error("quantization_config", "quantised draft models are not supported")


def _architecture(top: Fields) -> str:
    names = top.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(map(repr, names)) or "an empty list"
        raise top.error(
            "architectures", f"{found} is no draft model; supported are {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _check_target_width(top: Fields, hidden_size: int) -> None:
    width = top.integer("target_hidden_size", 1, MAX_WIDTH, default=hidden_size)
    if width != hidden_size:
        raise top.error("target_hidden_size", f"{width} differs from hidden_size {hidden_size}")


def _head_vocab_size(file: _File, vocab_size: int, is_second: bool) -> int:
    fields = file.top
    size = fields.integer("draft_vocab_size", 1, vocab_size, default=vocab_size)
    if is_second and size != vocab_size:
        raise fields.error(
            "draft_vocab_size", f"{size}: a DFlash2 needs the whole vocabulary of {vocab_size}"
        )
    return size


def _attention(body: Fields) -> AttentionConfig:
    num_heads = body.integer("num_attention_heads", 1, 65_536)
    num_kv_heads = body.integer("num_key_value_heads", 1, 65_536, default=num_heads)
    if num_heads % num_kv_heads:
        raise body.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    head_dim = body.integer("head_dim", 2, 65_536, default=128)
    if head_dim % 2:
        raise body.error("head_dim", f"{head_dim} is odd, and heads are rotated in pairs")
    max_position = body.integer("max_position_embeddings", 1, default=32_768)
    rope = parse_rope(body, _ROPE, head_dim, max_position)
    return AttentionConfig(num_heads, num_kv_heads, head_dim, has_output_gate=False, rope=rope)


def _layers(file: _File, num_layers: int, is_second: bool) -> tuple[DflashLayer, ...]:
    kinds = _kinds(file, num_layers)
    window = _window(file) if _SLIDING in kinds else None
    return tuple(
        DflashLayer(window if kind == _SLIDING else None, _is_causal(file, kind, is_second))
        for kind in kinds
    )


def _kinds(file: _File, num_layers: int) -> tuple[str, ...]:
    fields = file.attention_key("layer_types")
    kinds = fields.texts("layer_types") if fields.has("layer_types") else (_FULL,) * num_layers
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"{len(kinds)} entries for {num_layers} layers")
    for index, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise fields.error(
                f"layer_types[{index}]", f"{kind!r} is not one of {_SLIDING}, {_FULL}"
            )
    if _SLIDING not in kinds and file.draft.flag("use_swa", False):
        return (_SLIDING,) * num_layers
    return kinds


def _window(file: _File) -> int:
    if file.draft.has("swa_window_size"):
        return file.draft.integer("swa_window_size", 1)
    return file.attention_key("sliding_window").integer("sliding_window", 1)


def _is_causal(file: _File, kind: str, is_second: bool) -> bool:
    """What the file says of all layers, or of the sliding ones; else those are causal, as in the
    authors' own code."""
    if file.top.has("is_causal"):
        return file.top.flag("is_causal", False)
    if file.draft.has("causal"):
        return file.draft.flag("causal", False)
    is_sliding = kind == _SLIDING
    if file.is_speculators:
        return is_sliding and not file.top.flag("sliding_window_non_causal", is_second)
    return is_sliding


def _tap_layers(file: _File) -> tuple[int, ...]:
    key, first = "target_layer_ids", 0
    fields = file.holder(key)
    if file.is_speculators:
        fields, key, first = file.top, "aux_hidden_state_layer_ids", 1
    ids = fields.integers(key, first, MAX_LAYERS)
    if not ids:
        raise fields.error(key, "an empty list: a draft model reads at least one layer")
    if list(ids) != sorted(set(ids)):
        raise fields.error(key, f"{list(ids)} does not ascend")
    return tuple(layer - first for layer in ids)


def _num_target_layers(top: Fields) -> int | None:
    key = "num_target_layers"
    return top.integer(key, 1, MAX_LAYERS) if top.has(key) else None


def _logit_softcap(file: _File) -> float | None:
    key = "final_logit_softcapping"
    return file.holder(key).number(key, 0.0, 1e6, default=0.0) or None


def _conv(file: _File, hidden_size: int) -> BlockConvConfig:
    num_taps = file.holder("conv_kernel_size").integer("conv_kernel_size", 1, MAX_BLOCK, default=2)
    fields = file.holder("conv_group_size")
    group_size = fields.integer("conv_group_size", 1, hidden_size, default=16)
    if hidden_size % group_size:
        raise fields.error(
            "conv_group_size", f"{group_size} does not divide hidden_size {hidden_size}"
        )
    return BlockConvConfig(num_taps, group_size)


def _selector(file: _File, vocab_size: int) -> SelectorConfig:
    rank = file.holder("selector_rank").integer("selector_rank", 1, MAX_WIDTH, default=256)
    top_k = file.holder("selector_top_k").integer("selector_top_k", 1, vocab_size, default=16)
    return SelectorConfig(rank, top_k)
