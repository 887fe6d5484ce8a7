"""CausalScorer: negative log-likelihoods of given tokens, past the Scheduler and the Engine.

    tokens   0 1 2 3 4 5 6 7 8 9        window 6, stride 4
    window 0 [- 1 2 3 4 5]              a window starts from empty state; its first token has no
    window 1         [. . 6 7 8 9]      context. Dots are context whose scores are already known.

Windows start at 0, stride, 2 * stride, ... until one reaches the end. Every token is scored once,
in the first window that covers it with at least one token of context; with stride == window the
first token of each window has none and stays unscored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, IntArray
from ninfer.contract.errors import InvariantError, NonFiniteLogits, RequestError
from ninfer.contract.program import Program, SequenceSpec
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams

_BLOCK_ELEMENTS: Final = 1 << 20
"""Logits that are widened to float64 at a time."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of T tokens; natural logarithms.

    token_nlls   one a token, None where it has no context
    mean_nll, perplexity   over the scored tokens, None when there are none; a perplexity beyond
                   float64 is infinite
    logits       [T, V] float32; row t is what follows token t, from the first window that covers t
    """

    token_nlls: list[float | None]
    mean_nll: float | None
    perplexity: float | None
    num_scored: int
    logits: Float32Array | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens [start, stop); those from `first_new` on are in no earlier window."""

    start: int
    stop: int
    first_new: int


class CausalScorer:
    """Scores one text at a time over a Program that nobody else uses meanwhile."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def score(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        window: int,
        stride: int,
        with_logits: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> ScoreResult:
        """Score all of `token_ids`; `progress(done, total)` counts tokens after every chunk.

        Memory is one chunk's logits, and [T, V] float32 only with `with_logits`. Raises
        RequestError (invalid_prompt, invalid_value), NonFiniteLogits and DeviceError.
        """
        tokens = self._checked_tokens(token_ids)
        self._check_window(window, stride)
        total = tokens.shape[0]
        nlls: NDArray[np.float64] = np.full(total, np.nan)
        shape = (total, self._program.vocab_size)
        logits = np.empty(shape, np.float32) if with_logits else None
        for span in _windows(total, window, stride):
            await self._score_window(tokens, span, nlls, logits, progress)
        return _summarise(nlls, logits)

    async def _score_window(
        self,
        tokens: IntArray,
        span: _Window,
        nlls: NDArray[np.float64],
        logits: Float32Array | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        prompt = PreparedPrompt(tokens[span.start : span.stop])
        spec = SequenceSpec(f"score-{span.start}", prompt, SamplingParams())
        handle = self._program.open_sequence(spec)
        try:
            for start, stop in self._chunks(span):
                if not self._program.reserve_units(handle, stop - start):
                    raise InvariantError("a lone scoring sequence gets no memory")
                rows = await self._program.score(handle, stop - start)
                _check_finite(rows, start)
                _score_rows(rows, start, tokens, span, nlls)
                if logits is not None and stop > span.first_new:
                    first = max(start, span.first_new)
                    logits[first:stop] = rows[first - start :]
                if progress is not None:
                    progress(stop, tokens.shape[0])
        finally:
            self._program.close_sequence(handle)

    def _chunks(self, span: _Window) -> Iterator[tuple[int, int]]:
        chunk = self._program.capacity.prefill_chunk
        for start in range(span.start, span.stop, chunk):
            yield start, min(start + chunk, span.stop)

    def _checked_tokens(self, token_ids: Sequence[int] | IntArray) -> IntArray:
        if len(token_ids) == 0:
            raise RequestError("invalid_prompt", "there are no tokens to score", "token_ids")
        tokens = np.asarray(token_ids, dtype=np.int64)
        outside = np.flatnonzero((tokens < 0) | (tokens >= self._program.vocab_size))
        if outside.size:
            raise RequestError(
                "invalid_prompt",
                f"token {int(outside[0])} has the id {int(tokens[outside[0]])}, which is outside"
                f" the vocabulary (0 to {self._program.vocab_size - 1})",
                "token_ids",
            )
        return tokens.astype(np.int32)

    def _check_window(self, window: int, stride: int) -> None:
        max_context = self._program.capacity.max_context
        if not 2 <= window <= max_context:
            raise RequestError(
                "invalid_value", f"window is {window}, must be 2 to {max_context}", "window"
            )
        if not 1 <= stride <= window:
            raise RequestError(
                "invalid_value", f"stride is {stride}, must be 1 to the window, {window}", "stride"
            )


def _windows(total: int, window: int, stride: int) -> Iterator[_Window]:
    covered = 0
    for start in range(0, total, stride):
        stop = min(start + window, total)
        yield _Window(start, stop, covered)
        covered = stop
        if stop == total:
            return


def _score_rows(
    rows: Float32Array, start: int, tokens: IntArray, span: _Window, nlls: NDArray[np.float64]
) -> None:
    """Score the new tokens that the logits `rows` of inputs [start, start + n) predict."""
    first = max(start + 1, span.first_new)
    last = min(start + rows.shape[0] + 1, span.stop)
    if first < last:
        nlls[first:last] = _row_nlls(rows[first - 1 - start : last - 1 - start], tokens[first:last])


def _row_nlls(rows: Float32Array, targets: IntArray) -> NDArray[np.float64]:
    """-log softmax(rows)[target] in float64: [n]."""
    nlls = np.empty(rows.shape[0], np.float64)
    block = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, rows.shape[0], block):
        wide = rows[start : start + block].astype(np.float64)
        chosen = wide[np.arange(wide.shape[0]), targets[start : start + block]]
        peak = wide.max(axis=1)
        log_total = peak + np.log(np.exp(wide - peak[:, None]).sum(axis=1))
        nlls[start : start + block] = log_total - chosen
    return nlls


def _check_finite(rows: Float32Array, start: int) -> None:
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise NonFiniteLogits(f"after token {start + int(bad[0])}")


def _summarise(nlls: NDArray[np.float64], logits: Float32Array | None) -> ScoreResult:
    scored = nlls[~np.isnan(nlls)]
    mean = float(scored.mean()) if scored.size else None
    return ScoreResult(
        token_nlls=[None if math.isnan(nll) else nll for nll in nlls.tolist()],
        mean_nll=mean,
        perplexity=None if mean is None else _exp(mean),
        num_scored=int(scored.size),
        logits=logits,
    )


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
