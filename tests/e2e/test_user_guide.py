"""What the user guide says of requests is what the server does."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from ninfer.frontend.template import MAX_SOURCE_CHARACTERS
from ninfer.gateway.errors import ERROR_RULES
from ninfer.gateway.generation_fields import (
    MAX_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.prompt_fields import MAX_PROMPTS
from ninfer.options import EngineOptions
from tests.helpers.model_paths import REPOSITORY
from tests.helpers.served_model import served_demo_model

GUIDE = (REPOSITORY / "docs" / "user-guide.md").read_text(encoding="utf-8")
HTTP = GUIDE[GUIDE.index("## HTTP endpoints") :]
FIELDS = HTTP[HTTP.index("### Fields of a request") : HTTP.index("### Conversations")]
MESSAGES = [{"role": "user", "content": "Hi"}]
RANGE = re.compile(r"(?:(at least|above) )?(-?\d+)(?: to (-?\d+)|, at most (\d+))?(?!\S* strings)")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served_demo_model(EngineOptions(executor="cpu", max_context=256)) as server:
        yield server.url


async def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        text = await response.text()
        return response.status, text if "event-stream" in response.content_type else json.loads(
            text
        )


def rows(section: str) -> Iterator[tuple[list[str], str]]:
    """(names, values) of every row of a table."""
    for line in section.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield re.findall(r"`(\w+)`", cells[0]), cells[1]


def bounds(values: str) -> tuple[list[float], list[float]]:
    """(legal, illegal) values on both sides of the limits of a range."""
    match = RANGE.fullmatch(values)
    if match is None:
        return [], []
    kind, low, to, most = match.groups()
    legal, illegal = [float(low)], [float(low) - 1.0]
    if kind == "above":
        legal, illegal = [], [float(low)]
    if (high := to or most) is not None:
        legal.append(float(high))
        illegal.append(float(high) + 1.0)
    return legal, illegal


RANGES = [
    (name, *bounds(values)) for names, values in rows(FIELDS) for name in names if bounds(values)[1]
]


async def test_ranges_of_fields_are_as_said(url: str) -> None:
    assert len(RANGES) >= 11
    for name, legal, illegal in RANGES:
        for value in legal:
            body = {"messages": MESSAGES, "max_tokens": 1, name: value}
            assert (await post(f"{url}/v1/chat/completions", body))[0] == 200, (name, value)
        for value in illegal:
            body = {"messages": MESSAGES, "max_tokens": 1, name: value}
            status, answer = await post(f"{url}/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, name), value


async def test_every_field_is_known_to_both_protocols(url: str) -> None:
    names = [name for names, _ in rows(FIELDS) for name in names]
    for name in names:
        status, answer = await post(f"{url}/generate", {"text": "a", "sampling_params": {name: {}}})
        if name == "logit_bias":
            assert status == 200
        else:
            assert (status, answer["error"]["param"]) == (400, f"sampling_params.{name}")


async def test_the_commands_of_the_guide_work(url: str) -> None:
    commands = re.findall(r"curl [^\n]*8080(/\S+) [^']*'[^']*' -d '([^']*)'", HTTP)
    paths = ["/v1/chat/completions", "/generate", "/v1/completions"]
    assert [path for path, _ in commands] == paths
    for path, body in commands:
        status, answer = await post(url + path, json.loads(body))
        assert status == 200
        is_streamed = isinstance(answer, str)
        if is_streamed:
            assert answer.endswith("data: [DONE]\n\n")
        else:
            assert answer.get("text") or answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "statement",
    [
        f"at most {MAX_STOPS} strings, each 1 to {MAX_STOP_CHARACTERS} characters",
        f"at most {MAX_STOP_TOKEN_IDS} token ids",
        f"at most {MAX_BIASES} token ids, each -100 to 100",
        f"a list of up to {MAX_PROMPTS}",
        f"headers ({GatewayLimits().header_timeout_s:g} s)",
        f"a comment every {GatewayLimits().keep_alive_interval_s:g} seconds",
        f"takes nothing for {GatewayLimits().write_timeout_s:g} seconds",
    ],
)
def test_limits_are_as_said(statement: str) -> None:
    assert statement in " ".join(HTTP.split())


def test_limits_of_models_are_as_said() -> None:
    assert f"longer than {MAX_SOURCE_CHARACTERS:,} characters" in " ".join(GUIDE.split())


def test_every_status_has_a_row() -> None:
    table = HTTP[HTTP.index("| status |") :].split("\n\n")[0]
    listed = {int(code) for row in table.splitlines() for code in re.findall(r"\d+", row[:20])}
    assert listed == {rule.status for rule in ERROR_RULES.values()}
