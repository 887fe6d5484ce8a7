"""The commands, their options and their help. Knows nothing of how a command is carried out."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from ninfer import __version__
from ninfer.cli.exit_codes import UsageError
from ninfer.cli.help_format import HelpFormatter
from ninfer.contract.errors import InvariantError, OptionError
from ninfer.options import (
    MODEL,
    NO_DEFAULTS,
    BenchOptions,
    ChatOptions,
    ConvertOptions,
    EngineOptions,
    InfoOptions,
    KernelsOptions,
    RunOptions,
    SamplingOptions,
    ScoreOptions,
    ServeOptions,
    add_options,
    environment_name_of,
    flag_of,
    parse_value,
    read_options,
    settled_environ,
    specs_of,
    variable_of,
)

T = TypeVar("T")

MODEL_VARIABLE: Final = environment_name_of(MODEL)
_LOG_LEVEL: Final = "log_level"
_ONE_LANE: Final = {"max_concurrency": 1}
_ONE_REQUEST: Final = {**_ONE_LANE, "host_cache_bytes": 0}


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `defaults`: its own defaults of options it shares with others.

    action   the word that must follow the command, instead of a model
    """

    name: str
    summary: str
    options: tuple[type[Any], ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NO_DEFAULTS)
    action: str | None = None

    @property
    def usage(self) -> str:
        """What stands in front of the options."""
        return f"ninfer {self.name} {self.action or '[MODEL]'}"


COMMANDS: Final = (
    Command(
        "chat",
        "talk with a model (what happens without a command)",
        (ChatOptions, SamplingOptions, EngineOptions),
        _ONE_LANE,
    ),
    Command(
        "serve",
        "answer HTTP requests (OpenAI chat API and native /generate)",
        (ServeOptions, SamplingOptions, EngineOptions),
    ),
    Command(
        "run",
        "answer one prompt on stdout",
        (RunOptions, ChatOptions, SamplingOptions, EngineOptions),
        _ONE_REQUEST,
    ),
    Command("info", "say what a model is and what it needs", (InfoOptions, EngineOptions)),
    Command(
        "score", "measure a text's likelihood: NLL, perplexity, logits",
        (ScoreOptions, EngineOptions), _ONE_REQUEST,
    ),
    Command("convert", "write a model directory as one .ninfer file", (ConvertOptions,)),
    Command(
        "bench", "measure prompts and decode steps on a GPU",
        (BenchOptions, EngineOptions), {"host_cache_bytes": 0},
    ),
    Command(
        "kernels", "compile the GPU kernels ahead of time", (KernelsOptions,), action="build"
    ),
)  # fmt: skip


class TextRequested(Exception):
    """`text` is what `--help` or `--version` asked for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed command line with what counts of its environment."""

    command: Command
    arguments: argparse.Namespace
    environ: Mapping[str, str]

    def read(self, cls: type[T]) -> T:
        """The options of one class. Raises OptionError."""
        if cls not in self.command.options:
            raise InvariantError(f"{self.command.name} has no {cls.__name__}")
        names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        defaults = {k: v for k, v in self.command.defaults.items() if k in names}
        options = read_options(cls, self.arguments, self.environ, defaults)
        if isinstance(options, EngineOptions):
            self._check_cache_folder(options)
        return options

    def _check_cache_folder(self, options: EngineOptions) -> None:
        """A folder in the environment, meant for a server, stands in the way of no command whose
        host memory is off by a flag or by the command's own default."""
        if options.cache_dir is None or options.host_cache_bytes != 0:
            return
        source = flag_of("cache_dir")
        if self.arguments.cache_dir is None:
            if self.arguments.host_cache_bytes or not variable_of("host_cache_bytes", self.environ):
                return
            source = environment_name_of("cache_dir")
        raise OptionError(source, f"needs {flag_of('host_cache_bytes')} above 0")

    @property
    def model_path(self) -> Path | None:
        """The model that was named, None for the embedded one."""
        if self.command.action is not None:
            return None
        named = self.arguments.model or variable_of(MODEL, self.environ)
        return Path(named) if named else None


def parse_invocation(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Raises UsageError, OptionError (an empty MODEL, what excludes each other), and TextRequested
    for --help and --version."""
    by_name = {command.name: command for command in COMMANDS}
    if argv and argv[0] in by_name:
        command = by_name[argv[0]]
        arguments = _command_parser(command).parse_args(argv[1:])
    else:
        command = by_name["chat"]
        arguments = _root_parser(command).parse_args(argv)
    if getattr(arguments, MODEL, None) == "":
        raise OptionError(
            flag_of(MODEL), "the name is empty; without a name it is the embedded demo model"
        )
    return Invocation(command, arguments, settled_environ(command.options, arguments, environ))


def read_log_level(invocation: Invocation | None, environ: Mapping[str, str]) -> str | None:
    """`debug` or another level; None unless the command line or the environment says one.

    Every command reads the variable, `serve` has the flag too. Raises OptionError.
    """
    spec = specs_of(ServeOptions)[_LOG_LEVEL]
    flag = getattr(invocation.arguments, _LOG_LEVEL, None) if invocation is not None else None
    if flag is not None:
        return str(parse_value(spec, flag_of(_LOG_LEVEL), flag))
    text = variable_of(_LOG_LEVEL, environ)
    return None if text is None else str(parse_value(spec, environment_name_of(_LOG_LEVEL), text))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def print_help(self, file: Any = None) -> None:
        raise TextRequested(self.format_help())


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        raise TextRequested(f"ninfer {__version__}\n")


def _command_parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"ninfer {command.name}",
        description=f"{command.name}: {command.summary}.",
        usage=f"{command.usage} [options]",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_model_and_options(parser, command)
    return parser


def _root_parser(chat: Command) -> argparse.ArgumentParser:
    width = max(len(command.name) for command in COMMANDS)
    listing = "\n".join(f"  {item.name:<{width}}  {item.summary}" for item in COMMANDS)
    parser = _Parser(
        prog="ninfer",
        usage="ninfer [MODEL] [options]\n       ninfer COMMAND [MODEL] [options]",
        description=(
            f"commands (`ninfer COMMAND --help` lists the options of each):\n{listing}\n\n"
            "The options below are those of chat. An option is taken from the command line,"
            " else from the environment variable named behind it, else it has its default."
        ),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    _add_model_and_options(parser, chat)
    return parser


def _add_model_and_options(parser: argparse.ArgumentParser, command: Command) -> None:
    if command.action is not None:
        parser.add_argument("action", choices=(command.action,), help="what to do")
    else:
        _add_model(parser)
    for cls in command.options:
        add_options(parser, cls, command.defaults)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        MODEL,
        metavar="MODEL",
        nargs="?",
        help="model directory (Hugging Face layout) or .ninfer file"
        f" [{MODEL_VARIABLE}, default the embedded demo model]",
    )
