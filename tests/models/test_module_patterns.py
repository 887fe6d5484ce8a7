"""Which modules the ignore and target lists of quantised checkpoints mean."""

from __future__ import annotations

import pytest

from ninfer.models.module_patterns import ModulePatterns, PatternStyle

EXACT, ANYWHERE, WILDCARD = PatternStyle.EXACT, PatternStyle.ANYWHERE, PatternStyle.WILDCARD
GATE = "model.layers.3.mlp.gate"
EXPERT = "model.layers.3.mlp.experts.7.gate_proj"
WRAPPED = "model.language_model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("style", "pattern", "module", "expected"),
    [
        (EXACT, GATE, GATE, True),
        (EXACT, "model.layers.3.mlp", GATE, False),
        (EXACT, "mlp.gate", GATE, False),
        (EXACT, r"re:.*mlp\.gate$", GATE, True),
        (EXACT, r"re:.*mlp\.gate$", EXPERT, False),
        (EXACT, r"re:mlp\.gate", GATE, False),
        (EXACT, "re:model.layers.3", "model.layers.33.mlp.gate", True),
        (EXACT, "re:.*lm_head", "lm_head", True),
        (EXACT, "Linear", EXPERT, True),
        (EXACT, "re:.*q_proj", WRAPPED, True),
        (EXACT, "model.layers.3.self_attn.q_proj", WRAPPED, True),
        (EXACT, "language_model.model.layers.3.self_attn.q_proj", WRAPPED, True),
        (EXACT, WRAPPED, "model.layers.3.self_attn.q_proj", True),
        (EXACT, "model.layers.3.self_attn.k_proj", WRAPPED, False),
        (ANYWHERE, GATE, GATE, True),
        (ANYWHERE, "gate", GATE, True),
        (ANYWHERE, "gate", EXPERT, False),
        (ANYWHERE, "model.layers.3", GATE, True),
        (ANYWHERE, "model.layers.3", "model.layers.33.mlp.gate", False),
        (ANYWHERE, "layers.3", GATE, False),
        (ANYWHERE, "in_proj_b", "model.layers.0.linear_attn.in_proj_ba", False),
        (ANYWHERE, "*gate", GATE, False),
        (WILDCARD, GATE, GATE, True),
        (WILDCARD, "*.mlp.gate", GATE, True),
        (WILDCARD, "*.mlp.gate", EXPERT, False),
        (WILDCARD, "model.layers.3*", "model.layers.33.mlp.gate", True),
        (WILDCARD, "model.layers.3.mlp", EXPERT, True),
        (WILDCARD, "mlp.gate", GATE, False),
        (WILDCARD, "model.layers.?.mlp.gat[ef]", GATE, True),
        (WILDCARD, "lm_head", "lm_head", True),
    ],
)
def test_a_pattern_means_what_its_producer_means(
    style: PatternStyle, pattern: str, module: str, expected: bool
) -> None:
    assert ModulePatterns.compiled(style, [pattern]).match(module) is expected


def test_one_of_many_is_enough_and_none_means_nothing() -> None:
    patterns = ModulePatterns.compiled(EXACT, ["lm_head", r"re:.*\.gate$", "re:x"])
    assert patterns.match(GATE)
    assert not patterns.match(EXPERT)
    for style in PatternStyle:
        assert not ModulePatterns.compiled(style, []).match(GATE)


def test_a_bad_expression_is_named() -> None:
    with pytest.raises(ValueError, match=r"'re:\(' is no regular expression"):
        ModulePatterns.compiled(EXACT, ["lm_head", "re:("])


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "([a-z._0-9]+)*!", "(a|a)*b", "((ab)+c){2,}", "(?:x?y?)+", r"(\w+\.)*\w+!",
     ".*.*.*.*.*.*!", "(a|aa)+$", "(" * 900, "()" * 1000],
)  # fmt: skip
def test_expressions_that_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="re:"):
        ModulePatterns.compiled(EXACT, [f"re:{pattern}"])


@pytest.mark.parametrize(
    "pattern",
    [r".*layers\.\d+\.mlp\.experts\.\d+\..*", ".*(self_attn|linear_attn).*", r"model\.(a|b)\.[+*]+",
     "(abc)+", r"(?:visual|merger)\..*", r"layers\.(1|2)?[0-9]\.", "[]*+]*", r"\(a+\)+"],
)  # fmt: skip
def test_expressions_of_real_lists_are_taken(pattern: str) -> None:
    ModulePatterns.compiled(EXACT, [f"re:{pattern}"])
