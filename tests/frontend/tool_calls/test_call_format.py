"""Which form of calls a template teaches, against what it renders."""

from __future__ import annotations

from typing import Final

import pytest

from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tool_calls.call_format import (
    CallFormat,
    JsonCallFormat,
    XmlCallFormat,
    find_call_format,
)
from tests.helpers.chat_templates import QWEN3, QWEN3_5
from tests.helpers.demo_frontend import RESOURCES

DEMO: Final = RESOURCES.chat_template or ""


def _written(form: CallFormat, name: str, key: str, value: str) -> str:
    if isinstance(form, JsonCallFormat):
        return f'{form.head}{name}{form.name_end}{{"{key}": "{value}"}}{form.tail}'
    parameter = f"{form.parameter_head}{key}{form.key_end}{value}{form.parameter_end}"
    return f"{form.head}{name}{form.name_end}{parameter}{form.tail}"


@pytest.mark.parametrize(
    ("source", "kind"),
    [(QWEN3, JsonCallFormat), (QWEN3_5, XmlCallFormat), (DEMO, XmlCallFormat)],
    ids=["json", "xml", "demo"],
)
def test_format_is_what_the_template_renders(source: str, kind: type[CallFormat]) -> None:
    template = ChatTemplate(source)
    form = find_call_format(template)
    assert isinstance(form, kind)
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {"city": "Oslo"}}}
        for name in ("f", "g")
    ]
    text = template.render(
        [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ],
        add_generation_prompt=False,
    )
    written = [_written(form, name, "city", "Oslo") for name in ("f", "g")]
    assert form.separator.join(written) in text


def test_template_without_calls_gets_the_older_form() -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert find_call_format(template) == JsonCallFormat()


def test_template_that_refuses_calls_gets_the_older_form() -> None:
    assert find_call_format(ChatTemplate("{{ raise_exception('no') }}")) == JsonCallFormat()
