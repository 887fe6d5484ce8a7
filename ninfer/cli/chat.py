"""`ninfer chat`: the REPL over one loaded model, on a terminal or in a pipe."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ninfer import __version__
from ninfer.cli.console import Console
from ninfer.cli.conversation import Conversation
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.input_files import read_json
from ninfer.cli.loading import LoadedModel, load_with_progress, running_engine
from ninfer.cli.message_json import read_tools
from ninfer.cli.parser import Invocation
from ninfer.cli.repl import Repl
from ninfer.cli.turn_reader import PipeReader, TurnReader
from ninfer.contract.errors import RequestError
from ninfer.gateway.tool_fields import ChatTools
from ninfer.options import ChatOptions, EngineOptions, SamplingOptions


def run(invocation: Invocation, console: Console) -> ExitCode:
    chat_options = invocation.read(ChatOptions)
    engine_options = invocation.read(EngineOptions)
    sampling = invocation.read(SamplingOptions)
    tools = ChatTools()
    if chat_options.tools is not None:
        tools = read_tools(read_json("--tools", chat_options.tools))
    model = load_with_progress(invocation.model_path, engine_options, sampling, console)
    return asyncio.run(_chat(model, engine_options, chat_options, tools, sampling, console))


async def _chat(
    model: LoadedModel,
    engine_options: EngineOptions,
    chat: ChatOptions,
    tools: ChatTools,
    sampling: SamplingOptions,
    console: Console,
) -> ExitCode:
    _require_chat(model)
    conversation = Conversation(system=chat.system, think=chat.think, tools=tools)
    async with running_engine(model, engine_options) as engine:
        repl = Repl(
            engine,
            model.frontend,
            conversation,
            console,
            model_name=model.card.name,
            sampling=sampling,
        )
        if console.is_interactive:
            console.write_lines(_banner(model))
        await repl.run(_reader(repl, console))
    return ExitCode.OK


def _require_chat(model: LoadedModel) -> None:
    if not model.frontend.has_tokenizer:
        raise RequestError(
            "tokenizer_unavailable",
            f"{model.card.name} has no tokenizer.json, so it cannot chat;"
            " `score --ids` and POST /generate with input_ids work",
        )
    if not model.frontend.has_chat_template:
        raise RequestError(
            "invalid_template",
            f"{model.card.name} has no chat template; `run --raw` continues plain text",
        )


def _banner(model: LoadedModel) -> str:
    return (
        f"ninfer {__version__}: {model.card.name} ({model.card.architecture},"
        f" context of {model.card.max_context} tokens). /help lists the commands.\n"
    )


def _reader(repl: Repl, console: Console) -> TurnReader:
    if not console.is_interactive:
        return PipeReader(sys.stdin)
    # The line editor takes a tenth of a second to import, and a pipe has no use for it.
    from ninfer.cli.terminal import TerminalReader, history_path

    return TerminalReader(
        repl.commands.names,
        history_path(os.environ, _home()),
        has_cursor=console.moves_cursor,
    )


def _home() -> Path:
    """A user without an entry and without HOME has a place where nothing can be kept."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)
