"""Where the server stands: loading, ready, draining or unavailable, and the model it serves.

LOADING -> READY -> DRAINING (new requests still taken, then refused)
UNAVAILABLE: the engine died; reported by the engine itself
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ninfer.contract.chat import Frontend
from ninfer.contract.errors import Unavailable
from ninfer.contract.generation import EngineHealth, GenerationEngine
from ninfer.contract.metrics import MetricFamily
from ninfer.contract.model import ModelCard

RETRY_AFTER_S: Final[Mapping[EngineHealth, float]] = {
    EngineHealth.LOADING: 5.0,
    EngineHealth.DRAINING: 5.0,
    EngineHealth.UNAVAILABLE: 10.0,
}
"""Of every state that takes no requests, when to ask again."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is attached once a model is loaded and its engine started.

    metrics   what /metrics says of the engine, now
    info      what /server_info says of the model, the device and the options of the engine
    """

    engine: GenerationEngine
    frontend: Frontend
    card: ModelCard
    metrics: Callable[[], Sequence[MetricFamily]] = tuple
    info: Mapping[str, Any] = field(default_factory=dict)


class Lifecycle:
    """The one writer of the server's state; read by /health and before every generation."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._model: ServedModel | None = None
        self._is_draining = False
        self._is_open = True

    @property
    def card(self) -> ModelCard:
        """The attached model's card; before that the one known from the model's files."""
        return self._model.card if self._model else self._card

    @property
    def model(self) -> ServedModel | None:
        return self._model

    @property
    def health(self) -> EngineHealth:
        if self._model is not None:
            reported = self._model.engine.status().health
            if reported is EngineHealth.UNAVAILABLE:
                return reported
        else:
            reported = EngineHealth.LOADING
        return EngineHealth.DRAINING if self._is_draining else reported

    def attach(self, model: ServedModel) -> None:
        self._model = model

    def begin_drain(self) -> None:
        """Tell /health and /ready; requests are still taken."""
        self._is_draining = True

    def close_admission(self) -> None:
        """From now on new requests are refused."""
        self._is_draining = True
        self._is_open = False

    def require_model(self) -> ServedModel:
        """The model, for a request that wants to generate. Raises Unavailable."""
        if not self._is_open:
            raise Unavailable(
                "server_draining",
                "The server is shutting down.",
                RETRY_AFTER_S[EngineHealth.DRAINING],
            )
        if self._model is None:
            raise Unavailable(
                "model_loading", "The model is still loading.", RETRY_AFTER_S[EngineHealth.LOADING]
            )
        if self.health is EngineHealth.UNAVAILABLE:
            raise Unavailable(
                "engine_unavailable",
                "The engine has stopped.",
                RETRY_AFTER_S[EngineHealth.UNAVAILABLE],
            )
        return self._model
