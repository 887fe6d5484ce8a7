from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.engine.request_checks import OutputBudget, check_request
from tests.helpers.scripted_session import ScriptedSession


def check(
    prompt_tokens: int,
    max_tokens: int,
    *,
    max_context: int = 100,
    num_pages: int = 2,
    sampling: SamplingParams | None = None,
    suppressed_ids: tuple[int, ...] = (),
    param: str = "prompt",
) -> OutputBudget:
    return check_request(
        GenerationRequest(
            "r",
            PreparedPrompt(np.zeros(prompt_tokens, np.int32), param=param),
            sampling or SamplingParams(),
            ScriptedSession(),
            max_tokens,
            suppressed_ids=suppressed_ids,
        ),
        capacity=Capacity(1, max_context, num_pages, 3, 16),
        vocab_size=10,
        pages_needed=lambda num_tokens: -(-num_tokens // PAGE_TOKENS),
    )


@given(prompt_tokens=st.integers(1, 120), max_tokens=st.integers(0, 200))
def test_budget_fits_the_context_and_at_least_one_token(
    prompt_tokens: int, max_tokens: int
) -> None:
    if prompt_tokens + min(max_tokens, 1) > 100:
        with pytest.raises(RequestError) as caught:
            check(prompt_tokens, max_tokens)
        assert caught.value.code == "context_length_exceeded"
        return
    budget = check(prompt_tokens, max_tokens)
    assert budget.num_tokens == min(max_tokens, 100 - prompt_tokens)
    is_cut = budget.num_tokens < max_tokens
    assert (budget.reason is FinishReason.CONTEXT_CAPACITY) == is_cut
    assert budget.worst_case_pages == (1 if prompt_tokens + budget.num_tokens <= 64 else 2)


def test_full_context_without_room_for_output_names_the_true_limit_and_why() -> None:
    with pytest.raises(RequestError) as caught:
        check(100, 1)
    assert caught.value.message == (
        "This model's maximum context length is 100 tokens. However, your request has 100 prompt"
        " tokens, which leave no room for a token of output (prompt is too long: 100 tokens > 99"
        " maximum). Please reduce the length of the prompt. [context_length_exceeded]"
    )
    assert check(100, 0).num_tokens == 0


@pytest.mark.parametrize("param", ["messages", "text[3]"])
def test_refusals_of_the_prompt_name_the_field_it_came_in(param: str) -> None:
    for sizes in ((101, 0), (100, 1), (0, 1)):
        with pytest.raises(RequestError) as caught:
            check(*sizes, param=param)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        check(60, 20, num_pages=1, param=param)
    assert caught.value.param == param


def test_request_that_can_never_get_its_pages_is_refused() -> None:
    with pytest.raises(RequestError, match="need 2 pages") as caught:
        check(60, 20, num_pages=1)
    assert caught.value.code == "context_length_exceeded"


def test_empty_prompt_and_negative_budget() -> None:
    with pytest.raises(RequestError) as caught:
        check(0, 1)
    assert caught.value.code == "invalid_prompt"
    with pytest.raises(RequestError) as caught:
        check(1, -1)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "max_tokens")


@pytest.mark.parametrize("token_id", [-1, 10])
def test_biased_id_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(RequestError) as caught:
        check(1, 1, sampling=SamplingParams(logit_bias=((3, 1.0), (token_id, 1.0))))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "logit_bias")


@pytest.mark.parametrize("token_id", [-1, 10])
def test_suppressed_id_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(RequestError) as caught:
        check(1, 1, suppressed_ids=(3, token_id))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "stop_token_ids")


@pytest.mark.parametrize("top_logprobs", [-1, 11])
def test_more_alternatives_than_the_vocabulary_has(top_logprobs: int) -> None:
    with pytest.raises(RequestError) as caught:
        check(5, 5, sampling=SamplingParams(top_logprobs=top_logprobs))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "top_logprobs")


def test_as_many_alternatives_as_the_vocabulary_has() -> None:
    assert check(5, 5, sampling=SamplingParams(top_logprobs=10)).num_tokens == 5
