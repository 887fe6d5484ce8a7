from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.cli.exit_codes import UsageError
from ninfer.cli.parser import COMMANDS, parse_invocation
from ninfer.contract.errors import InvariantError, OptionError
from ninfer.options import (
    ChatOptions,
    EngineOptions,
    RunOptions,
    SamplingOptions,
    ServeOptions,
    environment_name_of,
    flag_of,
    specs_of,
)


@pytest.mark.parametrize(
    ("argv", "command", "model"),
    [
        ([], "chat", None),
        (["models/qwen"], "chat", "models/qwen"),
        (["chat", "models/qwen"], "chat", "models/qwen"),
        (["--temperature", "0", "models/qwen"], "chat", "models/qwen"),
        (["serve"], "serve", None),
        (["serve", "serve"], "serve", "serve"),
        (["./serve"], "chat", "serve"),
        (["info", "x.ninfer", "--json"], "info", "x.ninfer"),
    ],
)
def test_what_is_no_command_is_a_model_to_chat_with(
    argv: list[str], command: str, model: str | None
) -> None:
    invocation = parse_invocation(argv, {})
    assert invocation.command.name == command
    assert invocation.model_path == (Path(model) if model else None)


def test_model_comes_from_the_environment_unless_it_is_named() -> None:
    environ = {"NINFER_MODEL": "a"}
    assert parse_invocation([], environ).model_path == Path("a")
    assert parse_invocation(["b"], environ).model_path == Path("b")


def test_flag_wins_over_environment_wins_over_default() -> None:
    environ = {"NINFER_PORT": "1", "NINFER_TOP_K": "3"}
    invocation = parse_invocation(["serve", "--port", "2"], environ)
    assert invocation.read(ServeOptions).port == 2
    assert invocation.read(ServeOptions).host == "127.0.0.1"
    assert invocation.read(SamplingOptions).top_k == 3


def test_one_conversation_needs_one_lane_and_a_server_more() -> None:
    assert parse_invocation(["run"], {}).read(EngineOptions).max_concurrency == 1
    assert parse_invocation(["serve"], {}).read(EngineOptions).max_concurrency == 8
    environ = {"NINFER_MAX_CONCURRENCY": "3"}
    assert parse_invocation(["run"], environ).read(EngineOptions).max_concurrency == 3


@pytest.mark.parametrize(
    ("argv", "environ", "think"),
    [
        ([], {}, None),
        (["--think"], {"NINFER_THINK": "0"}, True),
        (["--no-think"], {}, False),
        ([], {"NINFER_THINK": "on"}, True),
    ],
)
def test_thinking_is_on_off_or_the_templates(
    argv: list[str], environ: dict[str, str], think: bool | None
) -> None:
    assert parse_invocation(argv, environ).read(ChatOptions).think is think


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--foo"], "--foo"),
        (["serve", "--port"], "--port"),
        (["a", "b"], "b"),
        (["serve", "--por", "1"], "--por"),
        (["convert", "--port", "1"], "--port"),
    ],
)
def test_a_senseless_command_line_is_one_error_that_names_the_word(
    argv: list[str], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        parse_invocation(argv, {})


def test_a_command_gives_no_options_it_does_not_have() -> None:
    with pytest.raises(InvariantError):
        parse_invocation(["convert"], {}).read(RunOptions)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_lists_each_option_with_its_variable(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command in COMMANDS
    item = next(entry for entry in COMMANDS if entry is command)
    with pytest.raises(SystemExit) as exit_info:
        parse_invocation([item.name, "--help"], {})
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for cls in item.options:
        for name in specs_of(cls):
            assert flag_of(name) in text
            assert environment_name_of(name) in text
    assert ("NINFER_MODEL" in text) is (item.action is None)


def test_root_help_lists_commands_and_the_options_of_chat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_invocation(["--help"], {})
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name}" in text
        assert command.summary in text
    assert "--think" in text
    assert "--memory-budget" in text


def test_bad_values_name_flag_or_variable() -> None:
    with pytest.raises(OptionError, match="--temperature: 9 is out of range"):
        parse_invocation(["--temperature", "9"], {}).read(SamplingOptions)
    with pytest.raises(OptionError, match="NINFER_TEMPERATURE: 'x' is not a number"):
        parse_invocation([], {"NINFER_TEMPERATURE": "x"}).read(SamplingOptions)
