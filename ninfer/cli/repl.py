"""Repl: read a turn, run a command or stream an answer, until the input ends."""

from __future__ import annotations

import asyncio
from typing import Final

from ninfer.cli.answer import Answer, StopSwitch, report_of, stream_answer
from ninfer.cli.answer_printer import AnswerPrinter
from ninfer.cli.block_input import turn_text
from ninfer.cli.console import Console
from ninfer.cli.conversation import SETTINGS, Conversation
from ninfer.cli.repl_commands import ReplCommands, SessionTotals
from ninfer.cli.turn_reader import TurnReader
from ninfer.contract.chat import Frontend
from ninfer.contract.errors import NonFiniteLogits, RequestError, Unavailable
from ninfer.contract.generation import FinishReason, GenerationEngine
from ninfer.options import SamplingOptions

_FATAL: Final = frozenset({"engine_unavailable", "server_draining"})


class Repl:
    """One chat over one engine. Interactive: Ctrl-C stops an answer, a report follows each."""

    def __init__(
        self,
        engine: GenerationEngine,
        frontend: Frontend,
        conversation: Conversation,
        console: Console,
        *,
        model_name: str,
        sampling: SamplingOptions,
    ) -> None:
        """`sampling`: what the frontend's defaults were made of."""
        self._engine = engine
        self._frontend = frontend
        self._conversation = conversation
        self._console = console
        self._sampling = sampling
        self._totals = SessionTotals()
        self._num_requests = 0
        self.commands: Final = ReplCommands(
            conversation,
            self._totals,
            console,
            model_name=model_name,
            max_context=engine.max_context,
            engine_status=engine.status,
            settings_in_force=self._settings_in_force,
        )

    async def run(self, reader: TurnReader) -> None:
        """Until the input ends or /exit. Raises Unavailable when the engine cannot go on."""
        while not self.commands.has_left:
            line = await reader.read()
            if line is None:
                return
            stop = StopSwitch()
            if reader.was_interrupted:
                stop.press()
            if line.startswith("/"):
                await self._run_command(line, stop)
            elif text := turn_text(line):
                await self._take_turn(text, stop)

    async def _run_command(self, line: str, stop: StopSwitch) -> None:
        """On a terminal, Ctrl-C gives the command up and not the program."""
        if not self._console.is_interactive:
            await self.commands.run(line)
            return
        task = asyncio.ensure_future(self.commands.run(line))
        stop.bind(task.cancel)
        with stop.on_interrupt(asyncio.get_running_loop().call_soon_threadsafe):
            await asyncio.wait((task,))
        if task.cancelled():
            self._console.notice("given up")
        else:
            task.result()

    def _settings_in_force(self) -> dict[str, str]:
        """What the next request would be sampled with, by the names of `/set`."""
        params = self._conversation.params()
        prompt = self._frontend.prepare_ids((0,))
        request = self._frontend.build_request("settings", prompt, params, now=self._engine.now())
        values = {name: str(getattr(request.sampling, name, None)) for name in SETTINGS}
        seed = self._sampling.seed if params.seed is None else params.seed
        values["seed"] = "a new one for every answer" if seed is None else str(seed)
        budget = params.thinking_budget or self._sampling.thinking_budget
        values["thinking_budget"] = "no limit" if budget is None else str(budget)
        is_bounded = request.max_tokens < self._engine.max_context
        values["max_tokens"] = str(request.max_tokens) if is_bounded else "the rest of the context"
        return values

    async def _take_turn(self, text: str, stop: StopSwitch) -> None:
        if len(self._conversation.open_calls) > 1:
            self._conversation.messages.append(self._conversation.next_message(text))
            self._ask_for_result()
            return
        try:
            answer = await self._answer(text, stop)
        except RequestError as error:
            hint = "; /reset starts over" if error.code == "context_length_exceeded" else ""
            self._console.error(f"{error}{hint}")
        except Unavailable as error:
            if error.code in _FATAL:
                raise
            self._console.error(str(error))
        except NonFiniteLogits as error:
            self._console.error(str(error))
        else:
            self._conversation.add_turn(text, answer)
            self._totals.add(answer)
            self._conclude(answer)

    def _conclude(self, answer: Answer) -> None:
        if self._console.is_interactive:
            self._console.notice(report_of(answer))
        elif not answer.text and not answer.calls:
            # Whoever counts lines gets one for each turn.
            self._console.write("\n")
        if answer.finish.reason is FinishReason.CONTEXT_CAPACITY:
            self._console.notice("the context is full; /reset starts over")
        self._ask_for_result()

    def _ask_for_result(self) -> None:
        calls = self._conversation.open_calls
        if calls and self._console.is_interactive:
            name = calls[0].name
            self._console.notice(f"the next line is the result of {name}; /reset starts over")

    async def _answer(self, text: str, stop: StopSwitch) -> Answer:
        printer = AnswerPrinter(self._console)
        if not self._console.is_interactive:
            return await self._stream(text, printer, stop)
        loop = asyncio.get_running_loop()
        with stop.on_interrupt(loop.call_soon_threadsafe):
            return await self._stream(text, printer, stop)

    async def _stream(self, text: str, printer: AnswerPrinter, stop: StopSwitch) -> Answer:
        prompt = await self._frontend.prepare_chat(self._conversation.prompt_for(text))
        self._num_requests += 1
        request = self._frontend.build_request(
            f"chat-{self._num_requests}",
            prompt,
            self._conversation.params(),
            now=self._engine.now(),
        )
        try:
            return await stream_answer(self._engine, request, printer.write, stop)
        finally:
            printer.finish()
