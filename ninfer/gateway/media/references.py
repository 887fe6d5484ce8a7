"""The parts of messages that name pictures and videos, in the spellings of all protocols.

OpenAI chat   {"type": "image_url", "image_url": {"url": U}}      also "image_url": U; video_url
Responses     {"type": "input_image", "image_url": U}
HF templates  {"type": "image", "image": U}                       also video
Anthropic     {"type": "image", "source": {"type": "base64", "data": B} | {"type": "url", "url": U}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields, invalid_value, missing, unsupported_value

MediaKind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class MediaReference:
    """Where one picture or video is to be had.

    part        the path of the part it stands in
    path        the field that says so, for errors
    text        a URL, or base64 without one
    is_base64   `text` is base64 itself
    """

    kind: MediaKind
    path: str
    text: str = field(repr=False)
    is_base64: bool = False
    part: str = ""


_KINDS: Final[Mapping[str, MediaKind]] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
MEDIA_TYPES: Final = frozenset(_KINDS)


def no_vision(path: str) -> RequestError:
    """The error for a media part that is sent to a model of text alone."""
    return unsupported_value(path, "this model takes no pictures or videos")


def parse_media_part(part: Fields) -> MediaReference:
    """A part whose type is in MEDIA_TYPES. Raises RequestError naming the field."""
    kind = _KINDS[part.string("type") or ""]
    source = part.child("source")
    if source is not None:
        return _from_source(source, kind, part.path)
    keys = ("image_url", "image") if kind == "image" else ("video_url", "video")
    key = part.first_of(keys)
    if key is None:
        if part.has("file_id"):
            path = part.path_of("file_id")
            raise unsupported_value(path, "there is no store of uploaded files")
        raise missing(part.path_of(keys[0]))
    holder = part
    if isinstance(part.get(key), dict):
        holder, key = Fields(part.get(key), part.path_of(key)), "url"
    url = holder.string(key)
    if url is None:
        raise missing(holder.path_of(key))
    return MediaReference(kind, holder.path_of(key), url, part=part.path)


def _from_source(source: Fields, kind: MediaKind, part: str) -> MediaReference:
    source.string("media_type")
    form = source.string("type")
    key = {"base64": "data", "url": "url"}.get(form or "")
    if key is None:
        if form == "file":
            raise unsupported_value(source.path, "there is no store of uploaded files")
        raise invalid_value(source.path_of("type"), "must be one of base64, url")
    text = source.string(key)
    if text is None:
        raise missing(source.path_of(key))
    return MediaReference(kind, source.path_of(key), text, key == "data", part)
