"""What a model is: configuration, layers, parameters and where their bytes lie.

LogicalParameter   a matrix or vector of the mathematics, by its canonical name
ModelObject        a physical tensor that executors consume; holds one or more logical
                   parameters as consecutive row ranges ("fused parent")
ModelSource        an opened checkpoint or artifact that can produce objects
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ninfer.contract.arrays import Float32Array
from ninfer.contract.weights import AnyBand, WeightBand


class MixerKind(Enum):
    """How a layer mixes tokens. The values are the `layer_types` of HF configurations."""

    GDN = "linear_attention"
    ATTENTION = "full_attention"


class MlpKind(Enum):
    DENSE = "dense"
    MOE = "moe"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. `kind_index` counts layers of the same mixer (KV or StateImage plane)."""

    index: int
    mixer: MixerKind
    mlp: MlpKind
    kind_index: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the first `rotary_dim` dimensions of a head, rotate-half form.

    mrope_section   (time, height, width) frequencies, interleaved; None = one axis
    rope_type       "default", "linear" or "yarn"; the factors matter for the latter two
    """

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int] | None = None
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """num_heads % num_kv_heads == 0. `has_output_gate`: q_proj holds query and gate per head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_output_gate: bool
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class GdnConfig:
    """Gated DeltaNet sizes; num_value_heads % num_key_heads == 0."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """`shared_intermediate_size` None = no shared expert. `renormalise`: top-k weights sum to 1."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None
    renormalise: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Checked geometry of a text model (and, later, its optional components).

    `norm_offset` is added to RMSNorm weights (1.0 for zero-centred norms, 0.0 for plain ones).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    gdn: GdnConfig | None
    moe: MoeConfig | None
    rms_norm_eps: float
    norm_offset: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_mtp_layers: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.mixer is MixerKind.ATTENTION for layer in self.layers)

    @property
    def num_gdn_layers(self) -> int:
        return sum(layer.mixer is MixerKind.GDN for layer in self.layers)


@dataclass(frozen=True, slots=True)
class LogicalParameter:
    """`layers.3.attn.k_proj` [num_kv_heads * head_dim, hidden_size], for example."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelObject:
    """A physical tensor: `parts` concatenated along axis 0 (one part: the parameter itself).

    component   "text", "mtp" or "vision": what has to be selected for it to be loaded; objects of a
                draft model of its own files are "draft"
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[LogicalParameter, ...]
    component: str = "text"


@dataclass(frozen=True, slots=True)
class FrontendResources:
    """Files of the model directory that the Frontend needs; each may be missing.

    folder         where they lie, for errors; of an artifact, the file itself
    template_file  the file that `chat_template` comes from
    """

    tokenizer_json: bytes | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = field(default=Path(), compare=False)
    template_file: str = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, as `info` lists it. `dtype` is the safetensors name (BF16, F32, ..)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    path: Path


class ModelSource(Protocol):
    """An opened, fully validated model whose weights have not been read yet."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str:
        """Served name: metadata name of an artifact, else the directory's name."""

    @property
    def kind(self) -> str:
        """`safetensors` (an HF directory) or `ninfer` (an artifact)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """config.json as it was."""

    @property
    def resources(self) -> FrontendResources: ...

    @property
    def objects(self) -> tuple[ModelObject, ...]:
        """Text objects first, in the order the model uses them; then mtp, then vision."""

    @property
    def tensors(self) -> tuple[StoredTensor, ...]: ...

    @property
    def bands(self) -> Mapping[str, tuple[WeightBand, ...]]:
        """How the rows of every object are stored, by its name."""

    @property
    def unused_scales(self) -> int:
        """Scales of activations and of the KV cache in the files; both stay 16 bits wide, or as
        options say."""

    def read_float32(self, component: str = "text") -> Iterator[tuple[ModelObject, Float32Array]]:
        """Materialise one component, object by object.

        A tied `lm_head` is not yielded. Raises ModelFileError for checksums, non-finite weights
        and bad scales.
        """

    def read_bands(
        self, encoded: Collection[str], component: str = "text"
    ) -> Iterator[tuple[ModelObject, tuple[AnyBand, ...]]]:
        """As read_float32, but the objects in `encoded` as they are stored; others are one band of
        numbers, bf16 codes (uint16) where all of an object is stored so."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients are told about the served model. `created_s` is seconds since the epoch."""

    name: str
    architecture: str
    max_context: int
    created_s: int
    fingerprint: str
    """`fp_` and a hash of weights and engine settings; the `system_fingerprint` of answers."""
    has_vision: bool = False
    """It takes pictures and videos."""
