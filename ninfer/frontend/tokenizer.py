"""The model's tokenizer: text to ids and ids to exact bytes, for byte-level BPE.

Added tokens (`<|im_end|>`, `<think>`, ...) are the model's control marks. `encode` parses them,
`encode_guarded` only those that the guard character does not break up, `encode_plain` none. Never
adds BOS or EOS. Immutable and safe to use from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, NFD, NFKC, NFKD

from ninfer.contract.errors import InvariantError, ModelFileError

TOKENIZER_FILE: Final = "tokenizer.json"
THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_UNICODE_FORMS: Final = NFC | NFD | NFKC | NFKD
_MOST_SHRINKAGE: Final = 4
"""Bytes of a text for one of its normalised form, at most: 4 in NFKC, 3.5 in NFC (from the Unicode
tables: U+1FBE U+0308 U+0301, seven bytes, compose to U+0390, two). ASCII stays as it is."""
_DROPPING: Final = re.compile(
    "Removed|Whitespace|BertPreTokenizer|CharDelimiterSplit|Metaspace|UnicodeScripts"
)
"""Pre-tokenizers (and a behaviour of theirs) that leave out characters or add their own."""


class UnsplittableText(Exception):
    """The library gives up on a text: its expressions backtrack too often, for example."""


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

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, *, path: Path = Path(TOKENIZER_FILE)
    ) -> None:
        """`vocab_size` is the model's. Raises ModelFileError naming `path`."""
        self._tokenizer = _load(tokenizer_json, path)
        _check_byte_level(self._tokenizer, path)
        _check_ids(self._tokenizer, vocab_size, path)
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
        """Token ids of `text`; added tokens in it are parsed. No surrogates in `text`.

        Raises UnsplittableText.
        """
        return _encode(self._tokenizer, [text])[0]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which every mark is but characters. No surrogates in `text`.

        Raises UnsplittableText.
        """
        return _encode(self._plain, [text])[0]

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """As `encode(text without guard)`, but marks broken up by `guard` stay plain characters.

        guard   one character that stands for nothing else in `text`

        Stretches between real control marks that contain the guard are encoded without knowledge
        of added tokens; all others exactly as `encode` does. Raises UnsplittableText.
        """
        encoding = _encodings(self._tokenizer.encode_batch, [text])[0]
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

    @cached_property
    def keeps_text(self) -> bool:
        """Whether every byte of a normalised text ends up in a token, so that a long text has many.

        False when something is dropped, swallowed or rewritten in a way not known here.
        """
        alphabet = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder().values()
        return (
            isinstance(self._tokenizer.normalizer, _UNICODE_FORMS | None)
            and not _DROPPING.search(repr(self._tokenizer.pre_tokenizer))
            and not any(token.lstrip or token.rstrip for token in added)
            and all(chr(code) in alphabet for code in self._alphabet)
        )

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, from its UTF-8 length alone; 0 when the
        tokenizer does not keep text."""
        if not self.keeps_text:
            return 0
        if text.isascii():
            return -(-len(text) // self._longest_token)
        shrinkage = 1 if self._tokenizer.normalizer is None else _MOST_SHRINKAGE
        return -(-len(text.encode("utf-8", "surrogatepass")) // (shrinkage * self._longest_token))

    @cached_property
    def _longest_token(self) -> int:
        """Bytes. A character of the byte-level alphabet stands for one."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = (len(text.encode()) for text in self._added_texts.values())
        return max(1, max(map(len, vocabulary), default=1), max(added, default=1))

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
    return [encoding.ids for encoding in _encodings(tokenizer.encode_batch_fast, texts)]


def _encodings(encode_batch: Callable[..., list[Encoding]], texts: list[str]) -> list[Encoding]:
    """Batch calls, unlike `encode`, let other Python threads run meanwhile."""
    try:
        return encode_batch(texts, add_special_tokens=False)
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise UnsplittableText(str(error)) from None


def _is_panic(error: BaseException) -> bool:
    """Whether it stands for a panic of the library's own language; its class cannot be imported,
    and it is no Exception."""
    return type(error).__name__ == "PanicException"


def _is_control_text(text: str) -> bool:
    """Some vocabularies add single characters and runs of white space for brevity alone."""
    return len(text) > 1 and not text.isspace()


def _load(tokenizer_json: bytes, path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelFileError(path, None, f"not UTF-8: {error}") from None
    except BaseException as error:
        # The library raises bare Exception for bad files, and panics on some.
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise ModelFileError(path, None, str(error)) from None
    if isinstance(tokenizer.model, BPE):
        # A means of training: the same text must always give the same tokens.
        model = tokenizer.model
        model.dropout = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_byte_level(tokenizer: Tokenizer, path: Path) -> None:
    problem = "only byte-level BPE tokenizers are supported"
    if not isinstance(tokenizer.model, BPE):
        raise ModelFileError(path, "model.type", problem)
    description = f"{tokenizer.decoder!r} {tokenizer.pre_tokenizer!r}"
    if "ByteLevel" not in description:
        raise ModelFileError(path, "decoder", problem)


def _check_ids(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ModelFileError(path, "model.vocab", "the vocabulary is empty")
    for character in map(chr, range(0x21, 0x7F)):
        if character not in vocabulary:
            raise ModelFileError(path, "model.vocab", f"{character!r} has no token of its own")
    text, token_id = max(vocabulary.items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise ModelFileError(
            path,
            "model.vocab",
            f"token {text!r} has id {token_id}, but the model's vocab_size is {vocab_size}",
        )


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer over the same model (shared, not copied) in which no mark is special."""
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain
