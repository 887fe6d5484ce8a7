"""The commands of the REPL: they read and change a Conversation and say so on the Console."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer.cli.answer import Answer, report_of
from ninfer.cli.background import in_background
from ninfer.cli.console import Console
from ninfer.cli.conversation import SETTINGS, Conversation
from ninfer.cli.conversation_file import (
    dump_conversation,
    load_conversation,
    save_conversation,
)
from ninfer.cli.input_files import STDIN
from ninfer.cli.layout import count, table
from ninfer.contract.errors import OptionError, OutputError
from ninfer.contract.generation import EngineStatus


@dataclass(slots=True)
class SessionTotals:
    """What this session's answers took together."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    decode_s: float = 0.0
    last: Answer | None = None

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.prompt_tokens += answer.usage.prompt_tokens
        self.cached_tokens += answer.usage.cached_tokens
        self.completion_tokens += answer.usage.completion_tokens
        self.decode_s += answer.timings.decode_s
        self.last = answer


@dataclass(frozen=True, slots=True)
class _Command:
    """`usage` is what follows the name; a command without one takes nothing."""

    usage: str
    help: str
    run: Callable[[str], Awaitable[None]]


class ReplCommands:
    """`run` carries out one line that starts with a slash; `has_left` after /exit."""

    def __init__(
        self,
        conversation: Conversation,
        totals: SessionTotals,
        console: Console,
        *,
        model_name: str,
        max_context: int,
        engine_status: Callable[[], EngineStatus],
        settings_in_force: Callable[[], Mapping[str, str]],
    ) -> None:
        self._conversation = conversation
        self._totals = totals
        self._console = console
        self._model_name = model_name
        self._max_context = max_context
        self._engine_status = engine_status
        self._settings_in_force = settings_in_force
        self.has_left = False
        self._commands: Final = {
            "/help": _Command("", "this list", self._help),
            "/reset": _Command("", "forget the conversation, keep the settings", self._reset),
            "/system": _Command("[TEXT]", "set the system prompt; - removes it", self._system),
            "/set": _Command(
                "[NAME VALUE]",
                "set a sampling value, default unsets it; alone, list them",
                self._set,
            ),
            "/think": _Command("[on|off|default]", "think before answering", self._think),
            "/stats": _Command("", "tokens and speed so far", self._stats),
            "/save": _Command("FILE", "write conversation and settings as JSON", self._save),
            "/load": _Command("FILE", "go on with a saved conversation", self._load),
            "/exit": _Command("", "leave (Ctrl-D too)", self._exit),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._commands)

    async def run(self, line: str) -> None:
        name, *rest = line.split(maxsplit=1)
        text = rest[0].strip() if rest else ""
        command = self._commands.get(name)
        if command is None:
            self._console.error(
                f"unknown command {name}; /help lists them (a leading blank sends the line as text)"
            )
        elif text and not command.usage:
            self._console.error(f"{name} takes nothing after it, not {text!r}")
        else:
            try:
                await command.run(text)
            except OptionError as error:
                self._console.error(str(error))

    async def _help(self, _: str) -> None:
        rows = [
            (f"{name} {item.usage}".rstrip(), item.help) for name, item in self._commands.items()
        ]
        self._console.write_lines(table(rows))
        self._console.write_lines(
            'Alt-Enter or a block between """ makes several lines one turn.\n'
            "Ctrl-C stops an answer or clears the input.\n"
        )

    async def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._console.notice("conversation forgotten")

    async def _system(self, text: str) -> None:
        if not text:
            self._console.write(f"{self._conversation.system or '(no system prompt)'}\n")
            return
        self._conversation.system = None if text == "-" else text
        self._console.notice("system prompt removed" if text == "-" else "system prompt set")

    async def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            in_force = self._settings_in_force()
            self._console.write_lines(
                table([(item, self._setting_text(item, in_force)) for item in SETTINGS])
            )
            return
        name = name.replace("-", "_")
        if not value.strip():
            self._console.error(f"/set {name} needs a value")
            return
        self._conversation.set(name, value.strip())
        self._console.notice(f"{name} = {self._setting_text(name, self._settings_in_force())}")

    def _setting_text(self, name: str, in_force: Mapping[str, str]) -> str:
        is_set = name in self._conversation.settings
        return in_force[name] if is_set else f"{in_force[name]} (default)"

    async def _think(self, text: str) -> None:
        states = {"on": True, "off": False, "default": None}
        words = {state: word for word, state in states.items()}
        if text and text not in states:
            self._console.error(f"/think takes on, off or default, not {text!r}")
            return
        if text:
            self._conversation.think = states[text]
        self._console.notice(f"thinking: {words[self._conversation.think]}")

    async def _stats(self, _: str) -> None:
        totals, status = self._totals, self._engine_status()
        steps = totals.completion_tokens - totals.answers
        speed = f"{steps / totals.decode_s:.1f} tokens/s" if totals.decode_s > 0 else "not measured"
        rows = [
            ("model", f"{self._model_name}, context of {self._max_context} tokens"),
            ("answers", str(totals.answers)),
            ("prompt tokens", f"{totals.prompt_tokens}, {totals.cached_tokens} of them cached"),
            ("answer tokens", str(totals.completion_tokens)),
            ("speed", speed),
            ("KV pages", f"{status.pages_used} of {status.pages_total} in use"),
        ]
        if totals.last is not None:
            used = totals.last.usage.prompt_tokens + totals.last.usage.completion_tokens
            rows.append(("context", f"{used} of {self._max_context} tokens after the last answer"))
            rows.append(("last answer", report_of(totals.last).strip("[]")))
        self._console.write_lines(table(rows))

    async def _save(self, text: str) -> None:
        path = _path_of("/save", text)
        data = dump_conversation(self._conversation, self._model_name)
        try:
            await asyncio.to_thread(save_conversation, path, data)
        except OutputError as error:
            self._console.error(str(error))
        else:
            self._console.notice(f"saved to {path}")

    async def _load(self, text: str) -> None:
        path = _path_of("/load", text)
        loaded = await in_background(lambda: load_conversation(path))
        self._conversation.system = loaded.system
        self._conversation.think = loaded.think
        self._conversation.messages[:] = loaded.messages
        self._conversation.settings.clear()
        self._conversation.settings.update(loaded.settings)
        self._console.notice(f"loaded {count(len(loaded.messages), 'message')} from {path}")

    async def _exit(self, _: str) -> None:
        self.has_left = True


def _path_of(command: str, text: str) -> Path:
    """Raises OptionError for no name, and for `-`, which is stdin or stdout elsewhere."""
    if not text:
        raise OptionError(command, "a file name is needed")
    if text == STDIN:
        raise OptionError(command, "- is no file name here (./- is a file of that name)")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise OptionError(command, f"{text}: {error}") from error
