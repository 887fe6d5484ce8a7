"""Pictures in items: where they stand, and that a kept conversation keeps the files."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ninfer.contract.chat import MediaPart
from ninfer.gateway.media.desk import MediaDesk
from ninfer.gateway.media.limits import MediaLimits
from tests.helpers.fake_engine import CARD
from tests.helpers.gateway_rig import PATIENT_LIMITS, Answer, Rig, running_gateway
from tests.helpers.media_site import MediaSite, media_site, response
from tests.helpers.pictures import data_url, picture

INLINE, FETCHED, OTHER = picture("png", 3, 2), picture("jpeg", 5, 4), picture("gif", 2, 2)
SEEING = replace(CARD, has_vision=True)


@pytest.fixture
async def site() -> AsyncIterator[MediaSite]:
    async with media_site() as site:
        site.pages["/a.jpg"] = response(FETCHED)
        yield site


@pytest.fixture
async def seeing(site: MediaSite) -> AsyncIterator[Rig]:
    desk = MediaDesk(MediaLimits(fetch_timeout_s=600.0), site.fetcher())
    async with running_gateway(limits=PATIENT_LIMITS, card=SEEING, media=desk) as rig:
        yield rig


def image(url: Any) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": url}


def shown(*parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(parts)}


def result(*parts: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": list(parts)}


async def ask(rig: Rig, *items: dict[str, Any], **fields: Any) -> Answer:
    return await rig.post("/v1/responses", {"input": list(items), **fields})


def files(rig: Rig) -> list[bytes]:
    messages = rig.frontend.chats[-1].messages
    parts = [part for message in messages for part in message.content]
    return [part.data for part in parts if isinstance(part, MediaPart)]


async def test_pictures_stand_where_they_were_sent(seeing: Rig, site: MediaSite) -> None:
    text = {"type": "input_text", "text": "a"}
    items = [
        shown(image(data_url(INLINE)), text, image({"url": site.url("/a.jpg")})),
        result(text, image(data_url(OTHER))),
    ]
    assert (await ask(seeing, *items)).status == 200
    assert files(seeing) == [INLINE, FETCHED, OTHER]
    kinds = [[type(part).__name__ for part in m.content] for m in seeing.frontend.chats[0].messages]
    assert kinds == [["MediaPart", "TextPart", "MediaPart"], ["TextPart", "MediaPart"]]


async def test_a_model_of_text_refuses_them(rig: Rig) -> None:
    for item, path in (
        (shown(image(data_url(INLINE))), "input[0].content[0]"),
        (result(image(data_url(INLINE))), "input[0].output[0]"),
    ):
        answer = await ask(rig, item)
        assert (answer.status, answer.error["code"]) == (400, "unsupported_value")
        assert answer.error["param"] == path


async def test_a_bad_picture_is_named(seeing: Rig) -> None:
    answer = await ask(seeing, shown("a"), shown(image(data_url(b"no picture"))), stream=True)
    assert (answer.status, answer.error["code"]) == (400, "invalid_media")
    assert answer.error["param"] == "input[1].content[0].image_url"
    uploaded = await ask(seeing, shown({"type": "input_image", "file_id": "file-1"}))
    assert (uploaded.status, uploaded.error["code"]) == (400, "unsupported_value")


@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_kept_conversation_keeps_the_files(
    seeing: Rig, site: MediaSite, is_nested: bool
) -> None:
    url = site.url("/a.jpg")
    items = [shown(image({"url": url} if is_nested else url)), shown(image(data_url(INLINE)))]
    first = (await ask(seeing, *items)).json()
    site.pages.clear()
    second = (
        await ask(seeing, result(image(data_url(OTHER))), previous_response_id=first["id"])
    ).json()
    assert files(seeing) == [FETCHED, INLINE, OTHER]
    listed = (await seeing.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()
    kept = listed["data"][0]["content"][0]["image_url"]
    address = kept["url"] if is_nested else kept
    head, _, data = address.partition(",")
    assert (head, b64decode(data)) == ("data:;base64", FETCHED)
    reference = {"type": "item_reference", "id": listed["data"][0]["id"]}
    assert (await ask(seeing, reference, reference)).status == 200
    assert files(seeing) == [FETCHED, FETCHED]


async def test_what_is_not_kept_is_left_as_it_is(seeing: Rig, site: MediaSite) -> None:
    body = (await ask(seeing, shown(image(site.url("/a.jpg"))), store=False)).json()
    assert body["store"] is False
    assert files(seeing) == [FETCHED]
