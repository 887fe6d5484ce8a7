"""The whole product in this process: the demo model behind a real port on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from ninfer.cli.loading import LoadedModel, load_model, make_cache, make_engine, open_named_model
from ninfer.cli.serve import metric_families
from ninfer.engine.core import Engine
from ninfer.gateway.app import Gateway
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.server import open_listener
from ninfer.options import EngineOptions, SamplingOptions, ServeOptions
from tests.helpers.gateway_rig import PATIENT_LIMITS


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    engine: Engine
    gateway: Gateway
    model: LoadedModel


@asynccontextmanager
async def served_demo_model(options: EngineOptions) -> AsyncIterator[RunningServer]:
    """The embedded model on a port chosen by the system; closed on exit."""
    model = load_model(open_named_model(None), options, SamplingOptions(), lambda *_: None)
    cache = make_cache(model, options)
    engine = make_engine(model, options, cache)
    await engine.start()
    try:
        gateway = Gateway(ServeOptions(), model.card, limits=PATIENT_LIMITS)
        report = partial(metric_families, engine, cache)
        gateway.attach(ServedModel(engine, model.frontend, model.card, report))
        listener = await open_listener(gateway, "127.0.0.1", 0)
        try:
            yield RunningServer(listener.url, engine, gateway, model)
        finally:
            await listener.aclose()
    finally:
        await engine.aclose()
