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
from ninfer.contract.errors import InvariantError
from ninfer.options import (
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
    read_options,
)

T = TypeVar("T")

MODEL_VARIABLE: Final = environment_name_of("model")
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


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed command line with its environment."""

    command: Command
    arguments: argparse.Namespace
    environ: Mapping[str, str]

    def read(self, cls: type[T]) -> T:
        """The options of one class. Raises OptionError."""
        if cls not in self.command.options:
            raise InvariantError(f"{self.command.name} has no {cls.__name__}")
        names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        defaults = {k: v for k, v in self.command.defaults.items() if k in names}
        return read_options(cls, self.arguments, self.environ, defaults)

    @property
    def model_path(self) -> Path | None:
        """The model that was named, None for the embedded one."""
        if self.command.action is not None:
            return None
        named = self.arguments.model or self.environ.get(MODEL_VARIABLE)
        return Path(named) if named else None


def parse_invocation(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Raises UsageError; --help and --version print and raise SystemExit(0)."""
    by_name = {command.name: command for command in COMMANDS}
    if argv and argv[0] in by_name:
        command = by_name[argv[0]]
        return Invocation(command, _command_parser(command).parse_args(argv[1:]), environ)
    return Invocation(by_name["chat"], _root_parser(by_name["chat"]).parse_args(argv), environ)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def _command_parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"ninfer {command.name}",
        description=f"{command.name}: {command.summary}.",
        usage=f"{command.usage} [options]",
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
            "The options below are those of chat. An option is taken from the command line,\n"
            "else from the environment variable named behind it, else it has its default."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ninfer {__version__}")
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
        "model",
        metavar="MODEL",
        nargs="?",
        help="model directory (Hugging Face layout) or .ninfer file"
        f" [{MODEL_VARIABLE}, default the embedded demo model]",
    )
