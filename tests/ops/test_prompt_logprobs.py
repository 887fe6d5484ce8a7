from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import prompt_logprobs


def logprobs_of(row: np.ndarray) -> list[float]:
    """With Python's own exact sum."""
    values = [float(value) for value in row]
    peak = max(values)
    total = peak + math.log(math.fsum(math.exp(value - peak) for value in values))
    return [value - total for value in values]


@given(
    num_tokens=st.integers(1, 7),
    vocab_size=st.integers(1, 40),
    num_top=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
    step=st.sampled_from([0.0, 0.5]),
)
def test_targets_and_the_best_of_each_row(
    num_tokens: int, vocab_size: int, num_top: int, seed: int, step: float
) -> None:
    rng = np.random.default_rng(seed)
    num_top = min(num_top, vocab_size)
    logits = rng.normal(0, 3, (num_tokens, vocab_size)).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)  # with many ties
    targets = rng.integers(0, vocab_size, num_tokens).astype(np.int32)
    scores = prompt_logprobs.reference(logits, targets, first=5, num_top=num_top)
    assert scores is not None
    assert (scores.first, scores.stop) == (5, 5 + num_tokens)
    for index, row in enumerate(logits):
        expected = logprobs_of(row)
        assert scores.logprobs[index] == pytest.approx(expected[targets[index]], abs=1e-9)
        best = sorted(range(vocab_size), key=lambda token: (-float(row[token]), token))[:num_top]
        assert scores.top_ids[index].tolist() == best
        assert scores.top_logprobs[index].tolist() == pytest.approx(
            [expected[token] for token in best], abs=1e-9
        )


def test_a_logit_that_is_not_finite_spoils_the_unit() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        logits = np.zeros((2, 3), np.float32)
        logits[1, 2] = bad
        targets = np.zeros(2, np.int32)
        assert prompt_logprobs.reference(logits, targets, first=1, num_top=1) is None


@pytest.mark.parametrize(
    ("shape", "targets", "num_top"),
    [((2, 3), [0], 1), ((0, 3), [], 1), ((3,), [0], 1), ((1, 3), [3], 1), ((1, 3), [-1], 1),
     ((1, 3), [0], 4)],
)  # fmt: skip
def test_other_arguments_break_the_contract(
    shape: tuple[int, ...], targets: list[int], num_top: int
) -> None:
    with pytest.raises(OpContractError):
        prompt_logprobs.reference(
            np.zeros(shape, np.float32), np.array(targets, np.int32), first=1, num_top=num_top
        )


def test_stretches_join_and_split_again() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (9, 6)).astype(np.float32)
    targets = rng.integers(0, 6, 9).astype(np.int32)
    whole = prompt_logprobs.reference(logits, targets, first=1, num_top=2)
    parts = [
        prompt_logprobs.reference(logits[a:b], targets[a:b], first=1 + a, num_top=2)
        for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert whole is not None
    joined = prompt_logprobs.joined([part for part in parts if part is not None])
    rest = joined.since(6)
    assert (joined.first, joined.stop, rest.first, rest.stop) == (1, 10, 6, 10)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), strict=True)
        np.testing.assert_array_equal(getattr(rest, name), getattr(whole, name)[5:], strict=True)
    assert joined.since(0).first == 1
    assert joined.since(99).logprobs.size == 0
