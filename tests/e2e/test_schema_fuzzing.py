"""A fuzzer that reads the OpenAPI document asks the demo model: its answers are short, its requests
are not tame. Never a 5xx, always an answer that the document describes, everything free afterwards.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from ninfer.gateway.openapi.document import openapi_document
from ninfer.gateway.openapi.operations import OPERATIONS
from ninfer.options import EngineOptions
from tests.helpers.served_model import RunningServer, served_demo_model

NUM_EXAMPLES: Final = 6
MOST_TOKENS: Final = 4
SCHEMA: Final = schemathesis.openapi.from_dict(openapi_document())
PATHS: Final = [item.path for item in OPERATIONS if item.streams]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    started: Future[tuple[RunningServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with served_demo_model(EngineOptions(executor="cpu", max_context=512)) as running:
            stop = asyncio.Event()
            started.set_result((running, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    running, loop, stop = started.result(60)
    yield running
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


def shortened(body: Any) -> None:
    """Limit what the request may cost; what is not an object is left alone."""
    if isinstance(body, list):
        for item in body:
            shortened(item)
    if not isinstance(body, dict):
        return
    shortened(body.get("sampling_params"))
    if not isinstance(body.get("sampling_params"), dict | list):
        body["max_tokens"] = MOST_TOKENS
    for name in ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"):
        if name in body:
            body[name] = MOST_TOKENS
    for name in ("min_tokens", "min_new_tokens"):
        body.pop(name, None)


@pytest.mark.parametrize("path", PATHS)
def test_the_model_itself_survives_what_the_document_allows(
    server: RunningServer, path: str
) -> None:
    @seed(7)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=SCHEMA[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case: Any) -> None:
        shortened(case.body)
        case.call_and_validate(
            base_url=server.url, checks=[not_a_server_error, response_schema_conformance]
        )

    ask()
    status = server.engine.status()
    assert status.error is None
    assert (status.running, status.waiting) == (0, 0)
