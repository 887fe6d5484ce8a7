"""Builds PreparedPrompts from conversations, raw text and token ids. Pure and thread-safe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.chat import ChatPrompt
from ninfer.contract.errors import RequestError, context_length_error
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.control_text import GuardedText, guarded
from ninfer.frontend.frontiers import FrontierFinder, raw_frontiers
from ninfer.frontend.prompt_size import encode_within
from ninfer.frontend.tokenizer import THINK_CLOSE, THINK_OPEN, TextTokenizer, replace_surrogates


class PromptBuilder:
    """`tokenizer` and `renderer` are None for a model that came without them.

    max_context   longer prompts are refused, texts early (see `prompt_size`); None: any length
    """

    def __init__(
        self,
        vocab_size: int,
        max_context: int | None,
        tokenizer: TextTokenizer | None,
        renderer: ChatRenderer | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._finder = None if tokenizer is None else FrontierFinder(tokenizer)

    def for_context(self, max_context: int | None) -> PromptBuilder:
        return PromptBuilder(self._vocab_size, max_context, self._tokenizer, self._renderer)

    def render(self, chat: ChatPrompt) -> str:
        """The text of `chat`. Raises RequestError."""
        return self._need_renderer().render(chat).plain

    def from_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        """Raises RequestError as Frontend.prepare_chat says."""
        tokenizer = self._need_tokenizer("messages")
        # The text is measured as rendered: templates drop text (old reasoning, blanks) that need
        # not fit.
        rendered = self._need_renderer().render_with_places(chat)
        ids = encode_within(rendered.text, tokenizer, self._max_context, "messages")
        finder = self._finder
        frontiers = () if finder is None else finder.find(rendered.text, ids, rendered.places)
        return self._prepare(ids, "messages", frontiers)

    def from_text(
        self, text: str, param: str = "prompt", *, parses_special: bool = True
    ) -> PreparedPrompt:
        """Special tokens in `text` are parsed or stay characters. Raises RequestError."""
        tokenizer = self._need_tokenizer(param)
        raw = GuardedText(replace_surrogates(text))
        if not parses_special:
            raw = guarded(raw.text, tokenizer.control_texts, param)
        ids = encode_within(raw, tokenizer, self._max_context, param)
        return self._prepare(ids, param, raw_frontiers(len(ids)))

    def from_ids(self, token_ids: Sequence[int], param: str = "input_ids") -> PreparedPrompt:
        """Raises RequestError: invalid_value, context_length_exceeded."""
        if not token_ids:
            raise RequestError("invalid_value", "at least one token id is needed", param)
        # Before the ids are looked at: millions of them would hold up the event loop.
        if self._max_context is not None and len(token_ids) > self._max_context:
            raise context_length_error(len(token_ids), self._max_context, param)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    "invalid_value",
                    f"token id {token_id} is outside 0 to {self._vocab_size - 1}",
                    param,
                )
        return self._prepare(token_ids, param, raw_frontiers(len(token_ids)))

    def _need_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            raise RequestError("invalid_template", "this model has no chat template", "messages")
        return self._renderer

    def _need_tokenizer(self, param: str) -> TextTokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "tokenizer_unavailable", "this model has no tokenizer; send token ids", param
            )
        return self._tokenizer

    def _prepare(
        self, token_ids: Sequence[int], param: str, frontiers: tuple[PromptFrontier, ...]
    ) -> PreparedPrompt:
        if not token_ids:
            raise RequestError("invalid_prompt", "the prompt is empty", param)
        array = np.array(token_ids, np.int32)
        array.flags.writeable = False
        opens = self._tokenizer is not None and opens_in_reasoning(array, self._tokenizer)
        return PreparedPrompt(array, opens_in_reasoning=opens, frontiers=frontiers, param=param)


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
