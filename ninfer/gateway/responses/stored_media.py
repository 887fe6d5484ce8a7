"""Fetched pictures of a response that is kept: the file itself takes the place of its address,
which may say something else, or nothing, when the conversation goes on."""

from __future__ import annotations

import copy
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ninfer.contract.chat import ChatMessage, MediaPart
from ninfer.gateway.media.inline import is_data_url
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.responses.input_items import InputItem

_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]")


def said_with_files(
    said: Sequence[InputItem], messages: Sequence[ChatMessage]
) -> list[Mapping[str, Any]]:
    """The items as they are to be kept. Their media parts are the last ones of the `messages`.
    Takes time when files are large."""
    files = [
        part for message in messages for part in message.content if isinstance(part, MediaPart)
    ]
    own = iter(files[len(files) - sum(len(item.media) for item in said) :])
    return [_with_files(item, own) for item in said]


def _with_files(item: InputItem, files: Iterator[MediaPart]) -> Mapping[str, Any]:
    pairs = [(reference, next(files)) for reference in item.media]
    fetched = [pair for pair in pairs if not _is_inline(pair[0])]
    if not fetched:
        return item.raw
    raw = copy.deepcopy(dict(item.raw))
    for reference, file in fetched:
        _put(raw, reference.path, "data:;base64," + b64encode(file.data).decode())
    return raw


def _is_inline(reference: MediaReference) -> bool:
    return reference.is_base64 or is_data_url(reference.text)


def _put(raw: dict[str, Any], path: str, value: str) -> None:
    """Set a field of an item by its path in the request, `input[i]` and the way inside the item."""
    _, *steps = [key or int(index) for key, index in _STEP.findall(path)]
    holder: Any = raw
    for step in steps[:-1]:
        holder = holder[step]
    holder[steps[-1]] = value
