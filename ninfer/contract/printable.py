"""Text from files and networks, made fit for one line of a terminal or a log."""

from __future__ import annotations

from typing import Final

MAX_CHARACTERS: Final = 1000
"""Far more than any name has; a message that repeats a file's content must not flood a screen."""


def printable(text: str) -> str:
    """`text` with control characters, line breaks, direction marks and lone surrogates as escapes
    (`\\x1b`, `\\u202e`), as `repr` writes them; what is too long is cut in the middle."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
