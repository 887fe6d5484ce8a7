"""What there is no grammar for."""

from __future__ import annotations

from typing import Any


class Unenforceable(Exception):
    """The text says what there is no grammar for, without a subject; `keyword` is the one that asks
    for it, with its value, where that is known."""

    def __init__(self, text: str, keyword: tuple[str, Any] | None = None) -> None:
        super().__init__(text)
        self.keyword = keyword
