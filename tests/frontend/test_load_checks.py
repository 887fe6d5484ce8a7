"""Tokenizer, template and configuration that contradict each other are refused at load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import FrontendResources
from ninfer.convert.source import open_model
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import SamplingOptions
from tests.helpers import chat_templates
from tests.helpers.demo_frontend import (
    END_OF_TEXT,
    IM_END,
    RESOURCES,
    demo_config,
    demo_frontend,
)
from tests.helpers.model_paths import all_models

FOLDER = Path("m")
PADDED_VOCAB_SIZE = 5000
"""Ids from 4096 on belong to no token."""


def tokenizer_without(*marks: str) -> bytes:
    document = json.loads(RESOURCES.tokenizer_json or b"")
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] not in marks
    ]
    return json.dumps(document).encode()


def refused(resources: FrontendResources, **config: object) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        ModelFrontend(
            dataclasses.replace(demo_config(PADDED_VOCAB_SIZE), **config),  # type: ignore[arg-type]
            dataclasses.replace(resources, folder=FOLDER),
            SamplingOptions(),
        )
    return caught.value


@pytest.mark.parametrize("path", all_models(), ids=lambda path: path.parent.name + path.name)
def test_every_model_of_the_tree_passes(path: Path) -> None:
    source = open_model(path)
    ModelFrontend(source.config, source.resources, SamplingOptions())


@pytest.mark.parametrize("mark", ["<|im_start|>", "<|im_end|>"])
@pytest.mark.parametrize("template", [RESOURCES.chat_template, chat_templates.QWEN3])
def test_a_mark_of_the_template_must_be_a_token(mark: str, template: str) -> None:
    resources = dataclasses.replace(
        RESOURCES,
        tokenizer_json=tokenizer_without(mark),
        chat_template=template,
        generation_config={"eos_token_id": END_OF_TEXT},
    )
    error = refused(resources)
    assert (error.path, error.field) == (FOLDER / "tokenizer.json", "added_tokens")
    assert mark in str(error)
    assert "chat_template.jinja" in str(error)


def test_marks_that_chats_do_not_need_may_be_missing() -> None:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<think>", "</think>")
    demo_frontend(tokenizer_json=tokenizer_without(*names))


def test_a_template_without_marks_needs_none() -> None:
    demo_frontend(
        tokenizer_json=tokenizer_without("<|im_start|>", "<|im_end|>"),
        chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
        generation_config={"eos_token_id": END_OF_TEXT},
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "it leaves out the message of the user"),
        ("You are helpful.{{ messages|length }}", "it leaves out the message of the user"),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
            "{% endfor %}",
            "it leaves out the message of the user",
        ),
        (
            "{#\n#}a\n{{ foo.bar.baz }}",
            "line 3: unusable: it renders no conversation: 'foo' is und",
        ),
        ("{{ ''.__class__.__mro__ }}", "line 1: unusable: it renders no conversation: access to"),
        ("\n{% for i in range(10**9) %}x{% endfor %}{{ messages[0].content }}", "unusable: "),
        ("{{ raise_exception('never') }}", "unusable: it renders no conversation: never"),
        ("{{ messages[7].content.x }}", "line 1: unusable: it renders no conversation"),
    ],
)
def test_a_template_that_renders_no_conversation_is_refused(template: str, message: str) -> None:
    error = refused(dataclasses.replace(RESOURCES, chat_template=template))
    assert error.path == FOLDER / "chat_template.jinja"
    assert message in str(error)


NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system') }}{% endif %}"
NEEDS_ANSWER = "{% if messages|length < 3 %}{{ raise_exception('too short') }}{% endif %}"
ALL = "{% for m in messages %}{{ m.content|trim|upper|tojson(ensure_ascii=true) }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        *(chat_templates.QWEN3, chat_templates.QWEN3_5, chat_templates.ALTERNATING),
        *(ALL, NEEDS_SYSTEM + ALL, NEEDS_ANSWER + ALL, NEEDS_SYSTEM + NEEDS_ANSWER + ALL),
    ],
)
def test_a_template_may_be_strict(template: str) -> None:
    demo_frontend(chat_template=template)


def test_an_end_token_in_the_padding_names_its_file() -> None:
    error = refused(
        dataclasses.replace(RESOURCES, generation_config={"eos_token_id": [4085, 4500]})
    )
    assert (error.path, error.field) == (FOLDER / "generation_config.json", "eos_token_id")
    assert "4500 is no token of tokenizer.json" in str(error)
    error = refused(dataclasses.replace(RESOURCES, generation_config={}), eos_token_ids=(4500,))
    assert (error.path, error.field) == (FOLDER / "config.json", "eos_token_id")


def test_only_the_end_tokens_in_force_are_checked() -> None:
    config = dataclasses.replace(demo_config(PADDED_VOCAB_SIZE), eos_token_ids=(4500,))
    ModelFrontend(config, RESOURCES, SamplingOptions())
    ModelFrontend(config, FrontendResources(), SamplingOptions())


def test_end_tokens_that_are_all_outside_the_vocabulary_are_refused() -> None:
    for resources in (RESOURCES, FrontendResources()):
        generation_config = {"eos_token_id": [151_643, 151_645]}
        error = refused(dataclasses.replace(resources, generation_config=generation_config))
        assert (error.path, error.field) == (FOLDER / "generation_config.json", "eos_token_id")
        assert "151643 is outside 0 to 4999" in str(error)


def test_a_model_without_end_tokens_loads() -> None:
    config = dataclasses.replace(demo_config(), eos_token_ids=())
    ModelFrontend(config, dataclasses.replace(RESOURCES, generation_config={}), SamplingOptions())
    assert IM_END not in config.eos_token_ids


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"tokenizer_json": b"{"}, "tokenizer.json"),
        ({"chat_template": "{% if %}"}, "chat_template.jinja: line 1"),
        (
            {"chat_template": "{% if %}", "template_file": "tokenizer_config.json"},
            "tokenizer_config.json: chat_template line 1",
        ),
        ({"generation_config": {"top_p": 2}}, "generation_config.json: top_p"),
        ({"tokenizer_config": {"eos_token": 3}}, "tokenizer_config.json: eos_token"),
        (
            {"chat_template": "{% for a in range(99999) %}{% for a in range(99999) %}"
             "{% endfor %}{% endfor %}"},
            "chat_template.jinja: unusable",
        ),
    ],
)  # fmt: skip
def test_files_are_named_with_their_folder(changes: dict[str, object], place: str) -> None:
    resources = dataclasses.replace(RESOURCES, **changes)  # type: ignore[arg-type]
    assert str(refused(resources)).startswith(f"m/{place}")
