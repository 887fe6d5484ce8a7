from __future__ import annotations

import argparse
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer import options
from ninfer.contract.errors import OptionError
from ninfer.option_values import (
    parse_bool,
    parse_bytes,
    parse_keys,
    parse_media_hosts,
    parse_name,
    parse_names,
    parse_output_name,
)
from ninfer.options import (
    EngineOptions,
    OptionSpec,
    ServeOptions,
    add_options,
    environment_name_of,
    flag_of,
    read_options,
    specs_of,
)

CLASSES = [
    cls for name, cls in inspect.getmembers(options, inspect.isclass) if name.endswith("Options")
]
FIELDS = [(cls, name, spec) for cls in CLASSES for name, spec in specs_of(cls).items()]
IDS = [f"{cls.__name__}.{name}" for cls, name, _ in FIELDS]


def parse(cls: type[Any], argv: list[str], environ: dict[str, str]) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, cls)
    return read_options(cls, parser.parse_args(argv), environ)


def good_text(spec: OptionSpec) -> str:
    if spec.choices is not None:
        return spec.choices[-1]
    for text in ("1", "2", "0.5", "2MiB", "*"):
        try:
            spec.parse(text)
        except ValueError:
            continue
        return text
    raise AssertionError("no text parses")


def test_all_options_classes_are_walked() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert names >= {
        "ChatOptions", "ConvertOptions", "EngineOptions", "InfoOptions",
        "RunOptions", "SamplingOptions", "ScoreOptions", "ServeOptions",
    }  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_defaults_come_from_an_empty_command_line(cls: type[Any]) -> None:
    assert cls.__doc__
    assert parse(cls, [], {}) == cls()


@pytest.mark.parametrize(("cls", "name", "spec"), FIELDS, ids=IDS)
def test_each_option_has_help_flag_and_variable(
    cls: type[Any], name: str, spec: OptionSpec
) -> None:
    assert spec.help
    text = good_text(spec)
    expected = spec.parse(text)
    argv = [flag_of(name)] if spec.is_switch else [flag_of(name), text]
    assert getattr(parse(cls, argv, {}), name) == expected
    assert getattr(parse(cls, [], {environment_name_of(name): text}), name) == expected


@pytest.mark.parametrize(("cls", "name", "spec"), FIELDS, ids=IDS)
def test_an_empty_variable_counts_as_unset(cls: type[Any], name: str, spec: OptionSpec) -> None:
    assert parse(cls, [], {environment_name_of(name): ""}) == cls()


@pytest.mark.parametrize(("cls", "name", "spec"), FIELDS, ids=IDS)
def test_an_empty_flag_is_an_error_or_a_text(cls: type[Any], name: str, spec: OptionSpec) -> None:
    if spec.is_switch:
        return
    if name in ("prompt", "system"):
        assert getattr(parse(cls, [flag_of(name), ""], {}), name) == ""
    elif name != "arch":
        with pytest.raises(OptionError, match=flag_of(name)):
            parse(cls, [flag_of(name), ""], {})


@pytest.mark.parametrize("name", ["logits", "record", "out"])
def test_a_dash_is_no_output_file(name: str) -> None:
    for cls, field_name, _ in FIELDS:
        if field_name == name:
            with pytest.raises(OptionError, match=f"{flag_of(name)}: - does not mean stdout"):
                parse(cls, [flag_of(name), "-"], {})


@pytest.mark.parametrize(("cls", "name", "spec"), FIELDS, ids=IDS)
def test_bad_values_are_refused_with_their_source(
    cls: type[Any], name: str, spec: OptionSpec
) -> None:
    if spec.parse in (str, parse_name, parse_output_name) and spec.choices is None:
        assert getattr(parse(cls, [], {environment_name_of(name): "?!"}), name) == "?!"
        return
    if spec.parse in (parse_names, parse_keys):
        assert getattr(parse(cls, [], {environment_name_of(name): "?!"}), name) == ("?!",)
        return
    with pytest.raises(OptionError, match=environment_name_of(name)):
        parse(cls, [], {environment_name_of(name): "?!"})
    if not spec.is_switch:
        with pytest.raises(OptionError, match=flag_of(name)):
            parse(cls, [flag_of(name), "?!"], {})


def test_switches_have_an_off_flag_that_wins_over_the_environment() -> None:
    environ = {"NINFER_STRICT_MODEL": "1"}
    assert parse(ServeOptions, [], environ).strict_model is True
    assert parse(ServeOptions, ["--no-strict-model"], environ).strict_model is False


def test_a_commands_own_default_yields_to_variable_and_flag() -> None:
    defaults = {"max_concurrency": 1}
    parser = argparse.ArgumentParser()
    add_options(parser, EngineOptions, defaults)
    assert "default 1]" in parser.format_help()

    def lanes(argv: list[str], environ: dict[str, str]) -> int:
        arguments = parser.parse_args(argv)
        return read_options(EngineOptions, arguments, environ, defaults).max_concurrency

    assert lanes([], {}) == 1
    assert lanes([], {"NINFER_MAX_CONCURRENCY": "2"}) == 2
    assert lanes(["--max-concurrency", "3"], {"NINFER_MAX_CONCURRENCY": "2"}) == 3


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(["", "k", "m", "g", "t"]))
def test_sizes_are_binary_however_they_are_spelled(number: int, unit: str) -> None:
    expected = number * 1024 ** ["", "k", "m", "g", "t"].index(unit)
    for suffix in {unit, unit.upper(), f"{unit}b", f"{unit.upper()}iB" if unit else "B"}:
        assert parse_bytes(f"{number}{suffix}") == expected


@given(st.text(max_size=12))
def test_parsers_give_a_value_or_a_readable_value_error(text: str) -> None:
    for parser in {spec.parse for _, _, spec in FIELDS}:
        message = "fine"
        try:
            parser(text)
        except ValueError as error:
            message = str(error)
        assert message


@pytest.mark.parametrize(("text", "value"), [("YES", True), ("off", False), (" No ", False)])
def test_switch_words(text: str, value: bool) -> None:
    assert parse_bool(text) is value


def test_an_empty_host_does_not_open_every_interface() -> None:
    with pytest.raises(OptionError, match="NINFER_HOST: an address is needed"):
        read_options(ServeOptions, argparse.Namespace(), {"NINFER_HOST": "  "})
    with pytest.raises(OptionError, match="--host: an address is needed"):
        parse(ServeOptions, ["--host", ""], {})
    assert parse(ServeOptions, [], {"NINFER_HOST": ""}).host == "127.0.0.1"


def test_lists_take_commas_and_repeated_flags() -> None:
    argv = ["--api-key", "a,b", "--api-key", "c"]
    environ = {"NINFER_API_KEY": "d, e", "NINFER_CORS_ORIGINS": "https://A.example/,*"}
    assert parse(ServeOptions, argv, environ).api_key == ("a", "b", "c")
    assert parse(ServeOptions, [], environ).api_key == ("d", "e")
    assert parse(ServeOptions, [], environ).cors_origins == ("https://a.example", "*")


@pytest.mark.parametrize("text", ["", "a,", "secret key", "k\u00e9y", "x" * 1025])
def test_a_bad_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(OptionError, match="--api-key") as caught:
        parse(ServeOptions, ["--api-key", text], {})
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("text", ["example.org", "https://a/b", "https://", "https://u@a", "a b"])
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--cors-origins"):
        parse(ServeOptions, ["--cors-origins", text], {})


def test_keys_are_not_shown() -> None:
    assert "hidden" not in repr(ServeOptions(api_key=("hidden",)))


@pytest.mark.parametrize("text", ["a b", "http://a.org", "a.org/", "a.org:", "a.org:0", "..a", "*"])
def test_what_is_no_media_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither HOST"):
        parse_media_hosts(text)


def test_media_hosts_are_names_suffixes_and_ports() -> None:
    hosts = ("a.org", ".b.org", "c.org:8443", ".d.org:8080", "127.0.0.1")
    assert parse_media_hosts(",".join(hosts)) == hosts


def test_other_flags_mean_the_same() -> None:
    argv = ["--max-running", "3", "--max-waiting", "5"]
    options = parse(EngineOptions, argv, {})
    assert (options.max_concurrency, options.max_pending) == (3, 5)
