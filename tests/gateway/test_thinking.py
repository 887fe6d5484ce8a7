"""Thinking switches: all spellings, and which of two contradicting ones wins."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.thinking import (
    parse_enable_thinking,
    parse_hide_reasoning,
    parse_thinking_budget,
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": False}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "xhigh", "summary": "auto"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "max"}, True),
        ({"output_config": {"effort": "high"}}, True),
        ({"thinking_budget": 0}, False),
        ({"thinking_token_budget": -1}, None),
        ({"reasoning": {"max_tokens": 0}}, False),
        ({"thinking_budget": 100}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),
        ({"enable_thinking": True, "thinking_budget": 0}, False),
        ({"enable_thinking": True, "thinking_budget": -1}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, False),
        ({"reasoning": {"enabled": True, "max_tokens": 0}}, False),
        ({"reasoning": {}, "thinking": {}, "output_config": {}}, None),
    ],
)
def test_switches(fields: dict[str, Any], expected: bool | None) -> None:
    assert parse_enable_thinking(Fields(fields)) is expected


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"enable_thinking": "yes"}, "invalid_type", "enable_thinking"),
        ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
        ({"reasoning_effort": 3}, "invalid_type", "reasoning_effort"),
        ({"thinking": "on"}, "invalid_type", "thinking"),
        ({"thinking": {"type": "maybe"}}, "invalid_value", "thinking.type"),
        ({"thinking_budget": -2}, "invalid_value", "thinking_budget"),
        ({"reasoning": {"max_tokens": "9"}}, "invalid_type", "reasoning.max_tokens"),
        ({"thinking": {"budget_tokens": 1.5}}, "invalid_type", "thinking.budget_tokens"),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_enable_thinking(Fields(fields))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"thinking_budget": 100}, 100),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_budget": -1}, None),
        ({"thinking_budget": 0}, 0),
        ({"reasoning": {"max_tokens": 9}}, 9),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ({"thinking": {"type": "enabled"}, "reasoning": {"effort": "high"}}, None),
    ],
)
def test_budgets(fields: dict[str, Any], expected: int | None) -> None:
    assert parse_thinking_budget(Fields(fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"include_reasoning": True}, False),
        ({"include_reasoning": False}, True),
        ({"reasoning": {"exclude": True}}, True),
    ],
)
def test_hiding(fields: dict[str, Any], expected: bool) -> None:
    assert parse_hide_reasoning(Fields(fields)) is expected
