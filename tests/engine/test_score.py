from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.arrays import Float32Array, IntArray
from ninfer.contract.errors import DeviceError, InvariantError, NonFiniteLogits, RequestError
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.units import PAGE_TOKENS, UnitRow
from ninfer.engine.score import CausalScorer, ScoreResult
from ninfer.program.program import ModelProgram
from tests.helpers.engine_rig import VOCAB_SIZE, capacity, prompt_of
from tests.helpers.fake_executor import FakeExecutor, Fault, expected_logits
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.model_configs import hybrid_config


class SoftExecutor(FakeExecutor):
    """With logits of a usual size, 0 to 4, so that every token has its share."""

    async def score(self, row: UnitRow) -> Float32Array:
        return soften(await super().score(row))


def soften(logits: Float32Array) -> Float32Array:
    return logits / np.float32(2**22)


class ScoreRig:
    def __init__(self, *, chunk: int = 16, max_context: int = 128) -> None:
        limits = capacity(lanes=1, max_context=max_context, chunk=chunk)
        self.executor = SoftExecutor(VOCAB_SIZE, limits)
        self.program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), self.executor, limits)
        self.scorer = CausalScorer(self.program)

    def is_clean(self) -> bool:
        self.program.check()
        occupancy = self.program.occupancy()
        return occupancy.lanes_used == occupancy.pages_used == occupancy.slots_used == 0


def nll_of(logits: Float32Array, token_id: int) -> float:
    """With Python's own exact sum."""
    peak = float(logits.max())
    total = math.fsum(math.exp(float(value) - peak) for value in logits)
    return peak + math.log(total) - float(logits[token_id])


def oracle(
    tokens: IntArray, window: int, stride: int
) -> tuple[list[float | None], list[Float32Array]]:
    """Token by token, from the rules alone: the first window with context scores it, the first
    window that covers it gives its logits."""
    nlls: list[float | None] = []
    rows: list[Float32Array] = []
    starts = range(0, len(tokens), stride)
    logits = {
        s: soften(expected_logits(PreparedPrompt(tokens[s : s + window]), VOCAB_SIZE))
        for s in starts
    }
    for index, token_id in enumerate(tokens.tolist()):
        covering = [start for start in starts if start <= index < start + window]
        scoring = [start for start in covering if start < index]
        rows.append(logits[covering[0]][index - covering[0]])
        before = [logits[start][index - 1 - start] for start in scoring[:1]]
        nlls.append(nll_of(before[0], token_id) if before else None)
    return nlls, rows


def assert_same(actual: list[float | None], expected: list[float | None]) -> None:
    assert [nll is None for nll in actual] == [nll is None for nll in expected]
    assert [nll for nll in actual if nll is not None] == pytest.approx(
        [nll for nll in expected if nll is not None], rel=1e-12
    )


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 90),
    window=st.integers(2, 70),
    stride_share=st.floats(0, 1),
    chunk=st.integers(1, 40),
)
async def test_any_windows_and_chunks_equal_the_oracle(
    num_tokens: int, window: int, stride_share: float, chunk: int
) -> None:
    stride = 1 + round(stride_share * (window - 1))
    tokens = prompt_of(num_tokens).token_ids
    rig = ScoreRig(chunk=chunk)
    result = await rig.scorer.score(tokens, window=window, stride=stride, with_logits=True)
    nlls, rows = oracle(tokens, window, stride)
    assert_same(result.token_nlls, nlls)
    assert result.logits is not None
    assert result.logits.dtype == np.float32
    np.testing.assert_array_equal(result.logits, np.stack(rows))
    scored = [nll for nll in nlls if nll is not None]
    assert result.num_scored == len(scored)
    if scored:
        assert result.mean_nll == pytest.approx(math.fsum(scored) / len(scored), rel=1e-12)
        assert result.perplexity == pytest.approx(math.exp(math.fsum(scored) / len(scored)))
    assert rig.is_clean()


async def score(num_tokens: int, window: int, stride: int) -> ScoreResult:
    return await ScoreRig().scorer.score(
        prompt_of(num_tokens).token_ids, window=window, stride=stride
    )


async def test_first_token_of_each_window_is_unscored_when_windows_only_touch() -> None:
    result = await score(70, window=32, stride=32)
    unscored = [index for index, nll in enumerate(result.token_nlls) if nll is None]
    assert unscored == [0, 32, 64]
    assert result.num_scored == 67
    assert result.logits is None


async def test_overlapping_windows_leave_only_the_first_token_unscored() -> None:
    result = await score(70, window=32, stride=31)
    assert [index for index, nll in enumerate(result.token_nlls) if nll is None] == [0]


async def test_single_token_has_no_score() -> None:
    result = await score(1, window=8, stride=8)
    assert (result.token_nlls, result.mean_nll, result.perplexity) == ([None], None, None)


async def test_hopeless_text_has_infinite_perplexity() -> None:
    limits = capacity(lanes=1)
    executor = FakeExecutor(VOCAB_SIZE, limits)
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, limits)
    result = await CausalScorer(program).score([1, 2, 3, 4], window=8, stride=8)
    assert result.mean_nll is not None
    assert result.mean_nll > 1e4
    assert result.perplexity == math.inf


async def test_no_window_runs_beyond_the_end() -> None:
    rig = ScoreRig()
    await rig.scorer.score(list(range(40)), window=32, stride=8)
    assert sum(call.num_tokens for call in rig.executor.calls) == 32 + 32


async def test_progress_counts_tokens() -> None:
    seen: list[tuple[int, int]] = []
    await ScoreRig().scorer.score(
        list(range(40)), window=20, stride=20, progress=lambda *counts: seen.append(counts)
    )
    assert seen == [(16, 40), (20, 40), (36, 40), (40, 40)]


@pytest.mark.parametrize(
    ("tokens", "window", "stride", "code", "param"),
    [
        ([], 8, 8, "invalid_prompt", "token_ids"),
        ([1, -1], 8, 8, "invalid_prompt", "token_ids"),
        ([1, VOCAB_SIZE], 8, 8, "invalid_prompt", "token_ids"),
        ([1, 2**40], 8, 8, "invalid_prompt", "token_ids"),
        ([1, 2], 1, 1, "invalid_value", "window"),
        ([1, 2], 129, 8, "invalid_value", "window"),
        ([1, 2], 8, 0, "invalid_value", "stride"),
        ([1, 2], 8, 9, "invalid_value", "stride"),
    ],
)
async def test_bad_arguments_are_named(
    tokens: list[int], window: int, stride: int, code: str, param: str
) -> None:
    rig = ScoreRig()
    with pytest.raises(RequestError) as caught:
        await rig.scorer.score(tokens, window=window, stride=stride)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert rig.executor.calls == []


async def test_non_finite_logits_name_the_token() -> None:
    rig = ScoreRig()
    rig.executor.faults[1] = Fault("non_finite")
    with pytest.raises(NonFiniteLogits, match="after token 16"):
        await rig.scorer.score(list(range(40)), window=40, stride=40)
    assert rig.is_clean()


async def test_device_error_leaves_nothing_open() -> None:
    rig = ScoreRig()
    rig.executor.faults[2] = Fault("device_error")
    with pytest.raises(DeviceError):
        await rig.scorer.score(list(range(90)), window=20, stride=20)
    assert rig.is_clean()


async def test_missing_memory_is_an_invariant_error() -> None:
    rig = ScoreRig()
    program = FaultyProgram(rig.program, lambda name: None)
    program.denies = lambda handle: True
    scorer = CausalScorer(program)
    with pytest.raises(InvariantError):
        await scorer.score([1, 2, 3], window=8, stride=8)
    assert rig.is_clean()


async def test_wide_vocabularies_are_scored_in_blocks() -> None:
    """Rows are widened a block at a time; the borders must not show."""
    vocab_size = 400_000
    limits = capacity(lanes=1, max_context=PAGE_TOKENS, chunk=PAGE_TOKENS)
    executor = SoftExecutor(vocab_size, limits)
    program = ModelProgram(hybrid_config(vocab_size=vocab_size), executor, limits)
    tokens = [5, 399_999, 0, 77, 123_456]
    result = await CausalScorer(program).score(tokens, window=8, stride=8)
    logits = soften(expected_logits(PreparedPrompt(np.array(tokens, np.int32)), vocab_size))
    expected: list[float | None] = [None]
    for row, token_id in zip(logits, tokens[1:], strict=False):
        wide = row.astype(np.float64)
        expected.append(float(np.logaddexp.reduce(wide) - wide[token_id]))
    assert_same(result.token_nlls, expected)
