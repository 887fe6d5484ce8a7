"""Identity: equal keys are equal tokens, positions and media; nothing else is equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.prompt import MediaSpan, PreparedPrompt
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.identity import Identity, cut, identity_of, num_common
from tests.helpers.context_rig import tokens

LENGTH = 150


def plain(num_tokens: int = LENGTH, seed: int = 0) -> PreparedPrompt:
    return PreparedPrompt(np.array(tokens(num_tokens, seed), np.int32))


def with_image(
    digest: bytes = b"a" * 32, *, start: int = 70, delta: int = -3, bend: int = 0
) -> PreparedPrompt:
    """An image of 8 tokens whose positions fall behind the ordinals from there on."""
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (3, 1))
    positions[:, start + 8 :] += delta
    positions[1, start : start + 8] += bend
    media = (MediaSpan(start, start + 8, digest, (1, 4, 8)),)
    return PreparedPrompt(plain().token_ids, positions, delta, media)


def first_pages_equal(first: Identity, second: Identity) -> list[bool]:
    return [a == b for a, b in zip(first.pages, second.pages, strict=True)]


def test_positions_that_are_the_ordinals_are_the_same_as_none() -> None:
    ordinals = np.tile(np.arange(LENGTH, dtype=np.int32), (3, 1))
    explicit = identity_of(PreparedPrompt(plain().token_ids, ordinals), "")
    assert explicit.pages == identity_of(plain(), "").pages
    assert explicit.digest(LENGTH) == identity_of(plain(), "").digest(LENGTH)


def test_media_and_positions_are_part_of_the_identity() -> None:
    image = identity_of(with_image(), "")
    text = identity_of(plain(), "")
    assert first_pages_equal(image, text) == [True, False]
    assert image.tail(LENGTH) != text.tail(LENGTH)
    other = identity_of(with_image(b"b" * 32), "")
    assert first_pages_equal(image, other) == [True, False]
    assert image.tail(LENGTH) == other.tail(LENGTH)
    bent = identity_of(with_image(bend=1), "")
    assert first_pages_equal(image, bent) == [True, False]


def test_a_salt_changes_every_digest_and_the_root() -> None:
    first, second = identity_of(plain(), "a"), identity_of(plain(), "b")
    assert first.root != second.root
    assert not set(first.digests) & set(second.digests)
    assert first.digest(100) != second.digest(100)


def test_digests_name_exactly_one_prefix() -> None:
    identity = identity_of(plain(), "")
    digests = {identity.digest(frontier) for frontier in range(LENGTH + 1)}
    assert len(digests) == LENGTH + 1
    changed = plain().token_ids.copy()
    changed[10] += 1
    other = identity_of(PreparedPrompt(changed), "")
    assert other.digest(10) == identity.digest(10)
    assert not digests & {other.digest(frontier) for frontier in range(11, LENGTH + 1)}


@pytest.mark.parametrize("make", [plain, with_image])
def test_generated_tokens_continue_the_positions(make: object) -> None:
    assert callable(make)
    prompt: PreparedPrompt = make()
    answer = tokens(100, seed=9)
    extended = identity_of(prompt, "s").extended(answer)
    ids = np.concatenate((prompt.token_ids, np.array(answer, np.int32)))
    positions = None
    if prompt.positions is not None:
        added = np.arange(LENGTH, LENGTH + 100, dtype=np.int32) + prompt.rope_delta
        positions = np.concatenate((prompt.positions, np.tile(added, (3, 1))), axis=1)
    again = identity_of(PreparedPrompt(ids, positions, prompt.rope_delta, prompt.media), "s")
    assert extended.pages == again.pages
    assert extended.digests == again.digests
    assert extended.tail(250) == again.tail(250)


def test_no_generated_tokens_leave_the_identity() -> None:
    identity = identity_of(plain(), "")
    assert identity.extended(()) is identity


@given(st.integers(1, PAGE_TOKENS), st.integers(0, PAGE_TOKENS), st.booleans())
def test_a_key_cut_short_is_the_key_of_the_shorter(length: int, count: int, is_image: bool) -> None:
    identity = identity_of(with_image() if is_image else plain(), "")
    count = min(count, length)
    start = PAGE_TOKENS
    key = identity.part(start, start + length)
    assert cut(key, start, length, count) == identity.part(start, start + count)


@given(st.integers(0, 30), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_common_tokens_of_two_keys(
    num_equal: int, num_first: int, num_second: int, is_image: bool
) -> None:
    changed = plain().token_ids.copy()
    changed[PAGE_TOKENS + num_equal :] += 1
    first = identity_of(with_image(start=100) if is_image else plain(), "")
    second = identity_of(PreparedPrompt(changed), "")
    stops = PAGE_TOKENS + num_first, PAGE_TOKENS + num_second
    keys = first.part(PAGE_TOKENS, stops[0]), second.part(PAGE_TOKENS, stops[1])
    expected = min(num_equal, num_first, num_second)
    assert num_common(keys[0], keys[1], PAGE_TOKENS, num_first, num_second) == expected


def test_common_tokens_end_where_another_image_begins() -> None:
    first = identity_of(with_image(b"a" * 32, start=70), "").pages[1]
    second = identity_of(with_image(b"b" * 32, start=70), "").pages[1]
    assert num_common(first, second, PAGE_TOKENS, PAGE_TOKENS, PAGE_TOKENS) == 70 - PAGE_TOKENS
