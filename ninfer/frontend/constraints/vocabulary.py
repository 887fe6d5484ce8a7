"""The tokenizer as the grammar library sees it.

Control marks (`<think>`, `<|im_end|>`, ..) are special there: text never contains them, a grammar
can only name them. The end of an answer is none of the model's tokens but an id behind the
vocabulary: which ids end an answer is each request's own affair.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from ninfer.frontend.tokenizer import TextTokenizer, UnsplittableText


class GrammarVocabulary:
    """Built when first asked for, half a second for 150,000 tokens; from any thread."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None

    def tokens(self) -> LLTokenizer:
        with self._lock:
            if self._built is None:
                self._built = LLTokenizer(_Wrapper(self._tokenizer, self.vocab_size))
            return self._built

    def mark(self, text: str) -> str:
        """How a Lark grammar names a control mark; its text where it is no token."""
        token_id = self._tokenizer.added_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def added_id(self, text: str) -> int | None:
        return self._tokenizer.added_id(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """With marks as they are."""
        return tuple(self._tokenizer.encode(text))


def quoted(text: str) -> str:
    """A Lark string of exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Wrapper(TokenizerWrapper):
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        marks = {tokenizer.added_id(text) for text in tokenizer.control_texts}
        special = {token_id for token_id in marks if token_id is not None} | tokenizer.special_ids
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.tokens.append(b"<end of answer>")
        self.special_token_ids = [*sorted(special), vocab_size]
        self.is_tokenizer_wrapper = True
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Any:
        try:
            return self._tokenizer.encode_plain(text)
        except UnsplittableText:
            return []
