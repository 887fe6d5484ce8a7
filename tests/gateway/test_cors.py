"""Which pages may read answers, and what a browser is told that asks first."""

from __future__ import annotations

import pytest

from ninfer.options import ServeOptions
from tests.helpers.gateway_rig import HOST, MESSAGES, Answer, Rig, running_gateway

GOOD = "https://chat.example.org"
PREFIX = "access-control-"


def cors_of(answer: Answer) -> dict[str, str]:
    return {
        name.removeprefix(PREFIX): value
        for name, value in answer.headers.items()
        if name.startswith(PREFIX)
    }


async def preflight(rig: Rig, path: str, origin: str, headers: str = "authorization") -> Answer:
    return await rig.request(
        "OPTIONS",
        path,
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": headers,
        },
    )


async def test_no_page_is_let_in_by_default(rig: Rig) -> None:
    assert cors_of(await rig.get("/health", headers={"Origin": GOOD})) == {}
    answer = await preflight(rig, "/v1/chat/completions", GOOD)
    assert (answer.status, cors_of(answer)) == (204, {})
    assert answer.headers["allow"] == "POST"
    assert "vary" not in answer.headers


async def test_listed_origins_are_let_in_and_no_others() -> None:
    options = ServeOptions(host=HOST, port=0, cors_origins=(GOOD, "http://localhost:3000"))
    async with running_gateway(options=options) as rig:
        for origin, is_let_in in ((GOOD, True), (GOOD.upper(), True), (GOOD + ".evil", False)):
            answer = await rig.get("/health", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (
                origin if is_let_in else None
            )
            assert answer.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in answer.headers
            asked = cors_of(await preflight(rig, "/v1/models", origin))
            assert bool(asked) is is_let_in
        assert cors_of(await rig.get("/health")) == {}


async def test_a_preflight_says_what_the_path_takes() -> None:
    options = ServeOptions(host=HOST, port=0, cors_origins=("*",))
    async with running_gateway(options=options) as rig:
        answer = await preflight(rig, "/v1/chat/completions", GOOD, "x-api-key, x-odd")
        assert answer.status == 204
        assert answer.body == b""
        assert cors_of(answer) == {
            "allow-origin": "*",
            "expose-headers": "x-request-id, request-id, retry-after",
            "allow-methods": "POST",
            "allow-headers": "x-api-key, x-odd",
            "max-age": "600",
        }
        assert (await preflight(rig, "/nothing", GOOD)).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_and_streams_can_be_read_by_the_page(stream: bool) -> None:
    options = ServeOptions(host=HOST, port=0, cors_origins=("*",), api_key=("k",))
    async with running_gateway(options=options) as rig:
        for headers, status in (({}, 401), ({"x-api-key": "k"}, 200)):
            answer = await rig.post(
                "/v1/chat/completions",
                {"messages": MESSAGES, "stream": stream},
                headers={"Origin": GOOD, **headers},
            )
            assert answer.status == status
            assert cors_of(answer)["allow-origin"] == "*"


async def test_odd_header_names_are_not_repeated() -> None:
    options = ServeOptions(host=HOST, port=0, cors_origins=("*",))
    async with running_gateway(options=options) as rig:
        reader, writer = await rig.open_socket()
        writer.write(
            b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nOrigin: https://a\r\n"
            b"Access-Control-Request-Method: GET\r\n"
            b"Access-Control-Request-Headers: \xff\xfe\r\n\r\n"
        )
        answer = await reader.read()
        assert b" 204 " in answer.split(b"\r\n")[0]
        assert b"allow-headers" not in answer.lower()
        writer.close()


async def test_options_of_the_server_itself(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head = await reader.read()
    assert head.startswith(b"HTTP/1.1 204 ")
    assert b"Allow: DELETE, GET, POST, HEAD\r\n" in head
    writer.close()
