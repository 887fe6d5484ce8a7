"""The many ways to ask for thinking or for none -> the template's `enable_thinking`.

The more specific wins: chat_template_kwargs, then a budget of zero, which leaves nothing to think,
then top-level switches, then an effort.
"""

from __future__ import annotations

from typing import Final

from ninfer.gateway.fields import Fields, first_given, invalid_type

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_THINKING_TYPES: Final = ("enabled", "adaptive", "between_tools", "disabled")
_BUDGETS: Final = ("thinking_budget", "thinking_token_budget")


def parse_enable_thinking(fields: Fields) -> bool | None:
    """None when nothing was asked for. Raises RequestError."""
    reasoning = fields.child("reasoning")
    output_config = fields.child("output_config")
    is_empty = parse_thinking_budget(fields) == 0
    switches = (
        False if is_empty else None,
        fields.boolean("enable_thinking"),
        _thinking_type(fields),
        reasoning.boolean("enabled") if reasoning else None,
        _budget(fields, reasoning),
        _effort(fields, "reasoning_effort"),
        _effort(reasoning, "effort"),
        _effort(output_config, "effort"),
    )
    return next((switch for switch in switches if switch is not None), None)


def parse_thinking_budget(fields: Fields) -> int | None:
    """Most tokens of thought; None when nothing was asked for, or no limit. Raises RequestError."""
    given = [fields.integer(name, -1) for name in _BUDGETS]
    thinking, reasoning = fields.get("thinking"), fields.child("reasoning")
    if isinstance(thinking, dict):
        path = fields.path_of("thinking")
        given.append(Fields(thinking, path).integer("budget_tokens", -1))
    if reasoning is not None:
        given.append(reasoning.integer("max_tokens", -1))
    budget = first_given(given)
    return None if budget == -1 else budget


def parse_hide_reasoning(fields: Fields) -> bool:
    """The model thinks, but the client does not want to see it."""
    reasoning = fields.child("reasoning")
    is_excluded = reasoning is not None and reasoning.flag("exclude")
    is_included = fields.boolean("include_reasoning")
    return is_excluded or is_included is False


def _thinking_type(fields: Fields) -> bool | None:
    value = fields.get("thinking")
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise invalid_type(fields.path_of("thinking"), "an object", value)
    thinking = Fields(value, fields.path_of("thinking"))
    kind = thinking.choice("type", _THINKING_TYPES)
    budget = _budget_of(thinking, "budget_tokens")
    if kind is None:
        return budget
    return kind != "disabled"


def _budget(fields: Fields, reasoning: Fields | None) -> bool | None:
    """A budget of zero switches thinking off, any other on."""
    budgets = [_budget_of(fields, name) for name in _BUDGETS]
    if reasoning is not None:
        budgets.append(_budget_of(reasoning, "max_tokens"))
    return next((budget for budget in budgets if budget is not None), None)


def _budget_of(fields: Fields, name: str) -> bool | None:
    value = fields.integer(name, -1)
    return None if value is None or value == -1 else value > 0


def _effort(fields: Fields | None, name: str) -> bool | None:
    effort = fields.choice(name, EFFORTS) if fields is not None else None
    return None if effort is None else effort != "none"
