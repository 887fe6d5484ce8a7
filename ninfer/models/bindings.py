"""Bindings and uses of a model's objects.

Shared objects appear once as an object and several times as a use: the embedding matrix is also
the head of a tied model, and the MTP module reads embedding and head of the main model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ninfer.artifact.bindings import ActivationPrecision, Binding, Use
from ninfer.contract.model import ModelConfig, ModelObject

EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
_WIDE: Final = (ActivationPrecision.A16,)
"""Weights of 16 and 32 bits meet activations of 16 bits or more."""
_VISION_PREFIX: Final = "visual."


def is_vision_object(name: str) -> bool:
    return name.startswith(_VISION_PREFIX)


def vision_object_name(leaf: str) -> str:
    """Name of a vision object; `leaf` is its name inside the tower."""
    return _VISION_PREFIX + leaf


def bindings_of(config: ModelConfig, objects: Iterable[ModelObject]) -> tuple[Binding, ...]:
    """One binding for every logical parameter of `objects`, and one for a tied head."""
    bindings = [binding for item in objects for binding in _object_bindings(item)]
    if config.tie_word_embeddings:
        bindings.append(Binding(HEAD, EMBEDDING, 0, config.vocab_size))
    return tuple(bindings)


def uses_of(config: ModelConfig, objects: Iterable[ModelObject]) -> tuple[Use, ...]:
    """Every object's own use, then those of shared objects."""
    uses = [Use(item.name, item.name, _WIDE) for item in objects]
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    if config.tie_word_embeddings:
        uses.append(Use(head, HEAD, _WIDE))
    if config.num_mtp_layers:
        uses.append(Use(EMBEDDING, f"mtp.{EMBEDDING}", _WIDE))
        uses.append(Use(head, f"mtp.{HEAD}", _WIDE))
    return tuple(uses)


def _object_bindings(item: ModelObject) -> Iterator[Binding]:
    start = 0
    for part in item.parts:
        stop = start + part.shape[0]
        yield Binding(part.name, item.name, start, stop)
        start = stop
