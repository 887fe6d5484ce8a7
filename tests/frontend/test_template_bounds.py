"""Templates that never end or fill the memory are stopped early, others do not notice."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.template_bounds import TemplateBudget, TemplateLimit
from tests.helpers import chat_templates

QUESTION = [{"role": "user", "content": "Hello"}]
MIB = 2**20
DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = EXPR %}{% endfor %}"
)

NESTED = (
    "{% set a, b = namespace(x=[1]), namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set a.x = (a.x + a.x)|batch(2)|list %}{% set b.x = (b.x + b.x)|batch(2)|list %}"
    "{% endfor %}"
)
"""Two lists, each 60 times twice the same one: few objects, but 2 ** 60 paths through them."""
ENDLESS = {
    "nested loops": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    ),
    "loops over text": (
        "{% set s = 'a' * 90000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}"
    ),
    "loops over a filter": (
        "{% for a in range(9999)|map('string') %}{% for b in range(9999)|map('string') %}"
        "{% endfor %}{% endfor %}"
    ),
    "macro calls": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "recursive loop": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}"
    ),
    "slow filters": (
        "{% set s = 'a b ' * 500000 %}{% for i in range(90000) %}{% set n = s|wordcount %}"
        "{% endfor %}"
    ),
    "shared lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "shared dicts": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}"
        "{% endfor %}{{ ns.x|tojson }}"
    ),
    "shared lists by filters": NESTED + "{{ a.x|upper }}",
    "shared lists compared": NESTED + "{% if a.x == b.x %}1{% endif %}",
    "shared lists sorted": NESTED + "{{ [a.x, b.x]|sort|length }}",
    "shared namespaces": (
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
        "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}"
        "{{ range(90000)|list * 90000 }}"
    ),
    "large powers": (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}"
        "{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
}
LARGE = {
    "+": DOUBLING.replace("EXPR", "ns.x + ns.x"),
    "~": DOUBLING.replace("EXPR", "ns.x ~ ns.x"),
    "*": DOUBLING.replace("EXPR", "ns.x * 2"),
    "join": DOUBLING.replace("EXPR", "[ns.x, ns.x]|join"),
    "join method": DOUBLING.replace("EXPR", "''.join([ns.x, ns.x])"),
    "replace": DOUBLING.replace("EXPR", "ns.x|replace('a', ns.x)"),
    "replace method": DOUBLING.replace("EXPR", "ns.x.replace('a', ns.x)"),
    "%": DOUBLING.replace("EXPR", "'%s%s' % (ns.x, ns.x)"),
    "format": DOUBLING.replace("EXPR", "'{0}{0}'.format(ns.x)"),
    "format filter": DOUBLING.replace("EXPR", "'%s%s'|format(ns.x, ns.x)"),
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("EXPR", "m(ns.x)"),
    "set block": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}"
    ),
    "filter block": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
        "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}"
        "{% endfor %}"
    ),
    "kept list": DOUBLING.replace("'ab'", "[1, 2]").replace("EXPR", "ns.x + ns.x"),
    "output": "{% for a in range(90000) %}{{ 'x' * 10000 }}{% endfor %}",
    "text in a loop": "{% for a in range(90000) %}" + "x" * 10_000 + "{% endfor %}",
    "text in a captured loop": (
        "{% set y %}{% for a in range(90000) %}" + "x" * 10_000 + "{% endfor %}{% endset %}"
    ),
    "repeated text": "{{ ('x' * 1000000) * 1000000 }}",
    "repeated list": "{{ [1] * 1000000000 }}",
    "power": "{{ 10 ** 100000000 }}",
    "center": "{{ 'a'|center(10000000000) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ 'a\tb'.expandtabs(10000000000) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
    "batch": "{{ [1]|batch(10000000000, 0)|list }}",
    "slice": "{{ [1]|slice(10000000000)|list }}",
    "round": "{{ 1.5|round(10000000000, 'ceil') }}",
    "padded %": "{{ '%10000000000d' % 1 }}",
    "starred %": "{{ '%*d' % (10000000000, 1) }}",
    "padded format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10000000000) }}",
    "padded format filter": "{{ '%10000000000d'|format(1) }}",
    "tojson": "{{ [1]|tojson(indent=10000000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"refuses|fails"):
        ChatTemplate(source).render(QUESTION, add_generation_prompt=False)


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_template_that_grows_is_stopped_before_it_takes_the_memory(source: str) -> None:
    template = ChatTemplate(source)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"refuses|fails"):
            template.render(QUESTION, add_generation_prompt=False)
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["nested loops", "macro calls", "slow filters"])
def test_it_is_found_at_load_with_its_file(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], path=Path("m/chat_template.jinja"))
    with pytest.raises(ModelFileError, match="for a short conversation") as caught:
        template.probe(QUESTION, add_generation_prompt=False)
    assert caught.value.path == Path("m/chat_template.jinja")


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    ChatTemplate("{{ 'a'|center(10000000000) }}{{ 'a' * 10000000000 }}{{ [1, 'a' ~ 'b'] }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ x }}", "a1None"),
        (
            "{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ c }}"
            "{% endfor %}",
            "1/3a2/3b3/3c",
        ),
        ("{% for i in [1, 2]|map('string') %}{{ i }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for a in missing %}x{% else %}none{% endfor %}", "none"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}", "a1"),
        ("{% set x | upper %}a{{ 1 }}{% endset %}{{ x }}", "A1"),
        ("{% filter upper %}a{% endfilter %}", "A"),
        ("{% set a, b = 1, [2] %}{{ a }}{{ b }}", "1[2]"),
        (
            "{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}"
            "{% endfor %}",
            "12",
        ),
        ("{{ '%5.2f|%s' % (1.5, 'a') }}{{ '{:>3}'.format(7) }}", " 1.50|a  7"),
        ("{{ [3, 1]|sort|join(', ') }}{{ 'x'|indent }}{{ 'a-b'|replace('-', '+') }}", "1, 3xa+b"),
        ("{{ dict(a=1)|tojson }}{{ namespace(a=1).a }}{{ ['a', 'b'][-1] }}", '{"a": 1}1b'),
        (
            "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}"
            "{% call m(1) %}c{% endcall %}",
            "12c",
        ),
        ("{{ 3 * 4 }} {{ 2 ** 10 }} {{ '-' * 3 }} {{ 7 % 4 }} {{ 0.5 * 4 }}", "12 1024 --- 3 2.0"),
        ("{{ " + "'" + "y" * 100 + "'" + " }}" + "z" * 100, "y" * 100 + "z" * 100),
    ],
)  # fmt: skip
def test_what_the_bounds_hook_keeps_its_meaning(source: str, text: str) -> None:
    assert ChatTemplate(source).render([], add_generation_prompt=False) == text


def test_a_long_conversation_stays_within_bounds() -> None:
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "q" * 50},
        {"role": "assistant", "content": "a" * 50},
    ]
    for messages in (turn * 5_000, [{"role": "user", "content": "x" * 30_000_000}]):
        text = ChatTemplate(chat_templates.QWEN3).render(messages, add_generation_prompt=True)
        assert len(text) > sum(len(message["content"]) for message in messages)


def test_many_numbers_in_arguments_stay_within_bounds() -> None:
    numbers = {"role": "user", "content": "Hi", "arguments": {"data": [[1, 2.5, None]] * 100_000}}
    source = "{% for m in messages %}{{ m.arguments|tojson }}{% endfor %}"
    text = ChatTemplate(source).render([numbers], add_generation_prompt=False)
    assert text.count("2.5") == 100_000


def test_a_budget_grows_with_what_it_is_for() -> None:
    small, large = TemplateBudget(10), TemplateBudget(1_000_000)
    large.take_characters(500_000_000)
    with pytest.raises(TemplateLimit, match=re.escape("too many characters")):
        small.take_characters(500_000_000)
