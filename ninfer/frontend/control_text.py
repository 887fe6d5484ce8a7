"""Keeps control marks that clients write in their text from becoming control tokens.

Before a conversation is rendered, every literal mark in it (`<|im_end|>`, `</think>`, ...) is
broken up with a guard: a private-use character that occurs nowhere else. The template's own marks
stay whole. TextTokenizer.encode_guarded then knows which are which. A conversation without such
marks gets no guard and is rendered and tokenised as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer.contract.errors import RequestError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with every string, keys included, replaced by `change(it)`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [map_strings(item, change) for item in value]
    return value


def strings_of(value: Any) -> Iterator[str]:
    """Every string of a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_of(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from strings_of(item)


def unused_characters(texts: Iterable[str], param: str = "messages") -> Iterator[str]:
    """Private-use characters that occur in none of `texts`, written out or as a JSON escape.

    Raises RequestError (`invalid_prompt`, naming `param`) when a client has used up all 65,534.
    """
    haystack = "\n".join(texts)
    for code in _PRIVATE_USE:
        if chr(code) not in haystack and _escaped(chr(code)) not in haystack:
            yield chr(code)
    raise RequestError("invalid_prompt", "the text uses every private-use character", param)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


@dataclass(frozen=True, slots=True)
class GuardedText:
    """Rendered text; control marks broken up by `guard` are the client's, whole ones are real."""

    text: str
    guard: str | None = None

    @property
    def plain(self) -> str:
        return self.text.replace(self.guard, "") if self.guard else self.text


class ControlMarks:
    """The control marks of one tokenizer."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        choices = sorted(control_texts, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in choices)
        self._mark = re.compile(alternatives) if choices else None
        # Looks ahead so that a mark that starts inside another one is broken up as well.
        self._mark_start = re.compile(f"(?=(?:{alternatives}))(?s:.)")

    def occur_in(self, texts: Iterable[str]) -> bool:
        mark = self._mark
        return mark is not None and any(mark.search(text) for text in texts)

    def break_up(self, text: str, guard: str) -> str:
        """`text` with `guard` after the first character of every mark."""
        return self._mark_start.sub(lambda match: match.group() + guard, text)


def with_guard_unescaped(text: str, guard: str) -> GuardedText:
    """Rendered text whose template may have written the guard as a JSON escape."""
    return GuardedText(text.replace(_escaped(guard), guard), guard)


def guarded(text: str, control_texts: Iterable[str], param: str) -> GuardedText:
    """`text` in which no mark is real. Raises RequestError naming `param`."""
    marks = ControlMarks(control_texts)
    if not marks.occur_in([text]):
        return GuardedText(text)
    guard = next(unused_characters([text], param))
    return GuardedText(marks.break_up(text, guard), guard)
