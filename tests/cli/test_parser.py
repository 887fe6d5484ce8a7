from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ninfer import __version__
from ninfer.cli.exit_codes import UsageError
from ninfer.cli.parser import (
    COMMANDS,
    Command,
    TextRequested,
    parse_invocation,
    read_log_level,
)
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


def text_of(argv: list[str]) -> str:
    with pytest.raises(TextRequested) as caught:
        parse_invocation(argv, {})
    return caught.value.text


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
def test_help_of_a_command_lists_each_option_with_its_variable(command: Command) -> None:
    text = text_of([command.name, "--help"])
    for cls in command.options:
        for name in specs_of(cls):
            assert flag_of(name) in text
            assert environment_name_of(name) in text
    assert ("NINFER_MODEL" in text) is (command.action is None)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_breaks_no_word_on_any_terminal(
    command: Command, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = set(text_of([command.name, "--help"]).split())
    monkeypatch.setenv("COLUMNS", str(columns))
    text = text_of([command.name, "--help"])
    assert set(text.split()) == wide
    if columns >= 80:
        assert max(map(len, text.splitlines())) <= min(columns, 100)


def test_version_is_a_text_too() -> None:
    assert text_of(["--version"]) == f"ninfer {__version__}\n"


def test_root_help_lists_commands_and_the_options_of_chat() -> None:
    text = text_of(["--help"])
    for command in COMMANDS:
        assert f"  {command.name}" in text
        assert command.summary in text
    assert "--think" in text
    assert "--memory-budget" in text


EXCLUDING_FLAGS = [
    (["run", "--prompt", "a", "--messages", "b"], "--messages: goes without --prompt"),
    (["run", "--raw", "--messages", "b"], "--messages: goes without --raw"),
    (["run", "--raw", "--system", "b"], "--system: goes without --raw"),
    (["run", "--raw", "--no-think"], "--think: goes without --raw"),
    (["score", "--text", "a", "--ids", "b"], "--ids: goes without --text"),
    (["bench", "m", "--synthetic", "qwen3-8b"], "MODEL: goes without --synthetic"),
]


@pytest.mark.parametrize(("argv", "message"), EXCLUDING_FLAGS)
def test_flags_that_exclude_each_other_are_both_named(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_invocation(argv, {})


@pytest.mark.parametrize(
    ("argv", "environ", "dropped"),
    [
        (["run", "--prompt", "a"], {"NINFER_MESSAGES": "b"}, "messages"),
        (["run", "--messages", "a"], {"NINFER_PROMPT": "b"}, "prompt"),
        (["run", "--raw"], {"NINFER_MESSAGES": "b"}, "messages"),
        (["run", "--raw"], {"NINFER_SYSTEM": "b"}, "system"),
        (["run", "--raw"], {"NINFER_THINK": "on"}, "think"),
        (["run", "--system", "a"], {"NINFER_RAW": "1"}, "raw"),
        (["score", "--ids", "a"], {"NINFER_TEXT": "b"}, "text"),
        (["score", "--text", "a"], {"NINFER_IDS": "b"}, "ids"),
        (["bench", "m"], {"NINFER_SYNTHETIC": "qwen3-8b"}, "synthetic"),
        (["run", "--prompt", "a", "--raw"], {"NINFER_MESSAGES": "b"}, "messages"),
    ],
)
def test_a_flag_sets_the_variable_of_its_partner_aside(
    argv: list[str], environ: dict[str, str], dropped: str
) -> None:
    invocation = parse_invocation(argv, environ)
    values = {
        item.name: getattr(options, item.name)
        for options in map(invocation.read, invocation.command.options)
        for item in dataclasses.fields(options)
    }
    assert not values[dropped]


def test_a_synthetic_model_sets_the_model_of_the_environment_aside() -> None:
    invocation = parse_invocation(["bench", "--synthetic", "qwen3-8b"], {"NINFER_MODEL": "m"})
    assert invocation.model_path is None


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["run"], {"NINFER_PROMPT": "a", "NINFER_MESSAGES": "b"}),
        (["run"], {"NINFER_RAW": "1", "NINFER_THINK": "off"}),
        (["score"], {"NINFER_TEXT": "a", "NINFER_IDS": "b"}),
        (["bench"], {"NINFER_SYNTHETIC": "qwen3-8b", "NINFER_MODEL": "b"}),
    ],
)
def test_variables_that_exclude_each_other_are_both_named(
    argv: list[str], environ: dict[str, str]
) -> None:
    first, second = environ
    with pytest.raises(OptionError, match=f"{second}: goes without {first}"):
        parse_invocation(argv, environ)


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["run", "--no-raw", "--system", "a"], {}),
        (["run"], {"NINFER_RAW": "0", "NINFER_MESSAGES": "a"}),
        (["run"], {"NINFER_PROMPT": "a", "NINFER_MESSAGES": ""}),
        (["chat"], {"NINFER_RAW": "1", "NINFER_THINK": "on"}),
        (["score"], {"NINFER_TEXT": "a", "NINFER_PROMPT": "b", "NINFER_MESSAGES": "c"}),
    ],
)
def test_what_is_off_unset_or_of_another_command_excludes_nothing(
    argv: list[str], environ: dict[str, str]
) -> None:
    assert parse_invocation(argv, environ).environ == environ


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ("serve --cache-dir d --host-cache-bytes 0", {}, "--cache-dir: needs --host-cache-bytes"),
        ("run --cache-dir d", {}, "--cache-dir: needs --host-cache-bytes"),
        ("serve --cache-dir d", {"NINFER_HOST_CACHE_BYTES": "0"}, "--cache-dir: needs"),
        (
            "serve",
            {"NINFER_CACHE_DIR": "d", "NINFER_HOST_CACHE_BYTES": "0"},
            "NINFER_CACHE_DIR: needs",
        ),
    ],
)
def test_a_cache_folder_without_host_memory_is_refused(
    argv: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        parse_invocation(argv.split(), environ).read(EngineOptions)


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ("serve --cache-dir d", {}),
        ("serve --cache-dir d --host-cache-bytes 1MiB", {"NINFER_HOST_CACHE_BYTES": "0"}),
        ("run --cache-dir d --host-cache-bytes 1MiB", {}),
        ("run", {"NINFER_CACHE_DIR": "d"}),
        ("serve --host-cache-bytes 0", {"NINFER_CACHE_DIR": "d"}),
    ],
)
def test_a_cache_folder_of_the_environment_is_in_nobodys_way(
    argv: str, environ: dict[str, str]
) -> None:
    assert parse_invocation(argv.split(), environ).read(EngineOptions).cache_dir == "d"


def test_an_empty_model_name_is_an_error_and_an_empty_variable_is_none() -> None:
    for argv in ([""], ["run", ""], ["serve", ""]):
        with pytest.raises(OptionError, match="MODEL: the name is empty"):
            parse_invocation(argv, {"NINFER_MODEL": "a"})
    assert parse_invocation([], {"NINFER_MODEL": ""}).model_path is None


def test_the_log_level_is_checked_for_every_command() -> None:
    invocation = parse_invocation(["info"], {})
    assert read_log_level(invocation, {"NINFER_LOG_LEVEL": "debug"}) == "debug"
    assert read_log_level(invocation, {"NINFER_LOG_LEVEL": ""}) is None
    with pytest.raises(OptionError, match="NINFER_LOG_LEVEL: 'loud' is not one of"):
        read_log_level(invocation, {"NINFER_LOG_LEVEL": "loud"})
    served = parse_invocation(["serve", "--log-level", "error"], {})
    assert read_log_level(served, {"NINFER_LOG_LEVEL": "debug"}) == "error"


def test_bad_values_name_flag_or_variable() -> None:
    with pytest.raises(OptionError, match="--temperature: 9 is out of range"):
        parse_invocation(["--temperature", "9"], {}).read(SamplingOptions)
    with pytest.raises(OptionError, match="NINFER_TEMPERATURE: 'x' is not a number"):
        parse_invocation([], {"NINFER_TEMPERATURE": "x"}).read(SamplingOptions)
