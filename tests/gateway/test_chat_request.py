"""The fields of a chat request: what is taken, what is ignored, what is refused and how."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import Constraint, GenerationParams
from ninfer.contract.errors import RequestError
from ninfer.gateway.chat_request import ChatRequest, parse_chat_request
from ninfer.gateway.fields import Fields

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "so"}
VOCAB_SIZE = 1000


def parse(**fields: Any) -> ChatRequest:
    return parse_chat_request(Fields({"messages": [USER], **fields}), VOCAB_SIZE)


def error_of(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


def test_a_bare_request_asks_for_nothing() -> None:
    request = parse()
    assert request.params == GenerationParams()
    assert request.model is None
    assert request.num_choices == 1
    assert not request.stream
    assert not request.include_usage
    assert request.chat.template_kwargs == {}
    assert request.chat.add_generation_prompt
    assert not request.chat.continue_final_message


def test_fields_that_ask_for_nothing_are_taken_as_absent() -> None:
    request = parse(
        allowed_token_ids=[],
        bad_words=[],
        dry_multiplier=0.0,
        dynatemp_range=0,
        echo=False,
        documents=[],
        lora_path=None,
        mirostat=0,
        prompt_logprobs=None,
        return_hidden_states=False,
        top_n_sigma=-1,
        typical_p=1,
        use_beam_search=False,
        xtc_probability=0,
    )
    assert request.params == GenerationParams()


def test_every_generation_field_arrives() -> None:
    request = parse(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "3": 2.5},
        seed=-5,
        logprobs=True,
        top_logprobs=3,
        max_tokens=10,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5, 6.0],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stop_in_reasoning=True,
        timeout_s=3,
    )
    assert request.params == GenerationParams(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias=((3, 2.5), (7, -100.0)),
        seed=-5,
        top_logprobs=3,
        max_tokens=10,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        include_stop_string=True,
        skip_special_tokens=False,
        stop_in_reasoning=True,
        timeout_s=3.0,
    )


@pytest.mark.parametrize(
    "hints",
    [
        {"user": "u", "safety_identifier": "s", "service_tier": "auto", "store": True},
        {"metadata": {"a": "b"}, "prediction": {"type": "content"}, "verbosity": "low"},
        {"prompt_cache_options": {}, "prompt_cache_retention": "24h", "priority": -3},
        {"cache": "default", "cache_control": {"type": "ephemeral"}, "session_id": ""},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"functions": [], "function_call": "auto"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1},
        {"web_search_options": {}, "moderation": None, "grammar": "", "guided_json": None},
        {"no_such_field": [1, {"x": 2}], "chat_id": 9},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"add_generation_prompt": True},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
def test_hints_and_unknown_fields_change_nothing(hints: dict[str, Any]) -> None:
    request = parse(**hints)
    assert request.params == GenerationParams()
    assert request.chat == parse().chat


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 10**12}, 10**12),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_new_tokens": 5, "max_output_tokens": 6}, 6),
        ({"max_tokens": 32.0}, 32),
    ],
)
def test_output_limit_spellings(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).params.max_tokens == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, -1), (0, 0), (999, 999), (1000, 0), (10**9, 0)]
)
def test_top_k_beyond_the_vocabulary_is_off(value: int, expected: int) -> None:
    assert parse(top_k=value).params.top_k == expected


def test_repeat_penalty_is_an_alias() -> None:
    assert parse(repeat_penalty=1.2).params.repetition_penalty == 1.2
    assert error_of(repeat_penalty=11).param == "repeat_penalty"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 3, "max_output_tokens": "x"}, "max_output_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 3, "max_new_tokens": -2}, "max_new_tokens"),
        ({"repetition_penalty": 1.2, "repeat_penalty": "x"}, "repeat_penalty"),
        ({"tool_choice": "none", "function_call": 3}, "function_call"),
        ({"reasoning": {"exclude": True}, "include_reasoning": "x"}, "include_reasoning"),
        (
            {"messages": [USER, {**ASSISTANT, "reasoning_content": "a", "reasoning": 3}, USER]},
            "messages[1].reasoning",
        ),
    ],
)
def test_a_spelling_that_does_not_count_is_checked_all_the_same(
    fields: dict[str, Any], param: str
) -> None:
    assert error_of(**fields).param == param


def test_the_first_spelling_counts() -> None:
    spellings = {"max_tokens": 2, "max_output_tokens": 3, "max_new_tokens": 4}
    assert parse(**spellings).params.max_tokens == 2
    assert parse(**spellings, max_completion_tokens=1).params.max_tokens == 1
    assert parse(**spellings, max_completion_tokens=-1).params.max_tokens is None


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(stop: object) -> None:
    assert parse(stop=stop).params.stop == ()


def test_one_stop() -> None:
    assert parse(stop="END").params.stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": "1"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"min_p": -1}, "invalid_value", "min_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"top_k": 1.5}, "invalid_type", "top_k"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "invalid_value", "repetition_penalty"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"seed": 1.5}, "invalid_type", "seed"),
        ({"seed": "7"}, "invalid_type", "seed"),
        ({"max_tokens": -2}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": "5"}, "invalid_type", "max_completion_tokens"),
        ({"min_tokens": -1}, "invalid_value", "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "invalid_value", "min_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 17}, "invalid_value", "n"),
        ({"best_of": 2}, "invalid_value", "best_of"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ["a" * 257]}, "invalid_value", "stop[0]"),
        ({"stop": [1]}, "invalid_type", "stop[0]"),
        ({"stop": {}}, "invalid_type", "stop"),
        ({"stop_token_ids": [1000]}, "invalid_value", "stop_token_ids[0]"),
        ({"stop_token_ids": 5}, "invalid_type", "stop_token_ids"),
        ({"logit_bias": []}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "invalid_type", "logit_bias.5"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value", "logit_bias"),
        ({"logprobs": 5}, "invalid_type", "logprobs"),
        ({"top_logprobs": 5}, "invalid_value", "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1_000_000}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "5"}, "invalid_type", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "invalid_type", "top_logprobs"),
        ({"stream": "true"}, "invalid_type", "stream"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"stream_options": True}, "invalid_type", "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
        ({"model": 5}, "invalid_type", "model"),
        ({"metadata": "x"}, "invalid_type", "metadata"),
        ({"priority": 2**63}, "invalid_value", "priority"),
        ({"cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"cache_salt": "x" * 1025}, "invalid_value", "cache_salt"),
        ({"timeout_s": 0}, "invalid_value", "timeout_s"),
        ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"regex": "a", "grammar": "root ::= x"}, "invalid_value", "grammar"),
        ({"structural_tag": "{}"}, "unsupported_parameter", "structural_tag"),
        ({"allowed_token_ids": [1]}, "unsupported_parameter", "allowed_token_ids"),
        ({"bad_words": ["a"]}, "unsupported_parameter", "bad_words"),
        ({"lora_path": "a"}, "unsupported_parameter", "lora_path"),
        ({"session_params": {}}, "unsupported_parameter", "session_params"),
        ({"prompt_logprobs": 0}, "unsupported_parameter", "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"mirostat": 2}, "unsupported_parameter", "mirostat"),
        ({"typical_p": 0.5}, "unsupported_parameter", "typical_p"),
        ({"mirostat": False}, "unsupported_parameter", "mirostat"),
        ({"return_hidden_states": 1}, "unsupported_parameter", "return_hidden_states"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"documents": [{"text": "a"}]}, "unsupported_parameter", "documents"),
        ({"chat_template": "{{ a }}"}, "unsupported_parameter", "chat_template"),
        (
            {"messages": [USER, {**ASSISTANT, "prefix": True}], "add_generation_prompt": True},
            "invalid_value",
            "messages[1].prefix",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "partial": True}], "add_generation_prompt": True},
            "invalid_value",
            "messages[1].partial",
        ),
        ({"web_search_options": {"a": 1}}, "unsupported_parameter", "web_search_options"),
        ({"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
        ({"modalities": ["audio"]}, "unsupported_value", "modalities"),
        ({"chat_template_kwargs": []}, "invalid_type", "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"messages": [1]}},
            "invalid_value",
            "chat_template_kwargs.messages",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "invalid_type",
            "chat_template_kwargs.enable_thinking",
        ),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        (
            {
                "messages": [ASSISTANT],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "invalid_value",
            "continue_final_message",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    error = error_of(**fields)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("fields", "continues", "adds"),
    [
        ({}, False, True),
        ({"continue_final_message": True}, True, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"messages": [USER, {**ASSISTANT, "prefix": True}]}, True, False),
        ({"messages": [USER, {**ASSISTANT, "partial": True}]}, True, False),
    ],
)
def test_last_assistant_turn(fields: dict[str, Any], continues: bool, adds: bool) -> None:
    chat = parse(**{"messages": [USER, ASSISTANT], **fields}).chat
    assert chat.continue_final_message is continues
    assert chat.add_generation_prompt is adds


def test_a_constraint_and_a_budget_are_passed_on() -> None:
    request = parse(
        response_format={"type": "json_object"}, thinking={"type": "enabled", "budget_tokens": 64}
    )
    assert request.params.constraint == Constraint("json_object", "", "response_format.type")
    assert request.params.thinking_budget == 64
    assert request.chat.template_kwargs == {"enable_thinking": True}
