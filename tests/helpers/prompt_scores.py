"""What a request that asked for scores of its prompt must be told, by the whole prompt's logits."""

from __future__ import annotations

import numpy as np

from ninfer.contract.generation import Finished, GenerationRequest, Progress
from ninfer.contract.sampling import PromptScores
from ninfer.ops import prompt_logprobs
from tests.helpers.engine_rig import VOCAB_SIZE, Transcript
from tests.helpers.fake_executor import expected_logits


def scores_of(transcript: Transcript) -> list[PromptScores]:
    """All parts; they come before the first output."""
    parts: list[PromptScores] = []
    has_output = False
    for event in transcript.events:
        if isinstance(event, Progress):
            assert not (has_output and event.prompt_scores)
            parts += event.prompt_scores
        if isinstance(event, Progress | Finished):
            has_output = has_output or bool(event.deltas)
    return parts


def expected_scores(request: GenerationRequest, *, has_states: bool = True) -> PromptScores:
    prompt, scoring = request.prompt, request.scoring
    assert scoring is not None
    scores = prompt_logprobs.reference(
        expected_logits(prompt, VOCAB_SIZE, has_states=has_states)[scoring.first - 1 : -1],
        prompt.token_ids[scoring.first :],
        first=scoring.first,
        num_top=scoring.num_top,
    )
    assert scores is not None
    return scores


def assert_scored(
    transcript: Transcript,
    request: GenerationRequest,
    *,
    is_whole: bool = True,
    has_states: bool = True,
) -> None:
    """Every asked token once and in order; with `is_whole` False perhaps only the first ones."""
    parts = scores_of(transcript)
    if not parts and not is_whole:
        return
    assert [part.first for part in parts[1:]] == [part.stop for part in parts[:-1]]
    actual, expected = (
        prompt_logprobs.joined(parts),
        expected_scores(request, has_states=has_states),
    )
    assert actual.first == expected.first
    assert actual.stop == expected.stop if is_whole else actual.stop <= expected.stop
    for name in ("logprobs", "top_ids", "top_logprobs"):
        told = getattr(expected, name)[: actual.logprobs.size]
        np.testing.assert_array_equal(getattr(actual, name), told, strict=True)
