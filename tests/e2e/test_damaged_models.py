"""Damaged and odd model directories: one error that names file and field, or a load that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ninfer.cli.exit_codes import ExitCode
from ninfer.contract.errors import ModelFileError
from ninfer.convert.source import open_model
from ninfer.convert.writer import write_artifact
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import EngineOptions, SamplingOptions
from ninfer.program.loader import load_program
from tests.helpers.checkpoints import (
    edit_json,
    read_raw,
    read_tensors,
    write_json,
    write_safetensors,
    write_shards,
)
from tests.helpers.command import ninfer
from tests.helpers.demo_frontend import chat, turn
from tests.helpers.model_paths import DEMO_MODEL, REPOSITORY, golden_model

Damage: TypeAlias = Callable[[Path], None]
DENSE, MOE, VISION, DEMO = "qwen3-dense", "qwen3-moe", "qwen3_5-vl", "demo"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e\n"


def void(_: object) -> None:
    """For lambdas that have no result."""


def replaced(name: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: void((folder / name).write_bytes(data))


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def linked(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def is_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def cut(name: str, num_bytes: int) -> Damage:
    return lambda folder: void(
        (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])
    )


def edited(name: str, **changes: Any) -> Damage:
    return lambda folder: edit_json(folder / name, **changes)


def header(**changes: Any) -> Damage:
    """Add or replace entries of the weights' header."""

    def damage(folder: Path) -> None:
        entries, data = read_raw(folder / WEIGHTS)
        text = json.dumps({**entries, **changes}).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)

    return damage


def entry(dtype: str = "F32", shape: tuple[int, ...] = (1,), stop: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]}


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes | None = None) -> Damage:
    def damage(folder: Path) -> None:
        tensors = read_tensors(folder / WEIGHTS)
        old = tensors[name]
        tensors[name] = type(old)(dtype, shape, old.data if data is None else data)
        write_safetensors(folder / WEIGHTS, tensors)

    return damage


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(document)
        write_json(folder / "tokenizer.json", document)

    return damage


def too_long(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 2**27 + 1)


def no_text_config(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    del document["text_config"]
    write_json(folder / "config.json", document)


def template_in_json(folder: Path) -> None:
    (folder / TEMPLATE).unlink()
    edit_json(folder / "tokenizer_config.json", chat_template="{% if")


def in_one_shard(folder: Path) -> None:
    write_shards(folder, read_tensors(folder / WEIGHTS), 1)
    (folder / WEIGHTS).unlink()


def split_pattern(expression: str) -> dict[str, Any]:
    pattern = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return {"pre_tokenizer": {**pattern, "invert": False}}


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROW = (
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
CALL = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
TEMPLATE, CONFIG = "chat_template.jinja", "config.json"
TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"

BROKEN: dict[str, tuple[str, Damage, str, str | None]] = {
    # name: (model, damage, file, field)
    "shard missing": (MOE, removed(SECOND), INDEX, "weight_map.model.embed_tokens.weight"),
    "shard a folder": (MOE, is_folder(SECOND), SECOND, None),
    "shard cut": (MOE, cut(FIRST, 500), FIRST, "header"),
    "shard twice": (
        MOE,
        lambda f: void(shutil.copy(f / FIRST, f / SECOND)),
        SECOND,
        "lm_head.weight",
    ),
    "index a folder": (MOE, is_folder(INDEX), INDEX, None),
    "index a dead link": (MOE, linked(INDEX, "nowhere"), INDEX, None),
    "index of nothing": (
        MOE,
        edited(INDEX, weight_map={"a": "b.safetensors"}),
        INDEX,
        "weight_map.a",
    ),
    "index escapes": (MOE, edited(INDEX, weight_map={"a": "../b"}), INDEX, "weight_map.a"),
    "index of numbers": (MOE, edited(INDEX, weight_map={"a": 3}), INDEX, "weight_map.a"),
    "index of escapes": (
        MOE,
        edited(INDEX, weight_map={ESCAPES: ESCAPES}),
        INDEX,
        f"weight_map.{ESCAPES}",
    ),
    "weights empty": (DENSE, replaced(WEIGHTS, b""), WEIGHTS, None),
    "weights a dead link": (DENSE, linked(WEIGHTS, "nowhere"), WEIGHTS, None),
    "weights endless": (DENSE, linked(WEIGHTS, "/dev/zero"), WEIGHTS, None),
    "weights cut": (DENSE, cut(WEIGHTS, 500_000), WEIGHTS, "model.norm.weight"),
    "header too long": (DENSE, replaced(WEIGHTS, b"\xff" * 8 + b"{}"), WEIGHTS, "header"),
    "header nested": (
        DENSE,
        replaced(WEIGHTS, (60_000).to_bytes(8, "little") + b'{"a":' * 12_000),
        WEIGHTS,
        "header",
    ),
    "header of escapes": (DENSE, header(**{ESCAPES: entry(ESCAPES)}), WEIGHTS, f"{ESCAPES}.dtype"),
    "header flooded": (DENSE, header(**{"x" * 10**6: entry("Z")}), WEIGHTS, "x" * 10**6 + ".dtype"),
    "shape negative": (DENSE, header(x=entry(shape=(-1,))), WEIGHTS, "x.shape"),
    "shape absurd": (DENSE, header(x=entry(shape=(2**62, 2**62))), WEIGHTS, "x.shape"),
    "shape other": (
        DENSE,
        tensor("model.norm.weight", "BF16", (1, 96)),
        WEIGHTS,
        "model.norm.weight",
    ),
    "dtype integer": (
        DENSE,
        tensor("model.norm.weight", "I16", (96,)),
        WEIGHTS,
        "model.norm.weight",
    ),
    "weight not finite": (
        DENSE,
        tensor("model.norm.weight", "BF16", (96,), b"\xc0\x7f" * 96),
        WEIGHTS,
        "model.norm.weight",
    ),
    "config a folder": (DENSE, is_folder(CONFIG), CONFIG, None),
    "config a loop": (DENSE, linked(CONFIG, CONFIG), CONFIG, None),
    "config too long": (DENSE, too_long(CONFIG), CONFIG, None),
    "config nested": (DENSE, replaced(CONFIG, '{"a":' * 100_000), CONFIG, None),
    "config no UTF-8": (DENSE, replaced(CONFIG, b'{"a": "\xff"}'), CONFIG, None),
    "config not finite": (DENSE, replaced(CONFIG, '{"rms_norm_eps": NaN}'), CONFIG, None),
    "no text_config": (VISION, no_text_config, CONFIG, "text_config"),
    "text_config null": (VISION, edited(CONFIG, text_config=None), CONFIG, "text_config"),
    "text_config a list": (VISION, edited(CONFIG, text_config=[]), CONFIG, "text_config"),
    "architecture escapes": (
        DENSE,
        edited(CONFIG, architectures=[ESCAPES]),
        CONFIG,
        "architectures",
    ),
    "tokenizer a dead link": (DEMO, linked(TOKENIZER, "nowhere"), TOKENIZER, None),
    "tokenizer too long": (DEMO, too_long(TOKENIZER), TOKENIZER, None),
    "tokenizer cut": (DEMO, cut(TOKENIZER, 100_000), TOKENIZER, None),
    "tokenizer of other kind": (
        DEMO,
        tokenizer(lambda d: d["model"].update(type="WordLevel", unk_token="a")),
        TOKENIZER,
        "model.type",
    ),
    "tokenizer with prefixes": (
        DEMO,
        tokenizer(lambda d: d["model"].update(continuing_subword_prefix="##")),
        TOKENIZER,
        "model.continuing_subword_prefix",
    ),
    "tokenizer without letters": (
        DEMO,
        tokenizer(lambda d: d["model"].update(vocab={"a": 0, "b": 1}, merges=[])),
        TOKENIZER,
        "model.vocab",
    ),
    "tokenizer expression": (
        DEMO,
        tokenizer(lambda d: d.update(split_pattern("((("))),
        TOKENIZER,
        None,
    ),
    "tokenizer too large": (
        DEMO,
        tokenizer(lambda d: d["model"]["vocab"].update({ESCAPES: 99_999})),
        TOKENIZER,
        "model.vocab",
    ),
    "template loops": (DEMO, replaced(TEMPLATE, LOOP), TEMPLATE, None),
    "template grows": (DEMO, replaced(TEMPLATE, GROW), TEMPLATE, None),
    "template recurs": (DEMO, replaced(TEMPLATE, CALL), TEMPLATE, None),
    "template too long": (DEMO, replaced(TEMPLATE, "x" * 10**7), TEMPLATE, None),
    "template nested": (
        DEMO,
        replaced(TEMPLATE, "{% if 1 %}" * 2000 + "{% endif %}" * 2000),
        TEMPLATE,
        None,
    ),
    "template blocks": (
        DEMO,
        replaced(TEMPLATE, "{% for a in [1] %}" * 60 + "{% endfor %}" * 60),
        TEMPLATE,
        None,
    ),
    "template includes": (
        DEMO,
        replaced(TEMPLATE, "\n{% include '/etc/passwd' %}"),
        TEMPLATE,
        "line 2",
    ),
    "template of plain text": (DEMO, replaced(TEMPLATE, "hello"), TEMPLATE, None),
    "template of nothing": (DEMO, replaced(TEMPLATE, ""), TEMPLATE, None),
    "template of escapes": (DEMO, replaced(TEMPLATE, "{% " + ESCAPES + " %}"), TEMPLATE, "line 1"),
    "template in JSON": (
        DEMO,
        template_in_json,
        "tokenizer_config.json",
        "chat_template line 1",
    ),
    "token constant": (
        DEMO,
        edited("tokenizer_config.json", cls_token=[1]),
        "tokenizer_config.json",
        "cls_token",
    ),
    "temperature": (DEMO, edited(GENERATION, temperature=-1), GENERATION, "temperature"),
    "top_k": (DEMO, edited(GENERATION, top_k=1e30), GENERATION, "top_k"),
    "presence_penalty": (
        DEMO,
        edited(GENERATION, presence_penalty=5),
        GENERATION,
        "presence_penalty",
    ),
    "eos outside": (DEMO, edited(GENERATION, eos_token_id=99_999), GENERATION, "eos_token_id"),
    "eos nested": (DEMO, edited(GENERATION, eos_token_id=[[1]]), GENERATION, "eos_token_id"),
}


def copied(model: str, folder: Path) -> Path:
    source = DEMO_MODEL if model == DEMO else golden_model(model)
    return Path(shutil.copytree(source, folder))


def load(path: Path) -> ModelFrontend:
    """The way of every command, up to weights in memory."""
    source = open_model(path)
    frontend = ModelFrontend(source.config, source.resources, SamplingOptions())
    program, _ = load_program(source, EngineOptions(executor="cpu"), lambda *_: None)
    program.close()
    return frontend


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_named_by_file_and_field(tmp_path: Path, name: str) -> None:
    model, damage, file, field = BROKEN[name]
    folder = copied(model, tmp_path / "m")
    damage(folder)
    with pytest.raises(ModelFileError) as caught:
        load(folder)
    assert (caught.value.path, caught.value.field) == (folder / file, field)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200


SIZES = ("hidden_size", "num_attention_heads", "vocab_size", "head_dim", "num_hidden_layers")
LIMITS = ("max_position_embeddings", "intermediate_size", "eos_token_id", "num_key_value_heads")
OTHERS = ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "architectures")


@pytest.mark.parametrize("value", [-1, 1e30, "x", [[]], {}, 2**63], ids=str)
@pytest.mark.parametrize("key", [*SIZES, *LIMITS, *OTHERS])
def test_absurd_values_of_the_configuration_are_named(
    tmp_path: Path, key: str, value: object
) -> None:
    folder = copied(DENSE, tmp_path / "m")
    edit_json(folder / CONFIG, **{key: value})
    with pytest.raises(ModelFileError) as caught:
        load(folder)
    assert (caught.value.path, caught.value.field) == (folder / CONFIG, key)


ODD: dict[str, tuple[str, Damage]] = {
    "no resources": (DENSE, removed(GENERATION)),
    "no template": (DEMO, removed(TEMPLATE)),
    "no tokenizer": (DEMO, removed(TOKENIZER)),
    "no tokenizer_config": (DEMO, removed("tokenizer_config.json")),
    "escapes nobody reads": (DEMO, edited("tokenizer_config.json", comment=ESCAPES)),
    "no end tokens": (DEMO, edited(GENERATION, eos_token_id=[])),
    "many end tokens": (DEMO, edited(GENERATION, eos_token_id=[7] * 300_000)),
    "surrogates": (DEMO, replaced(TEMPLATE, "{{ messages[0].content }}{{ '\\ud800' }}")),
    "one shard": (DENSE, in_one_shard),
    "dropout": (DEMO, tokenizer(lambda d: d["model"].update(dropout=0.5))),
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_odd_but_whole_loads(tmp_path: Path, name: str) -> None:
    model, damage = ODD[name]
    folder = copied(model, tmp_path / "m")
    damage(folder)
    frontend = load(folder)
    if frontend.has_chat_template and frontend.has_tokenizer:
        assert (await frontend.prepare_chat(chat(turn("user", "Hi")))).num_tokens > 0


def test_names_of_directories_and_artifacts_can_be_shown(tmp_path: Path) -> None:
    folder = copied(DENSE, tmp_path / "a\x1b[2Jb")
    assert open_model(folder).name == r"a\x1b[2Jb"
    write_artifact(open_model(folder), tmp_path / "x.ninfer")
    assert open_model(tmp_path / "x.ninfer").name == r"a\x1b[2Jb"


def test_a_directory_that_may_not_be_searched_is_named(tmp_path: Path) -> None:
    folder = copied(DENSE, tmp_path / "m")
    folder.chmod(0)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ninfer.contract.errors import ModelFileError\n"
        "from ninfer.convert.source import open_model\n"
        "if os.geteuid() == 0:\n"
        "    os.seteuid(65534)\n"
        "try:\n"
        "    open_model(Path(sys.argv[1]))\n"
        "except ModelFileError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder.chmod(0o755)
    assert result.stdout.startswith(f"{folder}")
    assert "Permission denied" in result.stdout


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_proj.weight", "model.norm.weight"])
def test_weights_that_overflow_end_a_command_with_what_happened(tmp_path: Path, name: str) -> None:
    folder = copied("qwen3_5-dense", tmp_path / "m")
    old = read_tensors(folder / WEIGHTS)[name]
    largest = b"\x7f\x7f" * (len(old.data) // 2)
    tensor(name, "BF16", old.shape, largest)(folder)
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    arguments = ("--ids", str(tmp_path / "ids.json"), "--executor", "cpu")
    result = ninfer("score", str(folder), *arguments)
    assert result.returncode == ExitCode.MODEL_FILE
    assert "NaN or infinite after token 0: its weights overflow" in result.stderr
