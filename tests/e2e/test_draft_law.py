"""What a request says has the stated law, alone and with drafts, whoever makes them.

Many draws are made at once, from laws that are written down here a second time and from the noise
that positions have; that the sampler chooses just these tokens, and the engine in its rounds too,
is checked on some of them. So the law of the many is that of the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import SequenceSpec
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.speculation.drafter import Drafter, Guess, Hope
from ninfer.ops import philox, sampling
from tests.helpers.bigram_model import bigram_engine, bigram_program
from tests.helpers.distributions import chi_square_p
from tests.helpers.engine_rig import read
from tests.helpers.executor_driver import sample_row
from tests.helpers.fixed_mask import packed
from tests.helpers.masked_session import MaskedSession, MaskRule
from tests.helpers.oracle_drafter import sure
from tests.helpers.scripted_session import ScriptedSession

pytestmark = pytest.mark.no_cover

FloatArray: TypeAlias = NDArray[np.float64]
TokenIds: TypeAlias = NDArray[np.int64]

NUM_PAIRS = 100_000
"""Two draws each."""
LEAST_P = 0.01
SEED = 20
ANCHOR = 3


@dataclass(frozen=True)
class Setting:
    """`allowed`: of each token's successors, a mask; None for all."""

    vocab_size: int
    fields: dict[str, Any] = field(default_factory=dict)
    width: int | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 1.0, "seed": SEED, **self.fields})

    @property
    def rule(self) -> MaskRule | None:
        if self.width is None:
            return None
        return MaskRule(0, 10**6, self.width, self.vocab_size)


SETTINGS = {
    "plain": Setting(8),
    "cold": Setting(16, {"temperature": 0.6}),
    "top_k": Setting(16, {"top_k": 5, "temperature": 1.4}),
    "top_p": Setting(32, {"top_p": 0.8}),
    "min_p": Setting(16, {"min_p": 0.12, "temperature": 1.2}),
    "penalties": Setting(
        8, {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    ),
    "mask": Setting(32, {"temperature": 0.9}, width=6),
    "all of it": Setting(
        16,
        {
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.03,
            "presence_penalty": 0.8,
            "logit_bias": ((2, 1.5), (5, -2.0)),
        },
        width=11,
    ),
    "large": Setting(64, {"temperature": 1.1}),
}


@cache
def table_of(vocab_size: int, seed: int = 1) -> NDArray[np.float32]:
    """Logits behind each token, as the model makes them."""
    rng = np.random.default_rng(seed)
    raw = rng.standard_normal((vocab_size, vocab_size)).astype(np.float32)
    if seed != 1:
        return raw

    async def ask() -> NDArray[np.float32]:
        program = bigram_program(raw, 1, 0)
        found = []
        for first in range(0, vocab_size, 32):
            token_ids = np.arange(first, min(first + 32, vocab_size), dtype=np.int32)
            prompt = PreparedPrompt(token_ids)
            handle = program.open_sequence(SequenceSpec("s", prompt, SamplingParams()))
            assert program.reserve_units(handle, token_ids.size)
            found.append(await program.score(handle, token_ids.size))
            program.close_sequence(handle)
        program.close()
        return np.concatenate(found)

    made = asyncio.run(ask())
    assert np.allclose(made, raw, atol=1e-3)
    return made


def law(setting: Setting, prompt: int, generated: Sequence[int]) -> FloatArray:
    """Of the token behind them, [V]: the definition, token by token."""
    params = setting.params
    newest = generated[-1] if generated else prompt
    scores = [float(x) for x in table_of(setting.vocab_size)[newest]]
    for token, bias in params.logit_bias:
        scores[token] = float(np.float32(scores[token]) + np.float32(bias))
    rule = setting.rule
    allowed = None if rule is None else rule.allows(list(generated))
    for token in range(setting.vocab_size):
        if allowed is not None and token not in allowed:
            scores[token] = -math.inf
        elif token in generated or token == prompt:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
        if token in generated:
            count = list(generated).count(token)
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
    order = sorted(range(setting.vocab_size), key=lambda token: (-scores[token], token))
    order = order[: params.top_k or None]
    best = scores[order[0]]
    weights = {token: math.exp((scores[token] - best) / params.temperature) for token in order}
    target, mass, kept = params.top_p * sum(weights.values()), 0.0, dict[int, float]()
    for token, weight in weights.items():
        if weight > 0.0 and weight >= params.min_p and (not kept or mass < target):
            kept[token] = weight
        mass += weight
    found = np.zeros(setting.vocab_size)
    for token, weight in kept.items():
        found[token] = weight / sum(kept.values())
    return found


@cache
def noise_of(vocab_size: int) -> FloatArray:
    """[2 NUM_PAIRS, V] of the positions, as the sampler has it."""
    if vocab_size < 32:
        return noise_of(32)[:, :vocab_size]
    positions = np.arange(2 * NUM_PAIRS if vocab_size == 32 else NUM_PAIRS)
    blocks = np.arange(vocab_size // 4)
    words = philox.words(SEED, (positions[:, None], blocks[None, :], 0, 0))
    uniforms = (words.reshape(positions.size, vocab_size) + 0.5) * 2.0**-32
    noise: FloatArray = -np.log(-np.log(uniforms))
    return noise


def drawn(laws: FloatArray, noise: FloatArray) -> TokenIds:
    """One token for each row of noise, from one law or from one each."""
    with np.errstate(divide="ignore"):
        found: TokenIds = (np.log(laws) + noise).argmax(axis=-1)
    return found


Draft: TypeAlias = Callable[[Setting, TokenIds, FloatArray], TokenIds]
"""From the token that will be chosen and the noise: what is drafted in its place."""


def greedy(setting: Setting, coming: TokenIds, noise: FloatArray) -> TokenIds:
    return np.full_like(coming, law(setting, ANCHOR, ()).argmax())


def coupled(setting: Setting, coming: TokenIds, noise: FloatArray) -> TokenIds:
    """Of another law, with the same noise."""
    other = law(setting, ANCHOR, ()) * np.exp(table_of(setting.vocab_size, 2)[ANCHOR])
    return drawn(other, noise)


def adversarial(setting: Setting, coming: TokenIds, noise: FloatArray) -> TokenIds:
    """Right just when that might help some tokens more than others."""
    return np.where(coming % 2 == 0, coming, (coming + 1) % setting.vocab_size)


@pytest.mark.parametrize("draft", [greedy, coupled, adversarial])
@pytest.mark.parametrize("name", SETTINGS)
def test_two_tokens_in_a_row_have_their_law(name: str, draft: Draft) -> None:
    setting = SETTINGS[name]
    size, noise = setting.vocab_size, noise_of(setting.vocab_size)
    first_law = law(setting, ANCHOR, ())
    second_laws = np.stack([law(setting, ANCHOR, (token,)) for token in range(size)])
    first = drawn(first_law, noise[0::2])
    drafted = draft(setting, first, noise[0::2])
    # A right draft: the column behind it, in the same round. A wrong one: another round.
    in_round = drawn(second_laws[drafted], noise[1::2])
    behind = drawn(second_laws[first], noise[1::2])
    second = np.where(drafted == first, in_round, behind)
    assert 0.0 < (drafted == first).mean() < 1.0
    counts = np.bincount(first * size + second, minlength=size * size)
    assert chi_square_p(np.bincount(first, minlength=size), first_law) > LEAST_P
    assert chi_square_p(counts, first_law[:, None] * second_laws) > LEAST_P


@pytest.mark.parametrize("name", SETTINGS)
def test_the_sampler_makes_these_draws(name: str) -> None:
    setting = SETTINGS[name]
    noise, rng = noise_of(setting.vocab_size), np.random.default_rng(4)
    for position in rng.integers(0, NUM_PAIRS - 1, 150).tolist():
        said: list[int] = []
        for ahead in range(2):
            want = int(drawn(law(setting, ANCHOR, said), noise[position + ahead]))
            row = sample_row(
                position + ahead, setting.params, prompt=[ANCHOR], generated=tuple(said)
            )
            allowed = None if setting.rule is None else setting.rule.allows(said)
            mask = None if allowed is None else packed(allowed, setting.vocab_size)
            newest = said[-1] if said else ANCHOR
            token = sampling.reference(table_of(setting.vocab_size)[newest], row, mask)
            assert token is not None
            assert token.token_id == want
            said.append(want)


class LawDrafter:
    """Implements the engine's Drafter: one of the drafts above for the next token, and two more."""

    def __init__(self, setting: Setting, coming: list[int], draft: Draft, seed: int) -> None:
        self._setting, self._coming, self._draft, self._seed = setting, coming, draft, seed

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        token_ids = []
        for place in range(len(accepted), min(len(accepted) + max(room, 0), len(self._coming))):
            coming = np.array([self._coming[place]])
            noise = _noise(self._setting, self._seed, 1 + place)[None]
            token_ids.append(int(self._draft(self._setting, coming, noise)[0]))
        return sure(token_ids[:3], DraftSource.NGRAM)

    def hope(self, room: int) -> Hope:
        return Hope()


@pytest.mark.parametrize("draft", [greedy, coupled, adversarial])
@pytest.mark.parametrize("name", ["penalties", "mask", "all of it"])
async def test_the_engine_says_these_tokens(name: str, draft: Draft) -> None:
    setting, num_tokens = SETTINGS[name], 5
    texts = {seed: _said(setting, seed, num_tokens) for seed in range(60)}

    def make(request: GenerationRequest, max_tokens: int) -> Drafter:
        seed = request.sampling.seed
        return LawDrafter(setting, texts[seed], draft, seed)

    async with bigram_engine(table_of(setting.vocab_size), make) as engine:
        requests = [_request(setting, seed, num_tokens) for seed in texts]
        found = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
        assert [seen.token_ids for seen in found] == list(texts.values())
        drafts = engine.metrics.drafts
        assert drafts.rounds_total > 0
        assert drafts.accepted_total > 0


def test_another_law_is_told_apart() -> None:
    """A table that is a little off, or a second token that does not care for the first."""
    setting = SETTINGS["plain"]
    noise, first_law = noise_of(8), law(setting, ANCHOR, ())
    first = np.bincount(drawn(first_law, noise[0::2]), minlength=8)
    off = first_law * np.linspace(0.9, 1.1, 8)
    assert chi_square_p(first, off / off.sum()) < LEAST_P / 100
    second_laws = np.stack([law(setting, ANCHOR, (token,)) for token in range(8)])
    pairs = drawn(first_law, noise[0::2]) * 8 + drawn(second_laws[0], noise[1::2])
    counts = np.bincount(pairs, minlength=64)
    assert chi_square_p(counts, first_law[:, None] * second_laws) < LEAST_P / 100


def test_the_test_statistic_has_its_law() -> None:
    rng, law_of_eight = np.random.default_rng(2), law(SETTINGS["plain"], ANCHOR, ())
    found = [chi_square_p(rng.multinomial(2000, law_of_eight), law_of_eight) for _ in range(1000)]
    shares = [float(np.mean([p < level for p in found])) for level in (0.01, 0.1, 0.5, 0.9)]
    assert shares == pytest.approx([0.01, 0.1, 0.5, 0.9], abs=0.04)
    assert chi_square_p(np.array([5.0, 5.0, 1.0]), np.array([0.5, 0.5, 0.0])) == 0.0


def _noise(setting: Setting, seed: int, position: int) -> FloatArray:
    uniforms = philox.token_uniforms(seed, position, np.arange(setting.vocab_size), 0)
    noise: FloatArray = -np.log(-np.log(uniforms))
    return noise


def _said(setting: Setting, seed: int, num_tokens: int) -> list[int]:
    """By the law and the noise of one request alone."""
    said: list[int] = []
    for position in range(1, 1 + num_tokens):
        said.append(int(drawn(law(setting, ANCHOR, said), _noise(setting, seed, position))))
    return said


def _request(setting: Setting, seed: int, num_tokens: int) -> GenerationRequest:
    session = ScriptedSession() if setting.rule is None else MaskedSession(setting.rule)
    return GenerationRequest(
        request_id=f"r{seed}",
        prompt=PreparedPrompt(np.array([ANCHOR], np.int32)),
        sampling=SamplingParams(**{"temperature": 1.0, **setting.fields, "seed": seed}),
        session=session,
        max_tokens=num_tokens,
        mask=session if isinstance(session, MaskedSession) else None,
    )
