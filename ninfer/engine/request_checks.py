"""What a request must be to enter the queue, and the output budget that follows from it.

A prompt may fill the context only when no output is asked for: at least one output token must fit
unless max_tokens is 0. Larger budgets than the rest of the context are cut to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ninfer.contract.errors import RequestError, context_length_error
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.units import Capacity


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """Most output tokens (0 = prefill only), why the last one ends the request, and the pages the
    whole sequence may come to occupy."""

    num_tokens: int
    reason: FinishReason
    worst_case_pages: int


def check_request(
    request: GenerationRequest,
    *,
    capacity: Capacity,
    vocab_size: int,
    pages_needed: Callable[[int], int],
) -> OutputBudget:
    """Raises RequestError: invalid_prompt, invalid_value, context_length_exceeded."""
    _check_token_ids(request, vocab_size)
    _check_values(request, vocab_size)
    _check_length(request, capacity.max_context)
    prompt_tokens = request.prompt.num_tokens
    rest = capacity.max_context - prompt_tokens
    num_tokens = min(request.max_tokens, rest)
    is_cut = request.max_tokens > rest
    pages = pages_needed(prompt_tokens + num_tokens)
    if pages > capacity.num_pages:
        raise RequestError(
            "context_length_exceeded",
            f"{prompt_tokens} prompt tokens and {num_tokens} output tokens need {pages} pages of"
            f" cache memory, but there are only {capacity.num_pages}. Ask for fewer tokens."
            " [context_length_exceeded]",
            request.prompt.param,
        )
    reason = FinishReason.CONTEXT_CAPACITY if is_cut else FinishReason.OUTPUT_LIMIT
    return OutputBudget(num_tokens, reason, pages)


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    token_ids = request.prompt.token_ids
    if token_ids.size == 0:
        raise RequestError("invalid_prompt", "the prompt has no tokens", request.prompt.param)
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        bad_id = lowest if lowest < 0 else highest
        raise RequestError("invalid_prompt", _outside(bad_id, vocab_size), request.prompt.param)


def _check_values(request: GenerationRequest, vocab_size: int) -> None:
    if request.max_tokens < 0:
        raise RequestError(
            "invalid_value", f"max_tokens is {request.max_tokens}, at least 0", "max_tokens"
        )
    top_logprobs = request.sampling.top_logprobs
    if top_logprobs is not None and not 0 <= top_logprobs <= vocab_size:
        raise RequestError(
            "invalid_value",
            f"top_logprobs is {top_logprobs}, 0 to {vocab_size}",
            "top_logprobs",
        )
    scoring = request.scoring
    if scoring is not None and not (scoring.first >= 1 and 0 <= scoring.num_top <= vocab_size):
        raise RequestError(
            "invalid_value",
            f"scores of {scoring.num_top} tokens from {scoring.first} on, at least 1 and at most"
            f" {vocab_size} tokens",
            "scoring",
        )
    biased_ids = [token_id for token_id, _ in request.sampling.logit_bias]
    for param, token_ids in (
        ("logit_bias", biased_ids),
        ("stop_token_ids", request.suppressed_ids),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError("invalid_value", _outside(token_id, vocab_size), param)


def _outside(token_id: int, vocab_size: int) -> str:
    return f"token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})"


def _check_length(request: GenerationRequest, max_context: int) -> None:
    prompt = request.prompt
    if prompt.num_tokens + min(request.max_tokens, 1) > max_context:
        raise context_length_error(prompt.num_tokens, max_context, prompt.param)
