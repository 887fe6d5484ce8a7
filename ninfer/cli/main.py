"""The top of the program: parse, hand over to a command, turn whatever happens into an exit code.

Commands are imported when they are chosen, so that `--help` stays quick and chat loads no server.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from ninfer.cli.console import Console, ReaderGone, silence
from ninfer.cli.early_interrupt import EarlyInterrupt
from ninfer.cli.exit_codes import ExitCode, exit_code_of
from ninfer.cli.parser import Invocation, TextRequested, parse_invocation, read_log_level
from ninfer.cli.termination import Termination
from ninfer.contract.errors import NInferError, OptionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    `argv` None is the process's own; then an interrupt ends it here, because Python's end would
    wait for threads that are at work, such as the tokenising of a long text.
    """
    arguments = sys.argv[1:] if argv is None else argv
    _prepare_streams()
    console = Console.of_process(sys.stdin, sys.stdout, sys.stderr, os.environ)
    termination = Termination()
    code = _run(arguments, console, termination)
    _flush_stderr()
    termination.restore()
    if termination.was_asked:
        termination.die()
    if code == ExitCode.INTERRUPTED and argv is None:
        os._exit(code)
    return code


def _run(arguments: Sequence[str], console: Console, termination: Termination) -> int:
    """Parse and carry out; whatever goes wrong gets a line and a code."""
    invocation: Invocation | None = None
    try:
        invocation = _parse(arguments, console)
        if invocation is None:
            return ExitCode.OK
        _prepare_logging(read_log_level(invocation, os.environ))
        command = _command_of(invocation)
        if not (invocation.command.name == "chat" and console.is_interactive):
            termination.interrupts()
        return command(invocation, console)
    except ReaderGone:
        # Whoever read the output has what it wanted; there is nobody left to tell.
        return ExitCode.OK
    except KeyboardInterrupt as interrupt:
        return exit_code_of(interrupt)
    except Exception as error:  # noqa: BLE001 - the program's top: each failure gets a line and code
        if _wants_traceback(invocation, os.environ):
            console.report("".join(traceback.format_exception(error)).rstrip("\n"))
        console.error(_line_of(error))
        return exit_code_of(error)


def _parse(arguments: Sequence[str], console: Console) -> Invocation | None:
    """None when the command line only asked for a text."""
    try:
        return parse_invocation(arguments, os.environ)
    except TextRequested as request:
        console.write(request.text)
        return None


def _command_of(invocation: Invocation) -> Callable[[Invocation, Console], int]:
    """The command's own function."""
    with EarlyInterrupt():
        module = import_module(f"ninfer.cli.{invocation.command.name}")
    command: Callable[[Invocation, Console], int] = module.run
    return command


def _prepare_streams() -> None:
    """A closed stdin is empty, a closed stdout cannot be written and a closed stderr leads nowhere;
    broken bytes on stdin and unprintable characters on stdout become replacements."""
    # A write to a descriptor that is open for reading fails as one to a closed descriptor does.
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for name, mode in modes.items():
        if getattr(sys, name) is None:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            # In this order each takes its own descriptor, so that no file of ours gets it later.
            descriptor = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _flush_stderr() -> None:
    """What cannot be written is given up here; Python would turn it into an exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def _prepare_logging(level: str | None) -> None:
    """Outside of `serve`, what users must know is an error line; the log is for debugging."""
    if level == "debug":
        logging.basicConfig(stream=sys.stderr, level=logging.DEBUG)
    else:
        logging.getLogger("ninfer").addHandler(logging.NullHandler())


def _wants_traceback(invocation: Invocation | None, environ: Mapping[str, str]) -> bool:
    try:
        return read_log_level(invocation, environ) == "debug"
    except OptionError:
        return False


def _line_of(error: Exception) -> str:
    if isinstance(error, NInferError):
        return " ".join(str(error).split("\n"))
    kind = type(error).__name__
    return f"internal error: {kind}: {error} (NINFER_LOG_LEVEL=debug shows where)".replace(
        "\n", " "
    )
