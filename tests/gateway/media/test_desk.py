"""From references to files: budgets, formats, order, and where remote media are off."""

from __future__ import annotations

import asyncio
from base64 import b64encode

import pytest

from ninfer.contract.chat import ChatMessage, ChatPrompt, MediaPart, TextPart
from ninfer.contract.errors import RequestError
from ninfer.gateway.media.desk import MediaDesk, open_media_desk, with_media
from ninfer.gateway.media.limits import MediaLimits
from ninfer.gateway.media.references import MediaReference
from ninfer.options import ServeOptions
from tests.helpers.gateway_rig import until
from tests.helpers.media_site import media_site, response
from tests.helpers.pictures import data_url, picture, png_header

PICTURE = picture("png", 3, 2)
MP4 = b"\0\0\0\x18ftypmp42" + bytes(16)


def image(text: str, path: str = "p", *, is_base64: bool = False) -> MediaReference:
    return MediaReference("image", path, text, is_base64)


async def refusal(*references: MediaReference, limits: MediaLimits | None = None) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await MediaDesk(limits or MediaLimits(), None).acquire(references)
    return raised.value


async def test_inline_media_come_in_their_order() -> None:
    desk = MediaDesk(MediaLimits(), None)
    other = picture("jpeg", 5, 4)
    parts = await desk.acquire(
        [
            image(data_url(PICTURE, "text/html"), "a"),
            MediaReference("video", "b", data_url(MP4, "video/mp4")),
            image(b64encode(other).decode(), "c", is_base64=True),
        ]
    )
    assert parts == (
        MediaPart("image", PICTURE), MediaPart("video", MP4), MediaPart("image", other)
    )  # fmt: skip
    assert await desk.acquire([]) == ()
    twice = [image(data_url(data), "same") for data in (PICTURE, other)]
    assert [part.data for part in await desk.acquire(twice)] == [PICTURE, other]


@pytest.mark.parametrize(
    "text", ["file:///etc/passwd", "ftp://a.org/x", "/etc/passwd", "", "cGljdHVyZQ==", "blob:x"]
)
async def test_other_schemes_are_refused(text: str) -> None:
    error = await refusal(image(text, "messages[0]"))
    assert (error.code, error.param) == ("invalid_media", "messages[0]")


@pytest.mark.parametrize("text", ["http://a.org/x.png", "HTTPS://a.org", " https://a.org/x"])
async def test_remote_media_are_off(text: str) -> None:
    error = await refusal(image("data:,broken"), image(text, "q"))
    assert (error.code, error.param) == ("remote_media_disabled", "q")


async def test_bytes_decide_what_a_file_is() -> None:
    error = await refusal(image(data_url(b"<html>", "image/png")))
    assert error.code == "invalid_media"
    error = await refusal(MediaReference("video", "p", data_url(PICTURE, "video/mp4")))
    assert error.code == "invalid_media"
    error = await refusal(image(data_url(PICTURE[:18])))
    assert (error.code, error.message) == ("invalid_media", "'p' is cut off in its header.")


@pytest.mark.parametrize(("size", "is_right"), [((1093, 5), False), ((1000, 5), True),
                                                ((5, 1000), True), ((5, 1001), False)])  # fmt: skip
async def test_long_and_narrow_pictures(size: tuple[int, int], is_right: bool) -> None:
    reference = image(data_url(picture("png", *size)))
    if is_right:
        assert len(await MediaDesk(MediaLimits(), None).acquire([reference])) == 1
    else:
        assert (await refusal(reference)).code == "invalid_media"


async def test_pixels_are_limited_by_the_header_alone() -> None:
    error = await refusal(image(data_url(png_header(8001, 8000))))
    assert error.code == "media_budget_exceeded"
    fits = image(data_url(png_header(8000, 8000)))
    references = [MediaReference("image", f"p{index}", fits.text) for index in range(4)]
    assert len(await MediaDesk(MediaLimits(), None).acquire(references[:3])) == 3
    error = await refusal(*references)
    assert (error.code, error.param) == ("media_budget_exceeded", "p3")


async def test_number_and_bytes_are_limited() -> None:
    references = [image(data_url(PICTURE), f"p{index}") for index in range(3)]
    error = await refusal(*references, limits=MediaLimits(max_items=2))
    assert (error.code, error.param) == ("media_budget_exceeded", "p2")
    error = await refusal(*references, limits=MediaLimits(max_item_bytes=len(PICTURE) - 1))
    assert (error.code, error.param) == ("media_budget_exceeded", "p0")
    error = await refusal(*references, limits=MediaLimits(max_request_bytes=2 * len(PICTURE)))
    assert (error.code, error.param) == ("media_budget_exceeded", "p2")


async def test_remote_and_inline_media_together() -> None:
    async with media_site() as site:
        site.pages["/a"] = response(PICTURE)
        site.pages["/b"] = response(MP4)
        desk = MediaDesk(MediaLimits(), site.fetcher())
        parts = await desk.acquire(
            [
                MediaReference("video", "0", site.url("/b")),
                image(data_url(PICTURE), "1"),
                image(site.url("/a"), "2"),
            ]
        )
        assert [part.data for part in parts] == [MP4, PICTURE, PICTURE]
        site.pages["/c"] = response(b"root:x:0:0")
        with pytest.raises(RequestError) as raised:
            await desk.acquire([image(site.url("/c"), "3")])
        assert (raised.value.code, raised.value.param) == ("invalid_media", "3")


async def test_nothing_is_fetched_for_a_request_that_is_refused_anyway() -> None:
    async with media_site() as site:
        desk = MediaDesk(MediaLimits(), site.fetcher())
        for other in ("file:///x", data_url(b"no picture")):
            with pytest.raises(RequestError):
                await desk.acquire([image(site.url("/a"), "0"), image(other, "1")])
        assert site.heads == []


async def test_one_failure_and_a_cancel_end_all_fetches() -> None:
    async with media_site() as site:

        async def silence(_: asyncio.StreamWriter) -> None:
            await asyncio.sleep(3600)

        site.pages["/silence"] = silence
        desk = MediaDesk(MediaLimits(fetch_timeout_s=600), site.fetcher())
        with pytest.raises(RequestError):
            await desk.acquire([image(site.url("/silence"), "0"), image(site.url("/no"), "1")])
        task = asyncio.create_task(
            desk.acquire([image(site.url("/silence"), str(index)) for index in range(3)])
        )
        await until(lambda: sum("/silence" in head for head in site.heads) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_acquired_parts_take_the_places_of_their_references() -> None:
    empty = MediaPart("image", b"")
    chat = ChatPrompt(
        messages=(
            ChatMessage("user", (TextPart("a"), empty, TextPart("b"))),
            ChatMessage("assistant", (TextPart("c"),)),
            ChatMessage("tool", (empty, MediaPart("video", b""))),
        )
    )
    parts = [MediaPart("image", b"1"), MediaPart("image", b"2"), MediaPart("video", b"3")]
    filled = with_media(chat, parts)
    assert [message.content for message in filled.messages] == [
        (TextPart("a"), parts[0], TextPart("b")),
        (TextPart("c"),),
        (parts[1], parts[2]),
    ]


async def test_options_open_the_desk() -> None:
    reference = image("https://elsewhere.test/a.png")
    closed = open_media_desk(ServeOptions(remote_media_hosts=("elsewhere.test",)))
    with pytest.raises(RequestError) as raised:
        await closed.acquire([reference])
    assert raised.value.code == "remote_media_disabled"
    narrow = open_media_desk(
        ServeOptions(allow_remote_media=True, remote_media_hosts=("images.test",))
    )
    with pytest.raises(RequestError) as raised:
        await narrow.acquire([reference])
    assert (raised.value.code, raised.value.message) == (
        "invalid_media",
        "'p' could not be fetched.",
    )
