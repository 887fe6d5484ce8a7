"""Raw prompts: texts and token ids, one or many, and how they are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ninfer.contract.chat import Frontend
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.fields import as_integer, as_string, invalid_type, invalid_value

MAX_PROMPTS: Final = 128


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text, special tokens in which are parsed, or token ids as they are. `path`: the field it
    came in, or an entry of such a list."""

    value: str | tuple[int, ...]
    path: str

    async def prepare(self, frontend: Frontend) -> PreparedPrompt:
        """Raises RequestError."""
        if isinstance(self.value, str):
            return await frontend.prepare_text(self.value, self.path)
        return frontend.prepare_ids(self.value, self.path)


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """`is_batch`: they came as a list of prompts."""

    prompts: tuple[RawPrompt, ...]
    is_batch: bool


def parse_prompts(value: object, path: str, vocab_size: int) -> RawPrompts:
    """A text, a list of texts, a list of ids or a list of such lists. Raises RequestError."""
    is_text = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], str)
    )
    if is_text:
        return parse_texts(value, path)
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of strings or token ids", value)
    return parse_id_lists(value, path, vocab_size)


def parse_texts(value: object, path: str) -> RawPrompts:
    """A text or a list of them. Raises RequestError."""
    if not isinstance(value, list):
        return RawPrompts((_text(value, path),), False)
    _check_batch(value, path)
    return RawPrompts(tuple(_text(v, f"{path}[{i}]") for i, v in enumerate(value)), True)


def parse_id_lists(value: object, path: str, vocab_size: int) -> RawPrompts:
    """A list of ids or a list of such lists. Raises RequestError."""
    if not isinstance(value, list):
        raise invalid_type(path, "a list of token ids", value)
    if not value or not isinstance(value[0], list):
        return RawPrompts((RawPrompt(parse_token_ids(value, path, vocab_size), path),), False)
    _check_batch(value, path)
    paths = [f"{path}[{index}]" for index in range(len(value))]
    prompts = (
        RawPrompt(parse_token_ids(item, own, vocab_size), own)
        for item, own in zip(value, paths, strict=True)
    )
    return RawPrompts(tuple(prompts), True)


def parse_token_ids(value: object, path: str, vocab_size: int) -> tuple[int, ...]:
    """At least one id. Raises RequestError naming the first bad one."""
    if not isinstance(value, list):
        raise invalid_type(path, "a list of token ids", value)
    if not value:
        raise invalid_value(path, "must not be empty")
    if all(type(item) is int and 0 <= item < vocab_size for item in value):
        return tuple(value)
    return tuple(
        as_integer(item, f"{path}[{index}]", 0, vocab_size - 1) for index, item in enumerate(value)
    )


def _text(value: object, path: str) -> RawPrompt:
    text = as_string(value, path)
    if not text:
        raise invalid_value(path, "must not be empty")
    return RawPrompt(text, path)


def _check_batch(values: Sequence[Any], path: str) -> None:
    if not 1 <= len(values) <= MAX_PROMPTS:
        raise invalid_value(path, f"must have 1 to {MAX_PROMPTS} prompts")
