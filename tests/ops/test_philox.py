from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import philox

# The known-answer vectors of Random123 for philox4x32-10: key, counter, result.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], result: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = counter
    got = philox.words(key[0] | key[1] << 32, (c0, np.array([c1, 5]), c2, c3))
    assert got.shape == (2, 4)
    assert got[0].tolist() == list(result)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**32 - 1),
    token_ids=st.lists(st.integers(0, 300_000), min_size=1, max_size=40),
    purpose=st.integers(0, 1),
)
def test_a_token_has_its_own_number_whoever_else_is_asked_for(
    seed: int, position: int, token_ids: list[int], purpose: int
) -> None:
    got = philox.token_uniforms(seed, position, np.array(token_ids), purpose)
    for token, uniform in zip(token_ids, got.tolist(), strict=True):
        words = philox.words(seed % 2**64, (position, np.array([token // 4]), purpose, 0))
        assert uniform == (int(words[0, token % 4]) + 0.5) / 2**32
        assert 0.0 < uniform < 1.0


def test_a_whole_vocabulary_equals_its_parts() -> None:
    everything = philox.token_uniforms(3, 9, np.arange(1001), 0)
    for part in (np.arange(5, 990), np.array([3, 999, 0]), np.arange(1000, -1, -1)):
        assert np.array_equal(philox.token_uniforms(3, 9, part, 0), everything[part])


def test_numbers_are_uniform_and_keyed_by_everything() -> None:
    base = philox.token_uniforms(1, 2, np.arange(40_000), 0)
    counts = np.histogram(base, bins=20, range=(0.0, 1.0))[0]
    # chi-square with 19 degrees of freedom: 43.8 is the 99.9 % point.
    assert ((counts - 2000.0) ** 2 / 2000.0).sum() < 43.8
    for other in ((2, 2, 0), (1, 3, 0), (1, 2, 1), (1 + 2**32, 2, 0)):
        seed, position, purpose = other
        numbers = philox.token_uniforms(seed, position, np.arange(40_000), purpose)
        assert abs(np.corrcoef(base, numbers)[0, 1]) < 0.03


def test_contract() -> None:
    with pytest.raises(OpContractError, match="philox: a counter word"):
        philox.token_uniforms(0, 2**32, np.array([1]), 0)
    with pytest.raises(OpContractError, match="philox: a counter word"):
        philox.token_uniforms(0, 0, np.array([-1]), 0)
