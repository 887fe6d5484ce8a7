"""Builds PreparedPrompts from conversations, raw text and token ids. Pure and thread-safe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.chat import ChatPrompt
from ninfer.contract.errors import RequestError
from ninfer.contract.prompt import PreparedPrompt
from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.control_text import GuardedText
from ninfer.frontend.tokenizer import THINK_CLOSE, THINK_OPEN, TextTokenizer, replace_surrogates


class PromptBuilder:
    """`tokenizer` and `renderer` are None for a model that came without them.

    A text that cannot fit `max_positions` tokens whatever they are is refused before it costs the
    time and memory of tokenising it.
    """

    def __init__(
        self,
        vocab_size: int,
        max_positions: int,
        tokenizer: TextTokenizer | None,
        renderer: ChatRenderer | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._tokenizer = tokenizer
        self._renderer = renderer

    def render(self, chat: ChatPrompt) -> str:
        """The text of `chat`. Raises RequestError."""
        return self._render(chat).plain

    def from_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        """Raises RequestError as Frontend.prepare_chat says."""
        tokenizer = self._need_tokenizer("messages")
        rendered = self._render(chat)
        # Not before: templates drop text (old reasoning, blanks) that need not fit.
        self._check_size(tokenizer, len(rendered.plain), "messages")
        if rendered.guard is None:
            return self._prepare(tokenizer.encode(rendered.text), "messages")
        return self._prepare(tokenizer.encode_guarded(rendered.text, rendered.guard), "messages")

    def from_text(self, text: str) -> PreparedPrompt:
        """Special tokens in `text` are parsed. Raises RequestError."""
        tokenizer = self._need_tokenizer("prompt")
        self._check_size(tokenizer, len(text), "prompt")
        return self._prepare(tokenizer.encode(replace_surrogates(text)), "prompt")

    def from_ids(self, token_ids: Sequence[int]) -> PreparedPrompt:
        """Raises RequestError (`invalid_value`)."""
        if not token_ids:
            raise RequestError("invalid_value", "at least one token id is needed", "input_ids")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    "invalid_value",
                    f"token id {token_id} is outside 0 to {self._vocab_size - 1}",
                    "input_ids",
                )
        return self._prepare(token_ids, "input_ids")

    def _render(self, chat: ChatPrompt) -> GuardedText:
        if self._renderer is None:
            raise RequestError("invalid_template", "this model has no chat template", "messages")
        return self._renderer.render(chat)

    def _need_tokenizer(self, param: str) -> TextTokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "tokenizer_unavailable", "this model has no tokenizer; send token ids", param
            )
        return self._tokenizer

    def _check_size(self, tokenizer: TextTokenizer, num_characters: int, param: str) -> None:
        if num_characters <= self._max_positions:
            return
        num_tokens, limit = tokenizer.least_tokens(num_characters), self._max_positions
        if num_tokens > limit:
            raise RequestError(
                "context_length_exceeded",
                f"This model's maximum context length is {limit} tokens. However, your request has"
                f" at least {num_tokens} prompt tokens (prompt is too long: {num_tokens} tokens >"
                f" {limit} maximum). Please reduce the length of the messages."
                " [context_length_exceeded]",
                param,
            )

    def _prepare(self, token_ids: Sequence[int], param: str) -> PreparedPrompt:
        if not token_ids:
            raise RequestError("invalid_prompt", "the prompt is empty", param)
        array = np.array(token_ids, np.int32)
        array.flags.writeable = False
        opens = self._tokenizer is not None and opens_in_reasoning(array, self._tokenizer)
        return PreparedPrompt(array, opens_in_reasoning=opens)


def opens_in_reasoning(token_ids: IntArray, tokenizer: TextTokenizer) -> bool:
    """Whether the prompt [n] ends inside an open thought: the last <think> is followed neither by
    </think> nor by a special token, which would end the turn."""
    think_open = tokenizer.added_id(THINK_OPEN)
    think_close = tokenizer.added_id(THINK_CLOSE)
    if think_open is None or think_close is None:
        return False
    places = np.flatnonzero(token_ids == think_open)
    if places.size == 0:
        return False
    enders: Iterable[int] = {think_close, *tokenizer.special_ids} - {think_open}
    return not np.isin(token_ids[places[-1] + 1 :], np.array(list(enders), np.int32)).any()
