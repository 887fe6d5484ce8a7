"""Random bytes and random field values: never a 5xx, never a hang, healthy afterwards."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pytest

from ninfer.gateway.errors import ErrorFamily, family_of
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.openapi.operations import OPERATIONS
from tests.helpers.demo_frontend import demo_frontend
from tests.helpers.fake_engine import CARD, FakeEngine
from tests.helpers.gateway_rig import PATIENCE_S, Rig
from tests.helpers.request_bodies import BODIES

NUM_MUTATIONS: Final = 200
BATCH: Final = 50
NUM_BATCHES: Final = -(-10_000 // (BATCH * len(BODIES)))
"""Ten thousand bodies in all."""
FRAGMENTS: Final = (
    b"null", b"true", b"[]", b"[[", b"{}", b"{", b"}", b'"', b'"a":', b'"a":1', b"1e999", b"-0",
    b"NaN", b"1" * 400, b'"\\ud83d"', b'"\\u0000"', b"\xff", b"\xef\xbb\xbf", b"[" * 200, b",",
    b" ", b'"text":"a"', b'"messages":[{"role":"user"}]', b'"input":"a"', b'"stream":1',
    b'"rid":5', b'"n":99', b'"prompt":"a"', b'"content":"a"', b'"tokens":[1]',
)  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 5.5, 1e308, -1e308, 2**63, 10**40, "", "x", "\x00", "5", [], {},
    [None], [[]], {"a": None}, {"type": "x"}, "\ufffd", ["x"] * 50, {"role": "user"}, -(2**63),
]  # fmt: skip


def mutated(template: Mapping[str, Any], source: random.Random) -> Any:
    """The template with one to three places replaced, removed or doubled."""
    root = copy.deepcopy(dict(template))
    for _ in range(source.randint(1, 3)):
        holder: Any = root
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = source.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and source.random() < 0.7:
                holder = holder[key]
                continue
            if source.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(source.choice(VALUES))
            break
    return root


class RoomyEngine(FakeEngine):
    @property
    def max_context(self) -> int:
        return 4096


@pytest.fixture
async def real(rig: Rig) -> Rig:
    """A gateway over the real frontend, which every body reaches."""
    engine = rig.engine = RoomyEngine()
    rig.gateway.attach(ServedModel(engine, demo_frontend(), CARD))
    return rig


def test_every_route_with_a_body_is_attacked() -> None:
    assert set(BODIES) == {item.path for item in OPERATIONS if item.request is not None}


@pytest.mark.no_cover
@pytest.mark.parametrize("path", BODIES)
async def test_mutated_fields(real: Rig, path: str) -> None:
    source = random.Random(7)
    assert (await real.post(path, BODIES[path])).status == 200
    is_openai = family_of(path) is ErrorFamily.OPENAI
    statuses = set()
    for _ in range(NUM_MUTATIONS):
        request = mutated(BODIES[path], source)
        answer = await real.post_bytes(path, json.dumps(request).encode())
        statuses.add(answer.status)
        assert answer.status in (200, 400, 404), (request, answer.body)
        if answer.status != 200 and is_openai:
            assert answer.error["code"]
            root = re.split(r"[.\[]", answer.error["param"])[0]
            is_missing = answer.error["code"] == "missing_required_parameter"
            assert root in request or is_missing, (request, answer.error)
    assert {200, 400} <= statuses
    assert real.engine.num_open == 0
    assert (await real.get("/health")).status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_mutated_bytes(real: Rig, path: str) -> None:
    source = random.Random(8)
    whole = json.dumps(BODIES[path]).encode()
    for _ in range(NUM_MUTATIONS // 4):
        data = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        encoding = source.choice(["identity", "gzip", "zstd", "deflate", "nonsense"])
        answer = await real.post_bytes(path, bytes(data), Content_Encoding=encoding)
        assert answer.status in (200, 400, 404, 415), answer.body
    assert real.engine.num_open == 0
    assert (await real.chat()).status == 200


def random_body(source: random.Random) -> bytes:
    """Noise, JSON of odd pieces, and pieces of JSON."""
    kind = source.randrange(4)
    if kind == 0:
        return source.randbytes(source.randrange(200))
    pieces = source.choices(FRAGMENTS, k=source.randrange(1, 12))
    if kind == 1:
        return b"".join(pieces)
    if kind == 2:
        return b"{" + b",".join(pieces) + b"}"
    return b'{"messages":' + b"".join(pieces) + b"}"


def head_of(path: str, length: int, source: random.Random) -> bytes:
    encoding = source.choice(["", "", "", "gzip", "zstd", "deflate", "gzip, zstd"])
    media_type = source.choice(["application/json"] * 6 + ["text/plain", "application/x+json"])
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\n"
        f"Content-Encoding: {encoding}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def answers(reader: asyncio.StreamReader, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        statuses[int(head.split()[1])] += 1
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None, head
        await reader.readexactly(int(length[1]))
    return statuses


@pytest.mark.no_cover
@pytest.mark.parametrize("path", BODIES)
async def test_random_bodies(rig: Rig, path: str) -> None:
    """Pipelined, so that thousands are quick."""
    source = random.Random(path)
    reader, writer = await rig.open_socket()
    statuses: Counter[int] = Counter()
    for _ in range(NUM_BATCHES):
        bodies = [random_body(source) for _ in range(BATCH)]
        for body in bodies:
            writer.write(head_of(path, len(body), source) + body)
        async with asyncio.timeout(PATIENCE_S):
            statuses += await answers(reader, BATCH)
    assert statuses.total() == NUM_BATCHES * BATCH
    assert set(statuses) <= {200, 400, 415}, statuses
    assert rig.engine.num_open == 0
    assert (await rig.chat()).status == 200
    writer.close()
