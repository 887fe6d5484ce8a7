"""Pictures in requests, from the socket to what the frontend is given."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ninfer.contract.chat import MediaPart, TextPart
from ninfer.gateway.media.desk import MediaDesk
from ninfer.gateway.media.limits import MediaLimits
from tests.helpers.fake_engine import CARD
from tests.helpers.gateway_rig import PATIENT_LIMITS, Rig, running_gateway, until
from tests.helpers.media_site import MediaSite, media_site, response
from tests.helpers.pictures import data_url, picture

PICTURE = picture("png", 3, 2)
SEEING = replace(CARD, has_vision=True)


@pytest.fixture
async def site() -> AsyncIterator[MediaSite]:
    async with media_site() as site:
        yield site


@pytest.fixture
async def seeing(site: MediaSite) -> AsyncIterator[Rig]:
    """A gateway of a model with vision that fetches from the site."""
    desk = MediaDesk(MediaLimits(fetch_timeout_s=600.0), site.fetcher())
    async with running_gateway(limits=PATIENT_LIMITS, card=SEEING, media=desk) as rig:
        yield rig


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


def part_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_pictures_stand_where_they_were_sent(seeing: Rig, site: MediaSite) -> None:
    other = picture("jpeg", 5, 4)
    site.pages["/a.jpg"] = response(other)
    parts = [part_of(site.url("/a.jpg")), {"type": "text", "text": "b"}, part_of(data_url(PICTURE))]
    parts[2]["cache_control"] = {"type": "ephemeral"}
    answer = await seeing.chat(messages=asking(*parts))
    assert answer.status == 200
    assert seeing.frontend.chats[0].messages[0].content == (
        TextPart("What is it?"),
        MediaPart("image", other),
        TextPart("b"),
        MediaPart("image", PICTURE),
        TextPart("", ends_prefix=True),
    )


async def test_a_mark_on_a_message_follows_its_picture(seeing: Rig) -> None:
    message = asking(part_of(data_url(PICTURE)))[0] | {"cache_control": {"type": "ephemeral"}}
    assert (await seeing.chat(messages=[message])).status == 200
    content = seeing.frontend.chats[0].messages[0].content
    assert content[1:] == (MediaPart("image", PICTURE), TextPart("", ends_prefix=True))


async def test_anthropic_pictures(seeing: Rig) -> None:
    data = b64encode(PICTURE).decode()
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    body = {"messages": asking({"type": "image", "source": source}), "max_tokens": 5}
    assert (await seeing.post("/v1/messages", body)).status == 200
    assert MediaPart("image", PICTURE) in seeing.frontend.chats[0].messages[0].content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_picture_is_a_400_before_any_event(seeing: Rig, stream: bool) -> None:
    answer = await seeing.chat(
        messages=asking(part_of(data_url(picture("png", 1093, 5)))), stream=stream
    )
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (
        "invalid_media",
        "messages[0].content[1].image_url.url",
    )
    assert seeing.engine.handles == []


async def test_remote_pictures_are_off_by_default() -> None:
    async with running_gateway(limits=PATIENT_LIMITS, card=SEEING) as rig:
        answer = await rig.chat(messages=asking(part_of("https://example.org/a.png")))
        assert (answer.status, answer.error["code"]) == (400, "remote_media_disabled")


@pytest.mark.parametrize(
    "part",
    [part_of("https://example.org/a.png"), part_of("nonsense"), {"type": "image_url"},
     {"type": "input_video"}, {"type": "image", "source": 5}],
)  # fmt: skip
async def test_a_model_of_text_takes_none(rig: Rig, part: dict[str, Any]) -> None:
    answer = await rig.chat(messages=asking(part))
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (
        "unsupported_value",
        "messages[0].content[1]",
    )


async def test_a_client_that_leaves_ends_its_fetch(seeing: Rig, site: MediaSite) -> None:
    async def silence(writer: asyncio.StreamWriter) -> None:
        await writer.drain()
        await asyncio.sleep(3600)

    site.pages["/silence"] = silence
    _, writer = await seeing.send_chat(messages=asking(part_of(site.url("/silence"))))
    await until(lambda: site.num_open == 1)
    writer.close()
    await until(lambda: seeing.gateway.counters.exchanges_active == 0)
    assert seeing.gateway.counters.aborts == 1
    assert seeing.engine.handles == []


async def test_parts_of_any_type_are_no_server_error(seeing: Rig) -> None:
    kinds: tuple[Any, ...] = ([], {}, 5, None, "image_url")
    for kind in kinds:
        answer = await seeing.chat(messages=asking({"type": kind, "image_url": 1}))
        assert answer.status == 400
