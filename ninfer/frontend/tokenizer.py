"""The model's tokenizer: text to ids and ids to exact bytes, for byte-level BPE.

Added tokens (`<|im_end|>`, `<think>`, ...) are the model's control marks. `encode` parses them,
`encode_guarded` parses only those that the guard character does not break up. Never adds BOS or
EOS. Immutable and safe to use from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from tokenizers import Encoding, Tokenizer

from ninfer.contract.errors import InvariantError, ModelFileError

TOKENIZER_FILE: Final = "tokenizer.json"
THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Lone surrogates (half of a cut `\\ud83d\\ude00`) cannot be encoded: each becomes U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _byte_level_alphabet() -> dict[int, str]:
    """Character of the byte-level alphabet -> latin-1 character of its byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({0x100 + index: chr(byte) for index, byte in enumerate(others)})
    return table


class TextTokenizer:
    """Wraps `tokenizers.Tokenizer`; the vocabulary may be smaller than the model's (padded)."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int) -> None:
        """`vocab_size` is the model's. Raises ModelFileError naming tokenizer.json."""
        self._tokenizer = _load(tokenizer_json)
        _check_byte_level(self._tokenizer)
        _check_ids(self._tokenizer, vocab_size)
        self._plain = _without_added_tokens(self._tokenizer)
        self._alphabet = _byte_level_alphabet()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_texts: dict[int, str] = {
            token_id: token.content for token_id, token in added.items()
        }
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.control_texts: tuple[str, ...] = tuple(
            sorted(text for text in self._added_texts.values() if _is_control_text(text))
        )
        """Texts of added tokens that mean something to a model."""

    def added_id(self, text: str) -> int | None:
        """The id of an added token, None when `text` is none."""
        for token_id, content in self._added_texts.items():
            if content == text:
                return token_id
        return None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; added tokens in it are parsed. No surrogates in `text`."""
        return _encode(self._tokenizer, [text])[0]

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """As `encode(text without guard)`, but marks broken up by `guard` stay plain characters.

        guard   one character that stands for nothing else in `text`

        Stretches between real control marks that contain the guard are encoded without knowledge
        of added tokens; all others exactly as `encode` does.
        """
        # The batch call, unlike `encode`, lets other Python threads run meanwhile.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        stretches = list(self._stretches(encoding, len(text)))
        guarded = [text[start:stop] for _, start, stop in stretches if guard in text[start:stop]]
        plain = iter(_encode(self._plain, [part.replace(guard, "") for part in guarded]))
        ids: list[int] = []
        for stretch, start, stop in stretches:
            ids.extend(next(plain) if guard in text[start:stop] else stretch)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; b"" for an id the tokenizer does not know."""
        added = self._added_texts.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        try:
            return token.translate(self._alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    def least_tokens(self, num_characters: int) -> int:
        """No text of so many characters makes fewer tokens. Allows for a normaliser that composes
        characters: at most four of them become one."""
        return -(-num_characters // (4 * self._longest_token))

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def _stretches(
        self, encoding: Encoding, num_characters: int
    ) -> Iterator[tuple[list[int], int, int]]:
        """(ids, start, stop) of added tokens and of what lies between them, in text order."""
        ids: list[int] = encoding.ids
        first, first_character = 0, 0
        for index, token_id in enumerate(ids):
            if token_id in self._added_texts:
                # Not encoding.offsets: a list of all of them would hold up other threads.
                span = encoding.token_to_chars(index)
                if span is None:
                    raise InvariantError(f"token {token_id} has no place in the text")
                start, stop = span
                yield ids[first:index], first_character, start
                yield [token_id], start, stop
                first, first_character = index + 1, stop
        yield ids[first:], first_character, num_characters


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # The batch call, unlike `encode`, lets other Python threads run meanwhile.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _is_control_text(text: str) -> bool:
    """Some vocabularies add single characters and runs of white space for brevity alone."""
    return len(text) > 1 and not text.isspace()


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelFileError(TOKENIZER_FILE, None, f"not UTF-8: {error}") from None
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for bad files
        raise ModelFileError(TOKENIZER_FILE, None, str(error)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_byte_level(tokenizer: Tokenizer) -> None:
    description = f"{tokenizer.decoder!r} {tokenizer.pre_tokenizer!r}"
    if "ByteLevel" not in description:
        raise ModelFileError(
            TOKENIZER_FILE, "decoder", "only byte-level BPE tokenizers are supported"
        )


def _check_ids(tokenizer: Tokenizer, vocab_size: int) -> None:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ModelFileError(TOKENIZER_FILE, "model.vocab", "the vocabulary is empty")
    text, token_id = max(vocabulary.items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise ModelFileError(
            TOKENIZER_FILE,
            "model.vocab",
            f"token {text!r} has id {token_id}, but the model's vocab_size is {vocab_size}",
        )


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer over the same model (shared, not copied) in which no mark is special."""
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain
