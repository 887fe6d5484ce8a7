"""MediaDesk: parsed references in, acquired files out.

    references -> count, schemes -> inline: decode        -> format, size in pixels -> MediaPart
                                 -> remote: fetch (a few at once)

Decoding is not done here; whether a file is whole shows only then.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ninfer.contract.chat import ChatMessage, ChatPrompt, MediaPart
from ninfer.contract.errors import InvariantError
from ninfer.gateway.media.errors import (
    invalid_media,
    media_budget_exceeded,
    remote_media_disabled,
)
from ninfer.gateway.media.fetch import RemoteFetcher
from ninfer.gateway.media.hosts import HostRules
from ninfer.gateway.media.image_header import ImageHeaderError, read_image_header
from ninfer.gateway.media.inline import decode_base64, decode_data_url, is_data_url
from ninfer.gateway.media.limits import MediaLimits
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.media.video import is_video
from ninfer.options import ServeOptions

_REMOTE: Final = re.compile(r"\s*https?:", re.IGNORECASE)


class MediaDesk:
    """Acquires the media of requests. `fetcher` is None where remote media are off."""

    def __init__(self, limits: MediaLimits, fetcher: RemoteFetcher | None) -> None:
        self._limits = limits
        self._fetcher = fetcher

    async def acquire(self, references: Sequence[MediaReference]) -> tuple[MediaPart, ...]:
        """The files of all references, in their order. Cancelling it ends every fetch.

        Raises RequestError naming the field: invalid_media, media_budget_exceeded,
        remote_media_disabled. What can be refused is refused before anything is fetched.
        """
        self._check_references(references)
        budget = _Budget(self._limits)
        places = dict(enumerate(references))
        inline = {place: item for place, item in places.items() if not _is_remote(item)}
        parts = await asyncio.to_thread(self._decode_all, inline, budget) if inline else {}
        remote = {place: item for place, item in places.items() if _is_remote(item)}
        if remote:
            parts |= await self._fetch_all(remote, budget)
        return tuple(parts[place] for place in places)

    def _check_references(self, references: Sequence[MediaReference]) -> None:
        most = self._limits.max_items
        if len(references) > most:
            rule = f"is one too many: a request may have {most} pictures and videos"
            raise media_budget_exceeded(references[most].path, rule)
        for item in references:
            if _is_remote(item):
                if self._fetcher is None:
                    raise remote_media_disabled(item.path)
            elif not item.is_base64 and not is_data_url(item.text):
                raise invalid_media(item.path, "must be a data:, http: or https: URL")

    def _decode_all(
        self, references: Mapping[int, MediaReference], budget: _Budget
    ) -> dict[int, MediaPart]:
        parts = {}
        for place, item in references.items():
            decode = decode_base64 if item.is_base64 else decode_data_url
            data = decode(item.text, item.path, self._limits.max_item_bytes)
            parts[place] = budget.admit(item, data)
        return parts

    async def _fetch_all(
        self, references: Mapping[int, MediaReference], budget: _Budget
    ) -> dict[int, MediaPart]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    place: group.create_task(self._fetch(item, budget))
                    for place, item in references.items()
                }
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return {place: task.result() for place, task in tasks.items()}

    async def _fetch(self, item: MediaReference, budget: _Budget) -> MediaPart:
        if self._fetcher is None:
            raise InvariantError("a remote reference without a fetcher")
        data = await self._fetcher.fetch(item.text, item.path)
        return budget.admit(item, data)


def open_media_desk(options: ServeOptions) -> MediaDesk:
    """As the server's options have it."""
    limits = MediaLimits()
    if not options.allow_remote_media:
        return MediaDesk(limits, None)
    return MediaDesk(limits, RemoteFetcher(limits, HostRules(options.remote_media_hosts or None)))


def _is_remote(item: MediaReference) -> bool:
    return not item.is_base64 and _REMOTE.match(item.text) is not None


class _Budget:
    """What the items of one request have taken so far, of bytes and of pixels."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._num_bytes = 0
        self._num_pixels = 0

    def admit(self, item: MediaReference, data: bytes) -> MediaPart:
        """Judge a file by its bytes, whatever its sender calls it. Raises RequestError."""
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.max_request_bytes:
            raise media_budget_exceeded(item.path, "brings more bytes than a request may have")
        if item.kind == "image":
            self._check_image(item.path, data)
        elif not is_video(data):
            raise invalid_media(item.path, "is no video of a known format (MP4, WebM, AVI, GIF)")
        return MediaPart(item.kind, data)

    def _check_image(self, path: str, data: bytes) -> None:
        try:
            header = read_image_header(data)
        except ImageHeaderError as error:
            raise invalid_media(path, str(error)) from None
        if header is None:
            raise invalid_media(path, "is no picture of a known format (PNG, JPEG, WebP, GIF, BMP)")
        ratio = self._limits.max_aspect_ratio
        short, long = sorted((header.width, header.height))
        if long > ratio * short:
            raise invalid_media(path, f"is more than {ratio} times as long as it is wide")
        if short * long > self._limits.max_item_pixels:
            raise media_budget_exceeded(path, "has too many pixels")
        self._num_pixels += short * long
        if self._num_pixels > self._limits.max_request_pixels:
            raise media_budget_exceeded(path, "brings more pixels than a request may have")


def with_media(chat: ChatPrompt, parts: Sequence[MediaPart]) -> ChatPrompt:
    """`chat` with its media parts, in their order, replaced by those that were acquired."""
    remaining = iter(parts)

    def filled(message: ChatMessage) -> ChatMessage:
        if not any(isinstance(part, MediaPart) for part in message.content):
            return message
        content = tuple(
            next(remaining) if isinstance(part, MediaPart) else part for part in message.content
        )
        return replace(message, content=content)

    return replace(chat, messages=tuple(filled(message) for message in chat.messages))
