"""Sees that a prompt has too many tokens before it costs the time and memory of making them.

A conversation is first held against its number of messages: none is rendered as nothing.

Then two looks at its text, both without false alarms: what the longest token could cover at best,
then the tokens of the text's beginning. Tokenising takes about a hundred bytes of memory for a byte
of text, so the beginning grows step by step, and a text far over the limit is never tokenised as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ninfer.contract.abandonment import stop_if_abandoned
from ninfer.contract.errors import RequestError, context_length_error
from ninfer.frontend.control_text import GuardedText
from ninfer.frontend.tokenizer import TextTokenizer, UnsplittableText

_LEAST_HEAD: Final = 65_536
_HEAD_PER_TOKEN: Final = 8
"""Characters of the first beginning: about twice what the limit's tokens usually cover."""
_HEAD_GROWTH: Final = 4
CUT_TOKENS: Final = 256
"""A cut changes how the text just before it is split, and thereby the number of its tokens."""


def check_num_messages(num_messages: int, max_tokens: int | None, param: str) -> None:
    """Raises RequestError naming `param` (context_length_exceeded) for more messages than
    `max_tokens`: each takes a token at least."""
    if max_tokens is not None and num_messages > max_tokens:
        raise context_length_error(num_messages, max_tokens, param, is_lower_bound=True)


def encode_within(
    text: GuardedText, tokenizer: TextTokenizer, max_tokens: int | None, param: str
) -> list[int]:
    """Token ids of `text`; marks broken up by its guard stay plain characters.

    Raises RequestError naming `param`: context_length_exceeded for more than `max_tokens`,
    invalid_prompt for a text that the tokenizer gives up on.
    """
    try:
        return _encode_within(text, tokenizer, max_tokens, param)
    except UnsplittableText as error:
        message = f"the model's tokenizer gives up on this text ({error})"
        raise RequestError("invalid_prompt", message, param) from None


def _encode_within(
    text: GuardedText, tokenizer: TextTokenizer, max_tokens: int | None, param: str
) -> list[int]:
    stop_if_abandoned()
    encode = _encoder(text, tokenizer)
    if max_tokens is not None and _is_long(text, max_tokens) and tokenizer.keeps_text:
        num_tokens = tokenizer.least_tokens(text.plain)
        if num_tokens <= max_tokens:
            num_tokens = _tokens_of_heads(text.text, encode, max_tokens)
        if num_tokens > max_tokens:
            raise context_length_error(num_tokens, max_tokens, param, is_lower_bound=True)
    token_ids = encode(text.text)
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise context_length_error(len(token_ids), max_tokens, param)
    return token_ids


def _is_long(text: GuardedText, max_tokens: int) -> bool:
    """Short texts are quickly tokenised, and their refusal then tells how many tokens they have."""
    return len(text.text) > max(max_tokens, _LEAST_HEAD)


def _encoder(text: GuardedText, tokenizer: TextTokenizer) -> Callable[[str], list[int]]:
    guard = text.guard
    if guard is None:
        return tokenizer.encode
    return lambda part: tokenizer.encode_guarded(part, guard)


def _tokens_of_heads(text: str, encode: Callable[[str], list[int]], max_tokens: int) -> int:
    """A number of tokens that `text` has at least, from ever longer beginnings of a long one."""
    num_tokens = 0
    num_characters = max(_LEAST_HEAD, _HEAD_PER_TOKEN * max_tokens)
    while num_tokens <= max_tokens and num_characters < len(text):
        num_tokens = len(encode(text[:num_characters])) - CUT_TOKENS
        num_characters *= _HEAD_GROWTH
    return num_tokens
