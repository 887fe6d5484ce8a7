"""`ninfer run`: one prompt or a messages file, one answer on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from ninfer.cli.answer import Answer, TextWriter, report_of, stream_answer
from ninfer.cli.answer_printer import AnswerPrinter
from ninfer.cli.console import Console
from ninfer.cli.conversation import template_kwargs_of, text_message
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.input_files import STDIN, read_json, read_prompt
from ninfer.cli.loading import LoadedModel, load_with_progress, running_engine
from ninfer.cli.message_json import read_messages, read_tools
from ninfer.cli.parser import Invocation
from ninfer.contract.chat import ChatPrompt, GenerationParams, ToolRules
from ninfer.contract.errors import OptionError
from ninfer.contract.generation import Channel, GenerationEngine, Usage
from ninfer.frontend.conversation import parse_arguments
from ninfer.gateway.chat_messages import Conversation
from ninfer.gateway.tool_fields import ChatTools
from ninfer.options import ChatOptions, EngineOptions, RunOptions, SamplingOptions


def run(invocation: Invocation, console: Console) -> ExitCode:
    run_options = invocation.read(RunOptions)
    chat_options = invocation.read(ChatOptions)
    engine_options = invocation.read(EngineOptions)
    sampling = invocation.read(SamplingOptions)
    prompt, rules = _read_prompt(run_options, chat_options)
    model = load_with_progress(invocation.model_path, engine_options, sampling, console)
    # Here stdout holds the answer and nothing else, whoever looks at it.
    plain = replace(console, is_interactive=False)
    return asyncio.run(_answer(model, engine_options, run_options, prompt, rules, plain))


async def _answer(
    model: LoadedModel,
    engine_options: EngineOptions,
    options: RunOptions,
    prompt: str | ChatPrompt,
    rules: ToolRules | None,
    console: Console,
) -> ExitCode:
    async with running_engine(model, engine_options) as engine:
        printer = AnswerPrinter(console)
        try:
            write = _ignore_text if options.json else printer.write
            answer = await _generate(model, engine, options, prompt, rules, write)
        finally:
            printer.finish()
    if options.json:
        console.write(json.dumps(_as_json(model, answer), ensure_ascii=False) + "\n")
    else:
        console.notice(report_of(answer))
    return ExitCode.OK


async def _generate(
    model: LoadedModel,
    engine: GenerationEngine,
    options: RunOptions,
    prompt: str | ChatPrompt,
    rules: ToolRules | None,
    write: TextWriter,
) -> Answer:
    if isinstance(prompt, str):
        prepared = await model.frontend.prepare_text(prompt)
    else:
        prepared = await model.frontend.prepare_chat(prompt)
    params = GenerationParams(
        split_reasoning=not options.raw, timeout_s=options.timeout, tools=rules
    )
    request = model.frontend.build_request("run-1", prepared, params, now=engine.now())
    return await stream_answer(engine, request, write)


def _ignore_text(_channel: Channel, _text: str) -> None:
    """--json prints the answer as a whole."""


def _read_prompt(
    options: RunOptions, chat: ChatOptions
) -> tuple[str | ChatPrompt, ToolRules | None]:
    """Raw text with --raw, else the conversation to answer, and which calls the answer may have."""
    if options.raw:
        if chat.tools is not None:
            raise OptionError("--tools", "they are told by the chat template, which --raw omits")
        return _prompt_text(options), None
    tools = ChatTools()
    if options.messages is None:
        turns = Conversation((text_message("user", _prompt_text(options)),), is_prefill=False)
    else:
        turns, tools = _read_conversation(options.messages)
    if chat.tools is not None:
        tools = read_tools(read_json("--tools", chat.tools))
    head = (text_message("system", chat.system),) if chat.system else ()
    prompt = ChatPrompt(
        messages=(*head, *turns.messages),
        tools=tools.objects,
        template_kwargs=template_kwargs_of(chat.think),
        add_generation_prompt=not turns.is_prefill,
        continue_final_message=turns.is_prefill,
    )
    return prompt, tools.rules


def _prompt_text(options: RunOptions) -> str:
    """Raises OptionError when there is nothing to answer."""
    text = _given_text(options)
    if not (text if options.raw else text.strip()):
        raise OptionError("--prompt", "the prompt is empty")
    return text


def _given_text(options: RunOptions) -> str:
    if options.prompt is not None and options.prompt != STDIN:
        return options.prompt
    if options.prompt is None and sys.stdin.isatty():
        raise OptionError(
            "--prompt", "a prompt is needed: --prompt TEXT, --messages FILE or a pipe"
        )
    return read_prompt("--prompt", sys.stdin).removesuffix("\n")


def _read_conversation(name: str) -> tuple[Conversation, ChatTools]:
    """The messages of a file, and the tools of one that is a whole request."""
    raw = read_json("--messages", name)
    if not isinstance(raw, dict):
        return read_messages(raw), ChatTools()
    return read_messages(raw.get("messages")), read_tools(raw)


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def _as_json(model: LoadedModel, answer: Answer) -> dict[str, Any]:
    return {
        "model": model.card.name,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [
            {"name": call.name, "arguments": parse_arguments(call.arguments)}
            for call in answer.calls
        ],
        "finish_reason": answer.finish.reason.value,
        "matched": answer.finish.matched,
        "usage": _usage_object(answer.usage),
        "timings": {
            **{name: value for name, value in asdict(answer.timings).items() if value is not None},
            "tokens_per_s": answer.tokens_per_s,
        },
    }
