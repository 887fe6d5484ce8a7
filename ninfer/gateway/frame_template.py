"""Frames of which only one text changes: the rest is written once a stream, not once a token."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson

from ninfer.contract.errors import InvariantError


class FrameTemplate:
    """`frame_of` with most of its work done in advance.

    frame_of   makes a frame whose JSON has the given text in one place, whatever the text is
    """

    __slots__ = ("_after", "_before")

    def __init__(self, frame_of: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        parts = frame_of(mark).split(orjson.dumps(mark))
        if len(parts) != 2:
            raise InvariantError("the text of a frame stands in more than one place, or in none")
        self._before, self._after = parts

    def fill(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after
