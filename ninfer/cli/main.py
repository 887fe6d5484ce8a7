"""The top of the program: parse, hand over to a command, turn whatever happens into an exit code.

Commands are imported when they are chosen, so that `--help` stays quick and chat loads no server.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from ninfer.cli.console import Console, silence_stdout
from ninfer.cli.exit_codes import ExitCode, exit_code_of
from ninfer.cli.parser import Invocation, parse_invocation
from ninfer.contract.errors import InvariantError, NInferError
from ninfer.options import environment_name_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    _prepare_streams()
    _prepare_logging(os.environ)
    console = Console.of_process(sys.stdin, sys.stdout, sys.stderr, os.environ)
    invocation: Invocation | None = None
    try:
        invocation = parse_invocation(arguments, os.environ)
        code = _dispatch(invocation, console)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has what it wanted; there is nobody left to tell.
        silence_stdout()
        return ExitCode.OK
    except KeyboardInterrupt as interrupt:
        return exit_code_of(interrupt)
    except Exception as error:  # noqa: BLE001 - the program's top: each failure gets a line and code
        if _wants_traceback(invocation, os.environ):
            traceback.print_exception(error, file=console.err)
        console.error(_line_of(error))
        if isinstance(error, OSError):
            # stdout itself may be what failed (a full disk); its flush at exit would fail again.
            silence_stdout()
        return exit_code_of(error)


def _dispatch(invocation: Invocation, console: Console) -> int:
    match invocation.command.name:
        case "chat":
            from ninfer.cli import chat

            return chat.run(invocation, console)
        case "serve":
            from ninfer.cli import serve

            return serve.run(invocation, console)
        case "run":
            from ninfer.cli import run

            return run.run(invocation, console)
        case "info":
            from ninfer.cli import info

            return info.run(invocation, console)
        case "score":
            from ninfer.cli import score

            return score.run(invocation, console)
        case "convert":
            from ninfer.cli import convert

            return convert.run(invocation, console)
        case "bench":
            from ninfer.cli import bench

            return bench.run(invocation, console)
        case "kernels":
            from ninfer.cli import kernels

            return kernels.run(invocation, console)
        case name:
            raise InvariantError(f"command {name} has no implementation")


def _prepare_streams() -> None:
    """Closed streams lead nowhere; broken bytes on stdin and unprintable characters on stdout
    become replacements."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            nothing = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - lives as long as sys
            setattr(sys, name, nothing)
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _prepare_logging(environ: Mapping[str, str]) -> None:
    """Outside of `serve`, what users must know is an error line; the log is for debugging."""
    if environ.get(environment_name_of("log_level")) == "debug":
        logging.basicConfig(stream=sys.stderr, level=logging.DEBUG)
    else:
        logging.getLogger("ninfer").addHandler(logging.NullHandler())


def _wants_traceback(invocation: Invocation | None, environ: Mapping[str, str]) -> bool:
    flag = getattr(invocation.arguments, "log_level", None) if invocation is not None else None
    return (flag or environ.get(environment_name_of("log_level"))) == "debug"


def _line_of(error: Exception) -> str:
    if isinstance(error, NInferError):
        return " ".join(str(error).split("\n"))
    kind = type(error).__name__
    return f"internal error: {kind}: {error} (NINFER_LOG_LEVEL=debug shows where)".replace(
        "\n", " "
    )
