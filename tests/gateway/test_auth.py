"""API keys: who is let in, and that a key is asked for before a body is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ninfer.contract.errors import OptionError
from ninfer.gateway.auth import read_authentication
from ninfer.options import ServeOptions
from tests.helpers.gateway_rig import HOST, MESSAGES, PATIENT_LIMITS, Rig, running_gateway

KEYS = ("first-key", "second-key")
PROTECTED = [
    ("GET", "/v1/models"),
    ("GET", "/models/x"),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/v1/load"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generate"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/nothing"),
    ("PUT", "/health2"),
]


@pytest.fixture
async def locked() -> AsyncIterator[Rig]:
    options = ServeOptions(host=HOST, port=0, api_key=KEYS)
    async with running_gateway(options=options, limits=PATIENT_LIMITS) as rig:
        yield rig


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_without_a_key_everything_but_probes_is_a_401(
    locked: Rig, method: str, path: str
) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEYS[0]}"}):
        answer = await locked.request(method, path, headers=headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/metrics", "/", "/v1/health"])
async def test_probes_need_no_key(locked: Rig, path: str) -> None:
    assert (await locked.get(path)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEYS[0]}"},
        {"authorization": f"bearer  {KEYS[1]}"},
        {"x-api-key": KEYS[1]},
        {"api-key": KEYS[0]},
        {"x-api-key": KEYS[0], "Authorization": "Bearer sk-dummy"},
        {"api-key": "wrong", "Authorization": f"Bearer {KEYS[0]}"},
    ],
)
async def test_any_right_key_in_any_style_suffices(locked: Rig, headers: dict[str, str]) -> None:
    assert (await locked.get("/v1/models", headers=headers)).status == 200
    answer = await locked.post("/v1/chat/completions", {"messages": MESSAGES}, headers=headers)
    assert answer.status == 200


@pytest.mark.parametrize("key", ["", "first", "first-key ", "FIRST-KEY", "first-key,second-key"])
async def test_what_resembles_a_key_is_none(locked: Rig, key: str) -> None:
    expected = 200 if key.strip() in KEYS else 401
    assert (await locked.get("/version", headers={"x-api-key": key})).status == expected


async def test_bytes_that_are_no_text_are_no_key(locked: Rig) -> None:
    reader, writer = await locked.open_socket()
    writer.write(
        b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-api-key: \xff\xfe\r\n\r\n"
    )
    assert b" 401 " in (await reader.read()).split(b"\r\n")[0]
    writer.close()


async def test_the_key_is_asked_for_before_the_body_is_read(locked: Rig) -> None:
    """Neither received, nor invited, nor judged."""
    reader, writer = await locked.open_socket()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/nonsense\r\n"
        b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n"
    )
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_preflights_need_no_key(locked: Rig) -> None:
    assert (await locked.request("OPTIONS", "/v1/models")).status == 204


async def test_metrics_may_be_protected() -> None:
    options = ServeOptions(host=HOST, port=0, api_key=KEYS, protect_metrics=True)
    async with running_gateway(options=options) as rig:
        assert (await rig.get("/metrics")).status == 401
        assert (await rig.get("/metrics", headers={"api-key": KEYS[0]})).status == 200
        assert (await rig.get("/health")).status == 200


async def test_without_keys_any_credential_is_fine(rig: Rig) -> None:
    assert (await rig.get("/version", headers={"Authorization": "Bearer dummy"})).status == 200


async def test_keys_are_told_to_nobody(locked: Rig) -> None:
    answer = await locked.get("/server_info", headers={"x-api-key": KEYS[0]})
    assert answer.json()["is_protected"] is True
    for key in KEYS:
        assert key not in answer.body.decode()
        assert key not in repr(locked.gateway.options)


def test_a_file_may_hold_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# operators\nfirst-key\n\n  second-key  \n")
    authentication = read_authentication(ServeOptions(api_key_file=str(path)))
    assert authentication.is_required
    assert not read_authentication(ServeOptions()).is_required


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"two words\n", b"\xff\n", b"x" * 1025])
def test_a_file_without_a_good_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="--api-key-file"):
        read_authentication(ServeOptions(api_key_file=str(path)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--api-key-file"):
        read_authentication(ServeOptions(api_key_file=str(tmp_path / "none")))
