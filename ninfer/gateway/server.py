"""The listening socket and the life of the server process: load, serve, drain, stop.

listen -> load the model -> ready -> (signal) drain -> close
SIGTERM, SIGINT: drain; a second one: stop at once. A dead engine ends the server with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from ninfer.contract.errors import OptionError, Unavailable
from ninfer.gateway.app import Gateway
from ninfer.gateway.connection import ConnectionFactory
from ninfer.gateway.lifecycle import ServedModel

_logger = logging.getLogger(__name__)
_POLL_S: Final = 0.1
_FLUSH_S: Final = 5.0
"""For answers that are complete to leave the socket when the server stops."""
_CLOSE_S: Final = 0.25
"""For handlers that are cut off to say so to their clients."""
_BACKLOG: Final = 1024


@dataclass(slots=True)
class StopRequest:
    """Asks `serve` to stop; signals set it, tests may."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    immediate: asyncio.Event = field(default_factory=asyncio.Event)
    skip_grace: bool = False

    def on_signal(self, number: int) -> None:
        if self.drain.is_set():
            self.immediate.set()
        self.skip_grace = self.skip_grace or number == signal.SIGINT
        self.drain.set()


class Listener:
    """An open port of a Gateway; `url` has the real port when 0 was asked for."""

    def __init__(self, server: asyncio.Server, connections: web.Server, host: str) -> None:
        self._server = server
        self._connections = connections
        port = server.sockets[0].getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def stop_listening(self) -> None:
        self._server.close()

    async def aclose(self) -> None:
        """Close the port and every connection; requests still running are cancelled."""
        self._server.close()
        self._connections.pre_shutdown()
        await self._connections.shutdown(_CLOSE_S)


async def open_listener(gateway: Gateway, host: str, port: int) -> Listener:
    """Start to listen. Raises OptionError when the address cannot be had."""
    connections = web.Server(gateway.handle, handler_cancellation=True)
    factory = ConnectionFactory(
        connections, gateway.limits, gateway.refuse_method, gateway.counters.http.note_error
    )
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(factory, host, port, backlog=_BACKLOG)
    except OSError as error:
        reason = _reason_of(error)
        raise OptionError("--host/--port", f"cannot listen on {host}:{port}: {reason}") from None
    return Listener(server, connections, host)


def _reason_of(error: OSError) -> str:
    """asyncio puts a text of its own, with number and address, where the system's would be."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def serve(
    gateway: Gateway,
    load: Callable[[], Awaitable[ServedModel]],
    *,
    on_ready: Callable[[str], None],
    on_listening: Callable[[str], None] | None = None,
    stop: StopRequest | None = None,
) -> bool:
    """Run the server until it is told to stop.

    load      loads the model and starts its engine; runs while the port already answers; whoever
              cancels it expects it to clean up
    on_ready  is given the URL once requests are served
    Returns True when every request ended by itself, False when some were cut off. Raises what
    `load` raises, OptionError for the address, Unavailable when the engine died.
    """
    stop = stop or StopRequest()
    with _signals(stop):
        listener = await open_listener(gateway, gateway.options.host, gateway.options.port)
        try:
            if on_listening is not None:
                on_listening(listener.url)
            if await _load(gateway, load, stop):
                _logger.info("ready: requests are served at %s", listener.url)
                on_ready(listener.url)
                await _watch_engine(gateway, stop)
            return await _drain(gateway, listener, stop)
        finally:
            if gateway.lifecycle.model is not None:
                await gateway.lifecycle.model.engine.aclose()
            await listener.aclose()


async def _load(
    gateway: Gateway, load: Callable[[], Awaitable[ServedModel]], stop: StopRequest
) -> bool:
    """Load and attach; False when the server was told to stop meanwhile."""
    loading = asyncio.ensure_future(load())
    stopping = asyncio.create_task(stop.drain.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return False
        gateway.attach(loading.result())
        return True
    finally:
        await _cancel(loading)
        await _cancel(stopping)


async def _watch_engine(gateway: Gateway, stop: StopRequest) -> None:
    """Return when told to stop; raise Unavailable when the engine is dead.

    /health goes on reporting it for a moment, and clients get their error events. An engine that
    is only stuck may go on: whoever watches /health decides.
    """
    while not stop.drain.is_set():
        model = gateway.lifecycle.model
        has_died = model is not None and model.engine.status().has_ended
        if has_died and not gateway.options.exit_on_failure:
            await stop.drain.wait()
            return
        if model is not None and has_died:
            await _first_of(stop.drain, gateway.limits.failure_linger_s)
            text = model.engine.status().error or "the engine stopped"
            raise Unavailable("engine_unavailable", text)
        await _first_of(stop.drain, _POLL_S)


async def _drain(gateway: Gateway, listener: Listener, stop: StopRequest) -> bool:
    """Let running requests finish; True when none had to be cut off."""
    options, lifecycle = gateway.options, gateway.lifecycle
    lifecycle.begin_drain()
    grace_s = 0.0 if stop.skip_grace else min(options.drain_grace, options.drain_timeout)
    _logger.info("draining: new requests are taken for %g s", grace_s)
    await _first_of(stop.immediate, grace_s)
    lifecycle.close_admission()
    _logger.info("draining: %d requests run", gateway.counters.exchanges_active)
    has_finished = True
    if lifecycle.model is not None:
        draining = asyncio.create_task(
            lifecycle.model.engine.drain(options.drain_timeout - grace_s)
        )
        stopping = asyncio.create_task(stop.immediate.wait())
        try:
            await asyncio.wait((draining, stopping), return_when=asyncio.FIRST_COMPLETED)
            has_finished = draining.done() and draining.result()
        finally:
            await _cancel(draining)
            await _cancel(stopping)
    listener.stop_listening()
    await _flush(gateway, stop)
    _logger.info("stopped")
    return has_finished and gateway.counters.exchanges_active == 0


async def _flush(gateway: Gateway, stop: StopRequest) -> None:
    """Wait for the last answers to be written."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _FLUSH_S
    while gateway.counters.exchanges_active and loop.time() < end_s:
        if stop.immediate.is_set():
            return
        await asyncio.sleep(0.01)


async def _first_of(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel and wait; an error of a task that nobody needs any more is dropped with it."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()


@contextlib.contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    """SIGTERM and SIGINT go to `stop` where the platform and the thread allow it."""
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not every platform's loop takes handlers (NotImplementedError), nor any thread but the
            # main one (RuntimeError, ValueError); the server runs without signals there.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, stop.on_signal, number)
                installed.append(number)
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
