"""The body of a request, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer.contract.cache import CacheRequest
from ninfer.contract.chat import Constraint
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.responses.output_recorder import OutputView
from ninfer.gateway.responses.request import ResponsesRequest, parse_responses_request
from tests.helpers.responses_rig import DEFAULT_ECHO

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TOOL = {"type": "function", "name": "f"}


def parse(session_header: str | None = None, **fields: Any) -> ResponsesRequest:
    return parse_responses_request(Fields({"input": "hi", **fields}), 300, session_header)


def refused(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value.code, caught.value.param


def test_defaults() -> None:
    request = parse()
    assert (request.model, request.instructions, request.previous_response_id) == (None,) * 3
    assert request.store
    assert not request.stream
    assert request.view == OutputView()
    params = request.params
    assert params.split_reasoning
    assert (params.max_tokens, params.top_logprobs) == (None, None)
    assert (params.tools, params.constraint) == (None, None)
    assert request.echo == DEFAULT_ECHO


def test_null_is_the_same_as_absent() -> None:
    names = [*parse().echo, "include", "stream", "stream_options", "temperature", "background"]
    nulls = dict.fromkeys([*names, "conversation", "prompt", "context_management", "moderation"])
    assert parse(**nulls) == parse()


def test_what_was_asked_for_is_repeated() -> None:
    asked: dict[str, Any] = {
        "instructions": "be brief",
        "max_output_tokens": 5,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "safety_identifier": "s",
        "store": False,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]},
        "tools": [TOOL, {"type": "web_search"}],
        "top_logprobs": 3,
        "truncation": "auto",
        "user": "u",
    }
    assert parse(**asked).echo == {**asked, "service_tier": "default"}


def test_fields_that_agents_send_are_accepted() -> None:
    parse(
        client_metadata={"a": 1},
        access_programs={},
        service_tier="priority",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        stream_options={"include_obfuscation": False},
        include=["reasoning.encrypted_content", "something.new"],
        reasoning={"effort": "xhigh", "context": "x", "mode": "y"},
        background=False,
        context_management=[{"type": "compaction", "compact_threshold": None}],
        some_new_field={"x": [1]},
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"bad_words": ["a"]}, "bad_words"),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
            "context_management[0].compact_threshold",
        ),
    ],
)
def test_guarantees_that_cannot_be_given_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"instructions": 5}, "invalid_type", "instructions"),
        ({"previous_response_id": 5}, "invalid_type", "previous_response_id"),
        ({"store": "yes"}, "invalid_type", "store"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"metadata": "x"}, "invalid_type", "metadata"),
        ({"include": "x"}, "invalid_type", "include"),
        ({"include": [5]}, "invalid_type", "include[0]"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": -1}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": True}, "invalid_type", "top_logprobs"),
        ({"max_output_tokens": -2}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "invalid_type", "max_output_tokens"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"truncation": "some"}, "invalid_value", "truncation"),
        ({"reasoning": "high"}, "invalid_type", "reasoning"),
        ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning.effort"),
        ({"reasoning": {"summary": 5}}, "invalid_type", "reasoning.summary"),
        ({"text": "plain"}, "invalid_type", "text"),
        ({"text": {"verbosity": 5}}, "invalid_type", "text.verbosity"),
        ({"text": {"format": {}}}, "missing_required_parameter", "text.format.type"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": []}}},
            "invalid_type",
            "text.format.schema",
        ),
        (
            {
                "text": {"format": {"type": "json_object"}},
                "tools": [TOOL],
                "tool_choice": "required",
            },
            "invalid_value",
            "text.format",
        ),
        ({"stream_options": 5}, "invalid_type", "stream_options"),
        ({"user": 5}, "invalid_type", "user"),
        ({"prompt_cache_key": 5}, "invalid_type", "prompt_cache_key"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    assert refused(**fields) == (code, param)


def test_input_may_be_left_out_behind_another_response() -> None:
    assert parse(input=None, previous_response_id="resp_1").items == ()


@pytest.mark.parametrize(("given", "limit"), [(-1, None), (0, 0), (7, 7)])
def test_output_limit(given: int, limit: int | None) -> None:
    request = parse(max_output_tokens=given, max_tokens=9)
    assert request.params.max_tokens == limit
    assert request.echo["max_output_tokens"] == limit


def test_logprobs_need_both_the_wish_and_the_count() -> None:
    wish = ["message.output_text.logprobs"]
    assert parse(top_logprobs=3).params.top_logprobs is None
    assert parse(include=wish).params.top_logprobs == 0
    request = parse(include=wish, top_logprobs=3)
    assert request.params.top_logprobs == 3
    assert request.view.has_logprobs


def test_what_is_shown_of_a_thought() -> None:
    assert parse(include=["reasoning.encrypted_content"]).view.seals_reasoning
    assert parse(reasoning={"summary": "auto"}).view.has_summary
    assert parse(reasoning={"generate_summary": "detailed"}).view.has_summary
    assert not parse(reasoning={"summary": "none"}).view.has_summary
    assert parse(reasoning={"exclude": True}).view.hides_reasoning


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("minimal", True), ("high", True), ("max", True)]
)
def test_effort(effort: str, thinks: bool) -> None:
    assert parse(reasoning={"effort": effort}).template_kwargs["enable_thinking"] is thinks


def test_template_switches_win() -> None:
    request = parse(reasoning={"effort": "high"}, chat_template_kwargs={"enable_thinking": False})
    assert request.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(("strict", "is_strict"), [(True, True), (False, False), (None, False)])
def test_schema_of_the_text_keeps_its_order(strict: bool | None, is_strict: bool) -> None:
    form = {"type": "json_schema", "name": "codex", "schema": SCHEMA, "strict": strict}
    constraint = parse(text={"format": form}).params.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("json_schema", "text.format.schema")
    assert constraint.is_strict is is_strict
    assert list(json.loads(constraint.text)["properties"]) == ["b", "a"]


def test_other_formats() -> None:
    any_json = Constraint("json_object", "", "text.format.type")
    assert parse(text={"format": {"type": "json_object"}}).params.constraint == any_json
    assert parse(text={"format": {"type": "text"}}).params.constraint is None
    assert parse(text={"format": None}).params.constraint is None


def test_a_format_beside_tools_that_may_be_called() -> None:
    params = parse(text={"format": {"type": "json_object"}}, tools=[TOOL]).params
    assert params.constraint is not None
    assert params.tools is not None


def test_names_of_the_conversation() -> None:
    assert parse("head").params.cache == CacheRequest(session_key="head")
    assert parse(prompt_cache_key="k").params.cache.session_key == "k"
    assert parse("head", session_id="s").params.cache.session_key == "s"
