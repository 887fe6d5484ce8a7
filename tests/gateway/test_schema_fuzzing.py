"""A fuzzer that reads the OpenAPI document asks a live server: never a 5xx, always what it says.

The server runs the real frontend over a scripted engine, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.openapi.document import openapi_document
from ninfer.gateway.openapi.operations import OPERATIONS
from tests.helpers.demo_frontend import demo_frontend
from tests.helpers.fake_engine import CARD, FakeEngine
from tests.helpers.gateway_rig import PATIENT_LIMITS, running_gateway

NUM_EXAMPLES: Final = 10
CHECKS: Final = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a gateway that runs in another thread."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with running_gateway(limits=PATIENT_LIMITS) as rig:
            rig.gateway.attach(ServedModel(FakeEngine(), demo_frontend(), CARD))
            stop = asyncio.Event()
            started.set_result((rig.url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url, loop, stop = started.result(60)
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


CASES: Final = [
    (operation.method, operation.path, mode)
    for operation in OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or operation.request or operation.query
]
SCHEMA: Final = schemathesis.openapi.from_dict(openapi_document())


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_that_the_document_describes_or_forbids_breaks_the_server(
    server: str, method: str, path: str, mode: GenerationMode
) -> None:
    strategy = SCHEMA[path][method].as_strategy(generation_mode=mode)
    statuses: Counter[int] = Counter()

    @seed(7)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        response = case.call_and_validate(base_url=server, checks=list(CHECKS))
        statuses[response.status_code] += 1

    ask()
    if mode is GenerationMode.NEGATIVE:
        assert any(400 <= status < 500 for status in statuses), statuses
    elif "{" not in path and "responses" not in path:  # most of those name what is not kept
        assert 200 in statuses, statuses
    with urllib.request.urlopen(f"{server}/health", timeout=60) as answer:
        assert answer.status == 200
