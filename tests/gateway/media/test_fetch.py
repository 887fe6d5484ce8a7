"""Every way in which a URL could lead the server where its sender may not go."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ninfer.contract.errors import RequestError
from ninfer.gateway.media.fetch import RemoteFetcher, SystemLookup
from ninfer.gateway.media.limits import MediaLimits
from tests.helpers.gateway_rig import until
from tests.helpers.media_site import INSIDE, OUTSIDE, MediaSite, media_site, redirect, response
from tests.helpers.proxies import make_certificate

PATH = "messages[0].content[1].image_url.url"
BODY = b"any bytes"


@pytest.fixture
async def site() -> AsyncIterator[MediaSite]:
    async with media_site() as site:
        site.pages["/ok"] = response(BODY)
        yield site


async def refused(fetcher: RemoteFetcher, url: str) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await fetcher.fetch(url, PATH)
    assert raised.value.param == PATH
    return raised.value


async def failed(fetcher: RemoteFetcher, url: str) -> None:
    """All reasons look the same."""
    error = await refused(fetcher, url)
    assert (error.code, error.message) == ("invalid_media", f"'{PATH}' could not be fetched.")


async def test_a_file_is_fetched_from_the_address_that_was_checked(site: MediaSite) -> None:
    site.names["good.test"] = [[OUTSIDE], [INSIDE]]
    assert await site.fetcher().fetch(site.url("/ok#part"), PATH) == BODY
    assert site.questions == ["good.test"], "a second answer is never asked for"
    (head,) = site.heads
    assert head.startswith("GET /ok HTTP/1.1\r\n")
    assert f"Host: good.test:{site.port}\r\n" in head
    lowered = head.lower()
    assert "accept-encoding: identity" in lowered
    assert not any(name in lowered for name in ("cookie", "authorization", "referer"))


@pytest.mark.parametrize(
    "answers",
    [[INSIDE], [OUTSIDE, INSIDE], [INSIDE, OUTSIDE], [OUTSIDE, "::1"], ["::ffff:127.0.0.2"],
     ["64:ff9b::7f00:2"], ["2002:7f00:2::1"], ["169.254.169.254"], ["fe80::1"], []],
)  # fmt: skip
async def test_one_hidden_answer_condemns_the_name(site: MediaSite, answers: list[str]) -> None:
    site.names["evil.test"] = [answers]
    await failed(site.fetcher(), site.url("/ok", "evil.test"))
    assert site.inside == 0
    assert site.heads == []


@pytest.mark.parametrize(
    "host",
    [INSIDE, "127.2", "2130706434", "0x7f000002", "0177.0.0.2", "127.0.0.2.", "[::ffff:127.0.0.2]",
     "[::1]", "①②⑦.⓪.⓪.②", "127。0。0。2"],
)  # fmt: skip
async def test_addresses_in_disguise(site: MediaSite, host: str) -> None:
    await failed(site.fetcher(), site.url("/ok", host))
    fetcher = RemoteFetcher(
        MediaLimits(), site.fetcher(None, f"{host.strip('.')}:{site.port}")._rules,
        lookup=SystemLookup(), is_allowed=lambda address: address == OUTSIDE,
    )  # fmt: skip
    await failed(fetcher, site.url("/ok", host))
    assert site.inside == 0


async def test_redirects_are_followed_and_checked(site: MediaSite) -> None:
    site.pages["/1"] = redirect("/2", "301 Moved Permanently")
    site.pages["/2"] = redirect(site.url("/3"), "307 Temporary Redirect")
    site.pages["/3"] = redirect(f"//good.test:{site.port}/ok", "308 Permanent Redirect")
    assert await site.fetcher().fetch(site.url("/1"), PATH) == BODY
    site.pages["/0"] = redirect("/1")
    await failed(site.fetcher(), site.url("/0"))
    site.pages["/loop"] = redirect("/loop")
    site.heads.clear()
    await failed(site.fetcher(), site.url("/loop"))
    assert len(site.heads) == 4


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.2:{port}/",
        "http://evil.test:{port}/",
        "http://good.test:1/",
        "http://good.test:99999/",
        "http://u:p@good.test:{port}/ok",
        "ftp://good.test/",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "http://[",
        "",
    ],
)
async def test_redirects_to_forbidden_places(site: MediaSite, target: str) -> None:
    site.names["evil.test"] = [[INSIDE]]
    site.pages["/go"] = redirect(target.format(port=site.port))
    await failed(site.fetcher(), site.url("/go"))
    assert site.inside == 0
    assert len(site.heads) == 1


async def test_a_name_that_changes_its_mind_between_redirects(site: MediaSite) -> None:
    site.names["good.test"] = [[OUTSIDE], [INSIDE]]
    site.pages["/go"] = redirect("/ok")
    await failed(site.fetcher(), site.url("/go"))
    assert site.inside == 0
    assert site.questions == ["good.test", "good.test"]


async def test_only_usual_ports_without_a_list(site: MediaSite) -> None:
    await failed(site.fetcher(is_open=False), site.url("/ok"))
    assert site.questions == []


@pytest.mark.parametrize(
    "page",
    [
        response(b"", status="404 Not Found"),
        response(BODY, status="206 Partial Content"),
        response(b"", status="302 Found"),
        response(gzip.compress(BODY), Content_Encoding="gzip"),
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"",
    ],
)
async def test_bad_answers_are_one_error(site: MediaSite, page: bytes) -> None:
    site.pages["/bad"] = page
    await failed(site.fetcher(), site.url("/bad"))


async def test_unknown_names_and_closed_ports_look_the_same(site: MediaSite) -> None:
    await failed(site.fetcher(), site.url("/ok", "nowhere.test"))
    await failed(site.fetcher(None, "good.test:1"), "http://good.test:1/")


async def test_size_is_limited_by_what_is_announced_and_by_what_comes(site: MediaSite) -> None:
    limits = MediaLimits(max_item_bytes=200_000)
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()
            sent += 65536

    site.pages["/endless"] = endless
    site.pages["/big"] = response(bytes(200_001))
    site.pages["/full"] = response(bytes(200_000))
    site.pages["/liar"] = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"
    assert len(await site.fetcher(limits).fetch(site.url("/full"), PATH)) == 200_000
    for path in ("/endless", "/big", "/liar"):
        assert (await refused(site.fetcher(limits), site.url(path))).code == "media_budget_exceeded"
    assert sent < 32 * 2**20, "reading stops at the limit"
    await until(lambda: site.num_open == 0)


async def test_a_trickle_and_silence_end_with_the_time(site: MediaSite) -> None:
    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def silence(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async def slow_redirect(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(redirect("/slow"))

    site.pages |= {"/trickle": trickle, "/silence": silence, "/slow": slow_redirect}
    fetcher = site.fetcher(MediaLimits(fetch_timeout_s=0.25))
    await asyncio.gather(
        *(failed(fetcher, site.url(path)) for path in ("/trickle", "/silence", "/slow"))
    )
    assert sum(head.startswith("GET /slow") for head in site.heads) == 2


async def test_few_fetches_run_at_once_and_cancelling_frees_their_places(site: MediaSite) -> None:
    gate = asyncio.Event()
    most = 0

    async def held(writer: asyncio.StreamWriter) -> None:
        nonlocal most
        most = max(most, site.num_open)
        await gate.wait()
        writer.write(response(BODY))

    site.pages["/held"] = held
    fetcher = site.fetcher(MediaLimits(fetches_at_once=2, fetch_timeout_s=60))
    tasks = [asyncio.create_task(fetcher.fetch(site.url("/held"), PATH)) for _ in range(6)]
    await until(lambda: site.num_open == 2)
    for task in tasks[:2]:
        task.cancel()
    await until(lambda: tasks[0].done() and tasks[1].done() and len(site.heads) == 4)
    gate.set()
    assert await asyncio.gather(*tasks[2:]) == [BODY] * 4
    assert most <= 4
    await until(lambda: site.num_open == 0)


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    site: MediaSite, tmp_path: Path
) -> None:
    make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.read(100))
        writer.write(response(BODY))
        writer.close()

    server = await asyncio.start_server(answer, OUTSIDE, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    site.names["localhost"] = [[OUTSIDE]]
    async with server:
        await failed(site.fetcher(None, f"localhost:{port}"), f"https://localhost:{port}/ok")
    assert site.questions == ["localhost"]
    assert heads == []


async def test_environment_names_no_proxy(site: MediaSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{INSIDE}:{site.port}")
    monkeypatch.setenv("http_proxy", f"http://{INSIDE}:{site.port}")
    assert await site.fetcher().fetch(site.url("/ok"), PATH) == BODY
    assert site.inside == 0


async def test_system_resolver_gives_numbers() -> None:
    assert OUTSIDE in await SystemLookup()("localhost", 80)
