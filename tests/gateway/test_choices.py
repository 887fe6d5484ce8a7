"""Seeds of several choices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer.gateway.choices import derive_seed

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(0, 15))
def test_derived_seeds_are_signed_64_bit_and_repeatable(seed: int, index: int) -> None:
    derived = derive_seed(seed, index)
    assert -(2**63) <= derived < 2**63
    assert derived == derive_seed(seed, index)


@given(SEEDS)
def test_choice_zero_keeps_the_seed_and_all_differ(seed: int) -> None:
    seeds = [derive_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
