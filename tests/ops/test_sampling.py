from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import SampleRow
from ninfer.ops import philox, sampling
from tests.helpers.executor_driver import sample_row
from tests.helpers.fixed_mask import packed

Logits = NDArray[np.float32]
VOCAB = 12
VALUES = [-40.0, -2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0, 8.0]
"""Few enough values for ties everywhere; their halves and doubles are exact in float32."""


def chosen(logits: Logits, row: SampleRow) -> int:
    token = sampling.reference(logits, row)
    assert token is not None
    return token.token_id


def adjusted(
    logits: Logits, row: SampleRow, prompt: list[int], generated: list[int]
) -> list[float]:
    """Bias, suppression and penalties, token by token."""
    params, scores = row.params, [float(x) for x in logits]
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in row.suppressed_ids:
        scores[token] = -math.inf
    for token in range(len(scores)):
        if token in prompt or token in generated:
            r = params.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        if token in generated:
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * generated.count(token)
    return scores


def brute_force(scores: list[float], row: SampleRow) -> int | None:
    """The definition: sort everything, cut, then the largest of log weight and noise."""
    params = row.params
    ids = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    best = scores[ids[0]]
    if best == -math.inf:
        return None
    if params.is_greedy:
        return ids[0]
    if params.top_k:
        ids = ids[: params.top_k]
    weights = [math.exp((scores[t] - best) / params.temperature) for t in ids]
    target = params.top_p * math.fsum(weights)
    kept: list[int] = []
    mass = 0.0
    for token, weight in zip(ids, weights, strict=True):
        is_within = params.top_p >= 1.0 or not kept or mass < target
        if is_within and weight >= params.min_p and weight > 0.0:
            kept.append(token)
        mass += weight
    noise = philox.token_uniforms(params.seed, row.position, np.array(kept), int(row.purpose))
    keys = [
        (scores[t] - best) / params.temperature - math.log(-math.log(u))
        for t, u in zip(kept, noise.tolist(), strict=True)
    ]
    return kept[max(range(len(kept)), key=lambda i: keys[i])]


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@given(
    values=st.lists(st.sampled_from(VALUES), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 50]),
    top_p=st.sampled_from([0.0, 0.013, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.31, 1.0]),
    penalties=st.tuples(
        st.sampled_from([0.0, -0.5, 2.0]),
        st.sampled_from([0.0, 0.5, -1.0]),
        st.sampled_from([1.0, 2.0, 0.5]),
    ),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
    suppressed=st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB),
    prompt=tokens,
    generated=tokens,
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=400)
def test_equals_the_definition(
    values: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
    bias: dict[int, float],
    suppressed: set[int],
    prompt: list[int],
    generated: list[int],
    seed: int,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        repetition_penalty=penalties[2],
        logit_bias=tuple(bias.items()),
        seed=seed,
    )
    row = sample_row(
        7, params, prompt=prompt, generated=generated, suppressed=tuple(sorted(suppressed))
    )
    logits = np.array(values, np.float32)
    before = logits.copy()
    got = sampling.reference(logits, row)
    want = brute_force(adjusted(logits, row, prompt, generated), row)
    assert (None if got is None else got.token_id) == want
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_large_vocabularies_take_the_same_cuts(top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(0)
    for spread in (0.01, 1.0, 6.0):
        logits = np.round(rng.standard_normal(9000) * spread, 2).astype(np.float32)
        for seed in range(4):
            params = SamplingParams(temperature=1.0, top_p=top_p, min_p=min_p, seed=seed)
            row = sample_row(3, params)
            assert chosen(logits, row) == brute_force([float(x) for x in logits], row)


def test_draws_follow_the_distribution() -> None:
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5, 1.0], np.float32)
    params = SamplingParams(temperature=0.8)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    want = weights / weights.sum()
    by_position = [chosen(logits, sample_row(i, replace(params, seed=5))) for i in range(6000)]
    by_seed = [chosen(logits, sample_row(5, replace(params, seed=i))) for i in range(6000)]
    for drawn in (by_position, by_seed):
        counts = np.bincount(drawn, minlength=6)
        # chi-square with 5 degrees of freedom: 20.5 is the 99.9 % point.
        assert ((counts - 6000 * want) ** 2 / (6000 * want)).sum() < 20.5


def test_top_p_is_measured_before_the_min_p_cut() -> None:
    # Masses 0.5, 0.3, 0.2: min_p drops the last; 0.75 of the whole still needs the second.
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.55, min_p=0.5)
    drawn = {chosen(logits, sample_row(i, params)) for i in range(200)}
    assert drawn == {0, 1}
    drawn = {chosen(logits, sample_row(i, replace(params, top_p=0.45))) for i in range(200)}
    assert drawn == {0}


def test_top_p_stops_where_its_mass_is_reached_exactly() -> None:
    logits = np.zeros(4, np.float32)
    for top_p, size in ((0.0, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        drawn = {chosen(logits, sample_row(i, params)) for i in range(200)}
        assert drawn == set(range(size))


def test_greedy_and_order_ties_go_to_the_lower_id() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0, 0.0], np.float32)
    assert chosen(logits, sample_row(0)) == 1
    drawn = {
        chosen(logits, sample_row(i, SamplingParams(temperature=1.0, top_k=2))) for i in range(100)
    }
    assert drawn == {1, 2}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_give_no_token(value: float, temperature: float) -> None:
    logits = np.array([1.0, value, 0.0], np.float32)
    assert sampling.reference(logits, sample_row(0, SamplingParams(temperature))) is None


def test_logprobs_are_those_of_the_raw_model() -> None:
    logits = np.array([1.0, 4.0, 2.0, 4.0, -60.0], np.float32)
    params = SamplingParams(
        temperature=0.5, logit_bias=((4, 200.0),), top_logprobs=3, repetition_penalty=2.0
    )
    token = sampling.reference(logits, sample_row(0, params, prompt=[1]))
    assert token is not None
    assert token.token_id == 4
    assert token.logprobs is not None
    total = math.log(sum(math.exp(float(x)) for x in logits))
    assert token.logprobs.logprob == pytest.approx(-60.0 - total)
    assert [i for i, _ in token.logprobs.top] == [1, 3, 2]
    assert [p for _, p in token.logprobs.top] == pytest.approx([4 - total, 4 - total, 2 - total])
    none = sampling.reference(logits, sample_row(0, replace(params, top_logprobs=0)))
    assert none is not None
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    plain = sampling.reference(logits, sample_row(0, replace(params, top_logprobs=None)))
    assert plain is not None
    assert plain.logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_mask_leaves_only_its_tokens(temperature: float) -> None:
    """As if all others were suppressed."""
    rng = np.random.default_rng(6)
    for position in range(50):
        logits = rng.standard_normal(70).astype(np.float32)
        allowed = np.unique(rng.integers(0, 70, rng.integers(1, 9))).tolist()
        others = tuple(token for token in range(70) if token not in allowed)
        params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, logit_bias=((3, 2.0),))
        row = sample_row(position, params)
        want = chosen(logits, sample_row(position, params, suppressed=others))
        got = sampling.reference(logits, row, packed(allowed, 70))
        assert got is not None
        assert got.token_id == want


def test_an_empty_mask_gives_no_token_and_a_wrong_one_is_refused() -> None:
    logits: Logits = np.zeros(70, np.float32)
    assert sampling.reference(logits, sample_row(0), packed((), 70)) is None
    with pytest.raises(OpContractError):
        sampling.reference(logits, sample_row(0), np.zeros(2, np.uint32))


@given(
    scores=st.lists(st.sampled_from(VALUES), min_size=1, max_size=VOCAB),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.integers(0, 5),
        top_p=st.sampled_from([0.4, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        presence_penalty=st.just(1.0),
        seed=st.integers(0, 50),
    ),
    seed=st.integers(0, 1000),
)
def test_a_choice_among_some_tokens_is_that_of_a_vocabulary_without_the_others(
    scores: list[float], params: SamplingParams, seed: int
) -> None:
    token_ids = np.random.default_rng(seed).permutation(VOCAB)[: len(scores)]
    by_id = np.argsort(token_ids)
    logits = np.zeros(VOCAB, np.float32)
    logits[token_ids] = scores
    others = tuple(set(range(VOCAB)) - set(token_ids.tolist()))
    row = sample_row(9, replace(params, presence_penalty=0.0), suppressed=others)
    listed = np.array(scores, np.float32)[by_id]
    assert sampling.among(listed, token_ids[by_id], params, 9) == chosen(logits, row)


def test_ties_among_some_tokens_go_to_the_earlier() -> None:
    scores, token_ids = np.array([1.0, 2.0, 2.0], np.float32), np.array([3, 9, 4])
    assert sampling.among(scores, token_ids, SamplingParams(), 0) == 9
    assert sampling.among(scores, token_ids, SamplingParams(temperature=1.0, top_k=1), 0) == 9


def test_contract() -> None:
    logits = np.zeros(4, np.float32)
    for params, text in (
        (SamplingParams(logit_bias=((4, 1.0),)), "a token id is outside"),
        (SamplingParams(top_logprobs=5), "top_logprobs 5"),
    ):
        with pytest.raises(OpContractError, match=f"sampling: {text}"):
            sampling.reference(logits, sample_row(0, params))
    with pytest.raises(OpContractError, match="sampling: a token id"):
        sampling.reference(logits, sample_row(0, suppressed=(-1,)))
    with pytest.raises(OpContractError, match="sampling: logits"):
        sampling.reference(logits[None], sample_row(0))
