"""`ninfer serve`: the HTTP server over one model; the port answers while the model loads."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Final

from ninfer.cli.console import Console, ReaderGone
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.loading import (
    LoadedModel,
    LoadProgress,
    load_model,
    make_cache,
    make_engine,
    measured_costs,
    open_named_model,
)
from ninfer.cli.parser import Invocation
from ninfer.cli.progress import ProgressLine
from ninfer.contract.errors import OptionError, OutputError
from ninfer.contract.metrics import MetricFamily
from ninfer.contract.model import ModelCard, ModelSource
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.core import Engine
from ninfer.engine.metric_families import context_families, engine_families
from ninfer.gateway.app import Gateway
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.server import serve
from ninfer.gateway.server_info import model_info
from ninfer.options import EngineOptions, SamplingOptions, ServeOptions

_logger = logging.getLogger(__name__)
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LoadingStopped(Exception):
    """Raised inside the loader when the server is told to stop meanwhile."""


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(ServeOptions)
    engine_options = invocation.read(EngineOptions)
    sampling = invocation.read(SamplingOptions)
    logging.basicConfig(
        stream=sys.stderr, format=_LOG_FORMAT, level=options.log_level.upper(), force=True
    )
    if options.log_prompts and options.request_log is None:
        raise OptionError("--log-prompts", "needs --request-log, the file to write to")
    source = open_named_model(invocation.model_path)
    with _request_log(options) as log:
        gateway = Gateway(options, _provisional_card(source, options, engine_options), log=log)
        if not gateway.is_protected and not is_loopback(options.host):
            _logger.warning(
                "no API key is asked for: whoever reaches %s can use this server", options.host
            )
        has_drained = asyncio.run(_serve(gateway, source, engine_options, sampling, console))
    if not has_drained:
        console.error("stopped before every request had ended")
        return ExitCode.UNAVAILABLE
    return ExitCode.OK


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. Other names may lead anywhere."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _request_log(options: ServeOptions) -> AbstractContextManager[RequestLog | None]:
    return nullcontext() if options.request_log is None else RequestLog(options.request_log)


async def _serve(
    gateway: Gateway,
    source: ModelSource,
    engine_options: EngineOptions,
    sampling: SamplingOptions,
    console: Console,
) -> bool:
    name = gateway.lifecycle.card.name

    def load_blocking(progress: LoadProgress) -> LoadedModel:
        with ProgressLine(console, "loading") as line:

            def report(stage: str, done: int, total: int) -> None:
                progress(stage, done, total)
                line(stage, done, total)

            return load_model(source, engine_options, sampling, report, name=name)

    def load_for_serving(progress: LoadProgress) -> LoadedModel:
        return with_template_options(load_blocking(progress), gateway.options)

    return await serve(
        gateway,
        background_loader(load_for_serving, engine_options, sampling),
        on_listening=lambda url: console.report(f"loading {name}; {url} answers /health"),
        on_ready=lambda url: _announce(console, f"serving {name} at {url}"),
    )


def _announce(console: Console, text: str) -> None:
    """A server whose stdout leads nowhere serves all the same."""
    try:
        console.write(f"{text}\n")
    except (OutputError, ReaderGone):
        console.report(text)


def with_template_options(model: LoadedModel, options: ServeOptions) -> LoadedModel:
    """The model with what the options say of its template, where requests do not."""
    if options.preserve_thinking is None:
        return model
    defaults = {"preserve_thinking": options.preserve_thinking}
    return replace(model, frontend=model.frontend.with_template_defaults(defaults))


def background_loader(
    load_blocking: Callable[[LoadProgress], LoadedModel],
    engine_options: EngineOptions,
    sampling: SamplingOptions,
) -> Callable[[], Awaitable[ServedModel]]:
    """Load in a thread; a cancelled load ends at its next object and leaves nothing behind."""

    async def load() -> ServedModel:
        is_stopped = threading.Event()

        def check(_stage: str, _done: int, _total: int) -> None:
            if is_stopped.is_set():
                raise _LoadingStopped

        def load_and_describe() -> tuple[LoadedModel, dict[str, Any]]:
            model = load_blocking(check)
            return model, model_info(model.device, model.plan, engine_options, sampling)

        thread = asyncio.ensure_future(asyncio.to_thread(load_and_describe))
        try:
            model, info = await asyncio.shield(thread)
        except asyncio.CancelledError:
            is_stopped.set()
            await asyncio.wait((thread,))
            if not thread.cancelled() and thread.exception() is None:
                thread.result()[0].program.close()
            raise
        costs = await measured_costs(model)
        cache = make_cache(model, engine_options)
        engine = make_engine(model, engine_options, cache, costs)
        await engine.start()
        return ServedModel(
            engine, model.frontend, model.card, lambda: metric_families(engine, cache), info
        )

    return load


def metric_families(engine: Engine, cache: ContextCache) -> list[MetricFamily]:
    return [
        *engine_families(engine.status(), engine.metrics, engine.now()),
        *context_families(cache.metrics, cache.holdings()),
    ]


def _provisional_card(
    source: ModelSource, options: ServeOptions, engine_options: EngineOptions
) -> ModelCard:
    """What is known before the planner has spoken: the context may still shrink."""
    return ModelCard(
        name=options.model_name or source.name,
        architecture=source.config.architecture,
        max_context=engine_options.max_context or source.config.max_position_embeddings,
        created_s=int(time.time()),
        fingerprint="",
    )
