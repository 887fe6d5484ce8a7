"""Identity: what a history of tokens is, exactly, in keys of one page each.

A key is the tokens of [start, stop) within one page as bytes: four a token where its rotary
positions are its ordinal and no media stands behind it, else RECORD_BYTES a token (id, positions,
digest of the media). Equal keys are equal tokens, so a comparison of keys is exact. Digests chain
the keys; they only name a prefix that is not held any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.prompt import MediaSpan, PreparedPrompt
from ninfer.contract.units import PAGE_TOKENS

_WORDS: Final = 8
RECORD_BYTES: Final = 4 * _WORDS
_MEDIA_BYTES: Final = 16
_DIGEST_BYTES: Final = 16


class Identity:
    """Immutable. `records` is None for text whose positions are the ordinals."""

    __slots__ = ("_ids", "_plain", "_records", "digests", "num_tokens", "pages", "rope_delta")

    pages: tuple[bytes, ...]
    """Keys of the complete pages."""
    digests: tuple[bytes, ...]
    """digests[k] names the first k pages."""

    def __init__(
        self,
        root: bytes,
        token_ids: IntArray,
        records: IntArray | None,
        rope_delta: int,
        prefix: Identity | None = None,
    ) -> None:
        """`prefix` is the identity of a beginning of these tokens, whose keys are taken over."""
        self.num_tokens = int(token_ids.shape[0])
        self.rope_delta = rope_delta
        self._ids = np.ascontiguousarray(token_ids, np.int32)
        self._plain = self._ids.tobytes()
        self._records = records
        pages = [] if prefix is None else list(prefix.pages)
        digests = [root] if prefix is None else list(prefix.digests)
        for index in range(len(pages), self.num_tokens // PAGE_TOKENS):
            page = self.part(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            pages.append(page)
            digests.append(_chained(digests[-1], page))
        self.pages = tuple(pages)
        self.digests = tuple(digests)

    @property
    def root(self) -> bytes:
        """Stands for the salt."""
        return self.digests[0]

    def part(self, start: int, stop: int) -> bytes:
        """The key of tokens [start, stop), which lie in one page."""
        if self._records is None:
            return self._plain[4 * start : 4 * stop]
        return _key_of(self._records[start:stop], start)

    def tail(self, frontier: int) -> bytes:
        """The key of what `frontier` has of its last page; empty at a border."""
        return self.part(frontier - frontier % PAGE_TOKENS, frontier)

    def digest(self, frontier: int) -> bytes:
        """Names the first `frontier` tokens."""
        page_digest = self.digests[frontier // PAGE_TOKENS]
        tail = self.tail(frontier)
        return _chained(page_digest, tail) if tail else page_digest

    def extended(self, token_ids: Sequence[int]) -> Identity:
        """Followed by generated tokens."""
        if not token_ids:
            return self
        added = np.array(token_ids, np.int32)
        ids = np.concatenate((self._ids, added))
        records = None
        if self._records is not None or self.rope_delta != 0:
            old = self._records
            if old is None:
                old = _records_of(self._ids, None, 0, ())
            new = _records_of(added, None, self.num_tokens + self.rope_delta, ())
            records = np.concatenate((old, new))
        return Identity(self.root, ids, records, self.rope_delta, self)


def identity_of(prompt: PreparedPrompt, salt: str) -> Identity:
    """One pass over the prompt."""
    records = None
    if prompt.positions is not None or prompt.media:
        records = _records_of(prompt.token_ids, prompt.positions, 0, prompt.media)
    return Identity(root_of(salt), prompt.token_ids, records, prompt.rope_delta)


def root_of(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=32).digest()


def cut(key: bytes, start: int, num_tokens: int, count: int) -> bytes:
    """The key of the first `count` of a key's tokens. The key is of `num_tokens` from `start`."""
    if len(key) == 4 * num_tokens:
        return key[: 4 * count]
    return _key_of(expanded(key, start, num_tokens)[:count], start)


def num_common(first: bytes, second: bytes, start: int, num_first: int, num_second: int) -> int:
    """How many tokens from `start` two keys have in common."""
    count = min(num_first, num_second)
    a = expanded(first, start, num_first)[:count]
    b = expanded(second, start, num_second)[:count]
    differs = (a != b).any(axis=1)
    return int(differs.argmax()) if differs.any() else count


def expanded(key: bytes, start: int, num_tokens: int) -> IntArray:
    """The records [num_tokens, 8] int32 of a key."""
    words = np.frombuffer(key, np.int32)
    if words.shape[0] == num_tokens:
        return _records_of(words, None, start, ())
    return words.reshape(num_tokens, _WORDS)


def _chained(digest: bytes, key: bytes) -> bytes:
    return blake2b(digest + key, digest_size=_DIGEST_BYTES).digest()


def _records_of(
    token_ids: IntArray,
    positions: IntArray | None,
    first_position: int,
    media: tuple[MediaSpan, ...],
) -> IntArray:
    """[n, 8] int32: id, three positions, media digest."""
    num_tokens = token_ids.shape[0]
    records = np.zeros((num_tokens, _WORDS), np.int32)
    records[:, 0] = token_ids
    if positions is None:
        records[:, 1:4] = np.arange(first_position, first_position + num_tokens)[:, np.newaxis]
    else:
        records[:, 1:4] = positions.T
    for span in media:
        digest = blake2b(span.digest, digest_size=_MEDIA_BYTES).digest()
        records[span.start : span.stop, 4:] = np.frombuffer(digest, np.int32)
    return records


def _key_of(records: IntArray, start: int) -> bytes:
    ordinals = np.arange(start, start + records.shape[0])
    is_plain = not records[:, 4:].any() and bool((records[:, 1:4] == ordinals[:, np.newaxis]).all())
    return (np.ascontiguousarray(records[:, 0]) if is_plain else records).tobytes()
