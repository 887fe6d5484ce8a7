"""Multi-line input: a turn is one line, or the lines of a block between triple quotes."""

from __future__ import annotations

from typing import Final

FENCE: Final = '"""'


def is_open_block(text: str) -> bool:
    """Whether `text` starts a block that its end does not close."""
    body = text.strip()
    if not body.startswith(FENCE):
        return False
    return len(body) < 2 * len(FENCE) or not body.endswith(FENCE)


def turn_text(text: str) -> str:
    """The text a user meant: without the fences of a block, otherwise stripped."""
    body = text.strip()
    if not body.startswith(FENCE):
        return body
    inner = body.removeprefix(FENCE)
    return inner.removesuffix(FENCE).strip("\n")
