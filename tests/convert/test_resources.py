from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import FrontendResources
from ninfer.convert.resources import parse_resources
from ninfer.convert.source import open_model
from tests.helpers.model_paths import DEMO_MODEL, copy_golden

FOLDER = Path("m")
NAMED = [
    {"name": "tool_use", "template": "with tools"},
    {"name": "default", "template": "plain"},
]


def parsed(**files: Any) -> FrontendResources:
    """Keys are file names with `_json` or `_jinja` at the end; values JSON documents or bytes."""
    named = {}
    for key, value in files.items():
        stem, _, suffix = key.rpartition("_")
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        named[f"{stem}.{suffix}"] = data
    return parse_resources(named, FOLDER)


def refused(name: str, field: str | None, **files: Any) -> str:
    with pytest.raises(ModelFileError) as caught:
        parsed(**files)
    assert (caught.value.path, caught.value.field) == (FOLDER / name, field)
    return str(caught.value)


def test_the_demo_model_has_all_resources() -> None:
    resources = open_model(DEMO_MODEL).resources
    assert resources.tokenizer_json == (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert resources.chat_template == (DEMO_MODEL / "chat_template.jinja").read_text("utf-8")
    assert resources.generation_config["eos_token_id"] == [4085, 4083]
    assert resources.tokenizer_config["eos_token"] == "<|im_end|>"


def test_a_model_without_any_resource_opens(tmp_path: Path) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    (folder / "generation_config.json").unlink()
    assert open_model(folder).resources == FrontendResources(folder=folder)


def test_templates_are_taken_from_the_most_specific_file() -> None:
    config = {"chat_template": "from config"}
    document = {"chat_template": "from json"}
    assert parsed(tokenizer_config_json=config).chat_template == "from config"
    assert parsed(tokenizer_config_json=config).template_file == "tokenizer_config.json"
    both = {"tokenizer_config_json": config, "chat_template_json": document}
    assert parsed(**both).chat_template == "from json"
    assert parsed(**both).template_file == "chat_template.json"
    assert (
        parsed(**both, chat_template_jinja=b"from jinja \xc3\xbc").chat_template == "from jinja ü"
    )
    assert parsed(tokenizer_config_json={}).chat_template is None
    assert parsed(tokenizer_config_json={"chat_template": None}).chat_template is None


def test_the_default_of_named_templates_is_taken() -> None:
    assert parsed(tokenizer_config_json={"chat_template": NAMED}).chat_template == "plain"
    assert parsed(chat_template_json={"chat_template": NAMED}).chat_template == "plain"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (3, "chat_template"),
        ({"a": 1}, "chat_template"),
        ([], "chat_template"),
        (NAMED[:1], "chat_template"),
        (["x"], "chat_template[0]"),
        ([{"name": "default"}], "chat_template[0].template"),
        ([{"name": 1, "template": "x"}], "chat_template[0].name"),
    ],
)
def test_bad_templates_are_refused(value: Any, field: str) -> None:
    refused("tokenizer_config.json", field, tokenizer_config_json={"chat_template": value})
    refused("chat_template.json", field, chat_template_json={"chat_template": value})


def test_a_template_that_is_no_text_is_refused() -> None:
    assert "not UTF-8" in refused("chat_template.jinja", None, chat_template_jinja=b"\xff")


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.json",
        "preprocessor_config.json",
    ],
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null"])
def test_malformed_json_names_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    folder = copy_golden("qwen3-dense", tmp_path / "m")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        open_model(folder)
    assert caught.value.path == folder / name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token", 3),
        ("eos_token", {"content": 3}),
        ("pad_token", ["x"]),
        ("add_bos_token", "yes"),
        ("model_max_length", "long"),
        ("chat_template", 3),
    ],
)
def test_wrong_types_of_a_tokenizer_configuration_are_named(key: str, value: Any) -> None:
    field = f"{key}.content" if isinstance(value, dict) else key
    refused(
        "tokenizer_config.json",
        field,
        tokenizer_config_json={key: value},
        chat_template_jinja=b"x",
    )


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (None, "model"),
        ([], "model"),
        ({"type": "WordPiece"}, "model.type"),
        ({"type": 3}, "model.type"),
        ({"type": "BPE", "continuing_subword_prefix": "\x1b"}, "model.continuing_subword_prefix"),
        ({"end_of_word_suffix": "</w>"}, "model.end_of_word_suffix"),
    ],
)
def test_tokenizers_the_library_must_not_read_are_refused(model: Any, field: str) -> None:
    refused("tokenizer.json", field, tokenizer_json={"model": model})


def test_usual_spellings_of_a_tokenizer_model_are_read() -> None:
    models: list[dict[str, Any]] = [{}, {"type": "BPE", "continuing_subword_prefix": None}]
    for model in [*models, {"continuing_subword_prefix": "", "end_of_word_suffix": ""}]:
        assert parsed(tokenizer_json={"model": model}).tokenizer_json is not None


def test_usual_spellings_of_a_tokenizer_configuration_are_read() -> None:
    config = {
        "eos_token": {"content": "<e>", "special": True},
        "bos_token": None,
        "model_max_length": 1000000000000000019884624838656,
        "add_bos_token": None,
    }
    assert parsed(tokenizer_config_json=config).tokenizer_config["eos_token"]["content"] == "<e>"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_p", True),
        ("min_p", -1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("do_sample", 1),
        ("eos_token_id", "1"),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", [1, "2"]),
        ("pad_token_id", 1.0),
        ("max_new_tokens", -1),
    ],
)
def test_wrong_values_of_a_generation_configuration_are_named(key: str, value: Any) -> None:
    refused("generation_config.json", key, generation_config_json={key: value})


def test_nulls_of_a_generation_configuration_are_legal() -> None:
    keys = ("temperature", "top_p", "top_k", "do_sample", "eos_token_id", "repetition_penalty")
    config = dict.fromkeys(keys)
    assert parsed(generation_config_json=config).generation_config == config
