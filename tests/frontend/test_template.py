"""The template environment: what HF templates use, and its bounds."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.frontend.template import ChatTemplate


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render([], template_kwargs=variables, add_generation_prompt=False)


def test_tojson_leaves_html_and_unicode_alone_and_takes_arguments() -> None:
    value = {"b": "<é & '>", "a": [1, True, None]}
    assert render("{{ v|tojson }}", v=value) == """{"b": "<é & '>", "a": [1, true, null]}"""
    assert render("{{ v|tojson(sort_keys=true, separators=(',',':')) }}", v=value).startswith(
        '{"a":[1,'
    )
    assert render("{{ v|tojson(ensure_ascii=true) }}", v="é") == '"\\u00e9"'
    assert render("{{ v|tojson(indent=2) }}", v=[1]) == "[\n  1\n]"


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = "{% for i in range(9) %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}{% endfor %}"
    assert render(source) == "01"


def test_generation_tag_is_its_content() -> None:
    source = "{% generation %}{% set a = 'x' %}{{ a }}y{% endgeneration %}z"
    assert render(source) == "xyz"


def test_strftime_now_formats_the_present() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_items_of_a_mapping_and_of_nothing() -> None:
    source = "{% for k, v in (v or {})|items %}{{ k }}={{ v }};{% endfor %}"
    assert render(source, v={"a": 1, "b": 2}) == "a=1;b=2;"
    assert render(source, v=None) == ""


def test_arguments_cannot_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}")
    text = template.render(
        [{"content": "real"}],
        template_kwargs={"messages": [{"content": "fake"}], "add_generation_prompt": True},
        add_generation_prompt=False,
    )
    assert text == "realFalse"


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: line 3: .*endfor|line 3"):
        ChatTemplate("a\nb\n{% for x in %}")


def test_unknown_filter_is_found_at_load() -> None:
    with pytest.raises(ModelFileError, match="no_such_filter"):
        ChatTemplate("{{ messages|no_such_filter }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No\n  way.') }}", "refuses this conversation: No way."),
        ("{{ raise_exception('\\x1b[31mred\\u202e') }}", r"conversation: \x1b[31mred\u202e"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "fails on this conversation"),
        ("{{ [].append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nests too deeply"),
        ("{{ missing|tojson }}", "fails on this conversation"),
    ],
)
def test_failing_render_is_a_request_error(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        render(source)
    assert caught.value.code == "invalid_template"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(500000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ ('x' * 1000000) * 1000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
    ],
)
def test_exploding_render_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"refuses|fails"):
        render(source)


def test_bounds_leave_ordinary_arithmetic_alone() -> None:
    assert render("{{ 3 * 4 }} {{ 2 ** 10 }} {{ '-' * 3 }} {{ 0.5 * 4 }}") == "12 1024 --- 2.0"
