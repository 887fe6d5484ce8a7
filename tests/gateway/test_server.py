"""The server's life: loading, readiness, draining, signals, a dead engine, a taken port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from ninfer.contract.errors import ModelFileError, OptionError, Unavailable
from ninfer.contract.generation import EngineHealth
from ninfer.gateway.app import Gateway
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.server import StopRequest, serve
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD, FakeEngine, FakeFrontend, hold
from tests.helpers.gateway_rig import HOST, Rig, until


@dataclass(slots=True)
class Life:
    """A server under `serve`; `loaded` lets its model finish loading."""

    engine: FakeEngine
    gateway: Gateway
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    load_error: Exception | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    listening: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    load_was_cancelled: bool = False

    async def run(self) -> bool:
        return await serve(
            self.gateway,
            self._load,
            on_ready=self.ready.append,
            on_listening=self.listening.append,
            stop=self.stop,
        )

    async def _load(self) -> ServedModel:
        try:
            await self.loaded.wait()
        except asyncio.CancelledError:
            self.load_was_cancelled = True
            raise
        if self.load_error is not None:
            raise self.load_error
        return ServedModel(self.engine, FakeFrontend(), CARD)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Rig]:
        await until(lambda: bool(self.listening))
        url = self.listening[0]
        async with aiohttp.ClientSession() as session:
            port = int(url.rpartition(":")[2])
            yield Rig(self.gateway, self.engine, FakeFrontend(), url, session, port)


def new_life(
    drain_grace: float = 0.0, drain_timeout: float = 5.0, *, exit_on_failure: bool = True
) -> Life:
    options = ServeOptions(
        host=HOST,
        port=0,
        drain_grace=drain_grace,
        drain_timeout=drain_timeout,
        exit_on_failure=exit_on_failure,
    )
    gateway = Gateway(options, CARD, limits=GatewayLimits(failure_linger_s=0.1))
    return Life(FakeEngine(), gateway)


async def test_port_answers_while_the_model_loads_and_says_when_it_is_ready() -> None:
    life = new_life()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        assert (await rig.get("/health")).json() == {"status": "loading"}
        assert life.ready == []
        life.loaded.set()
        await until(lambda: bool(life.ready))
        assert life.ready == life.listening
        assert (await rig.chat()).status == 200
    life.stop.drain.set()
    assert await serving
    assert life.engine.is_closed


async def test_load_failure_ends_the_server_with_its_error() -> None:
    life = new_life()
    life.load_error = ModelFileError("model.safetensors", "embed_tokens", "is truncated")
    life.loaded.set()
    with pytest.raises(ModelFileError, match="embed_tokens"):
        await life.run()
    assert life.ready == []


async def test_stop_while_loading_cancels_the_load() -> None:
    life = new_life()
    serving = asyncio.create_task(life.run())
    await until(lambda: bool(life.listening))
    life.stop.drain.set()
    assert await serving
    assert life.load_was_cancelled


async def test_taken_port_is_an_option_error() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        options = ServeOptions(host=HOST, port=taken.getsockname()[1])
        life = Life(FakeEngine(), Gateway(options, CARD))
        with pytest.raises(OptionError, match="cannot listen"):
            await life.run()


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "Cannot assign requested address"), ("no-such-host.invalid", "")],
)
async def test_an_address_that_cannot_be_had_is_told_without_its_number(
    host: str, reason: str
) -> None:
    life = Life(FakeEngine(), Gateway(ServeOptions(host=host, port=0), CARD))
    with pytest.raises(OptionError) as caught:
        await life.run()
    place, _, text = str(caught.value).rpartition(": ")
    assert place == f"--host/--port: cannot listen on {host}:0"
    assert text.startswith(reason)
    assert "rrno" not in str(caught.value)


async def test_sigterm_takes_requests_in_its_grace_and_lets_them_finish() -> None:
    life = new_life(drain_grace=0.3)
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        gate = asyncio.Event()
        life.engine.script = hold(gate, "a")
        early = asyncio.create_task(rig.chat(stream=True))
        await until(lambda: len(life.engine.handles) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: life.gateway.lifecycle.health is EngineHealth.DRAINING)
        assert (await rig.get("/health")).status == 503
        in_grace = asyncio.create_task(rig.chat())
        await until(lambda: len(life.engine.handles) == 2)
        await until(lambda: not life.engine.is_admitting)
        late = await rig.chat()
        assert (late.status, late.error["code"]) == (503, "server_draining")
        assert late.headers["connection"] == "close"
        gate.set()
        assert (await early).events[-1] == "[DONE]"
        assert (await in_grace).status == 200
    assert await serving
    assert life.engine.is_closed


async def test_sigint_has_no_grace() -> None:
    life = new_life(drain_grace=60.0)
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    await until(lambda: bool(life.ready))
    start_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    assert await serving
    assert time.monotonic() - start_s < 30.0


async def test_second_signal_stops_at_once() -> None:
    life = new_life(drain_grace=60.0, drain_timeout=60.0)
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        life.engine.script = hold(asyncio.Event(), "a")
        _, writer = await rig.send_chat(stream=True)
        await until(lambda: len(life.engine.handles) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: life.gateway.lifecycle.health is EngineHealth.DRAINING)
        start_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not await serving
        assert time.monotonic() - start_s < 30.0
        assert life.engine.num_open == 0
        writer.close()
        await writer.wait_closed()


async def test_requests_that_outlast_the_drain_are_cut_off() -> None:
    life = new_life(drain_timeout=0.2)
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        life.engine.script = hold(asyncio.Event(), "a")
        asking = asyncio.create_task(rig.chat(stream=True))
        await until(lambda: len(life.engine.handles) == 1)
        life.stop.drain.set()
        assert not await serving
        answer = await asking
        assert answer.events[-1]["error"]["code"] == "server_draining"
    assert life.engine.num_open == 0


async def test_dead_engine_ends_the_server_after_saying_so() -> None:
    life = new_life()
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        life.engine.health = EngineHealth.UNAVAILABLE
        assert (await rig.get("/health")).json() == {"status": "unavailable"}
        with pytest.raises(Unavailable, match="device lost"):
            await serving


async def test_a_stuck_engine_is_reported_and_may_go_on() -> None:
    life = new_life()
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        life.engine.is_stuck, life.engine.health = True, EngineHealth.UNAVAILABLE
        await asyncio.sleep(0.3)  # longer than the dead one was reported
        assert (await rig.get("/health")).status == 503
        life.engine.health = EngineHealth.READY
        assert (await rig.chat()).status == 200
    life.stop.drain.set()
    assert await serving


async def test_a_server_may_outlive_its_engine() -> None:
    life = new_life(exit_on_failure=False)
    life.loaded.set()
    serving = asyncio.create_task(life.run())
    async with life.client() as rig:
        await until(lambda: bool(life.ready))
        life.engine.health = EngineHealth.UNAVAILABLE
        await asyncio.sleep(0.3)
        assert (await rig.get("/health")).json() == {"status": "unavailable"}
        assert (await rig.chat()).error["code"] == "engine_unavailable"
    life.stop.drain.set()
    await asyncio.wait_for(serving, 30)
