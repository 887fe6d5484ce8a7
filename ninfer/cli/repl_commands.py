"""The commands of the REPL: they read and change a Conversation and say so on the Console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer.cli.answer import Answer, report_of
from ninfer.cli.console import Console
from ninfer.cli.conversation import SETTINGS, Conversation
from ninfer.cli.conversation_file import load_conversation, save_conversation
from ninfer.cli.table import table
from ninfer.contract.errors import NInferError
from ninfer.contract.generation import EngineStatus


@dataclass(slots=True)
class SessionTotals:
    """What this session's answers took together."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_s: float = 0.0
    last: Answer | None = None

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.prompt_tokens += answer.usage.prompt_tokens
        self.completion_tokens += answer.usage.completion_tokens
        self.decode_s += answer.timings.decode_s
        self.last = answer


@dataclass(frozen=True, slots=True)
class _Command:
    usage: str
    help: str
    run: Callable[[str], None]


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
    ) -> None:
        self._conversation = conversation
        self._totals = totals
        self._console = console
        self._model_name = model_name
        self._max_context = max_context
        self._engine_status = engine_status
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

    def run(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = self._commands.get(name.rstrip())
        if command is None:
            self._console.error(
                f"unknown command {name.rstrip()}; /help lists them"
                " (a leading blank sends the line as text)"
            )
            return
        try:
            command.run(rest.strip())
        except NInferError as error:
            self._console.error(str(error))

    def _help(self, _: str) -> None:
        rows = [
            (f"{name} {item.usage}".rstrip(), item.help) for name, item in self._commands.items()
        ]
        self._console.write(table(rows))
        self._console.write(
            'Alt-Enter or a block between """ makes several lines one turn.\n'
            "Ctrl-C stops an answer or clears the input.\n"
        )

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._console.notice("conversation forgotten")

    def _system(self, text: str) -> None:
        if not text:
            self._console.write(f"{self._conversation.system or '(no system prompt)'}\n")
            return
        self._conversation.system = None if text == "-" else text
        self._console.notice("system prompt removed" if text == "-" else "system prompt set")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            settings = self._conversation.settings
            self._console.write(
                table([(item, str(settings.get(item, "default"))) for item in SETTINGS])
            )
            return
        name = name.replace("-", "_")
        if not value.strip():
            self._console.error(f"/set {name} needs a value")
            return
        self._conversation.set(name, value.strip())
        self._console.notice(f"{name} = {self._conversation.settings.get(name, 'default')}")

    def _think(self, text: str) -> None:
        states = {"on": True, "off": False, "default": None}
        words = {state: word for word, state in states.items()}
        if text and text not in states:
            self._console.error(f"/think takes on, off or default, not {text!r}")
            return
        if text:
            self._conversation.think = states[text]
        self._console.notice(f"thinking: {words[self._conversation.think]}")

    def _stats(self, _: str) -> None:
        totals, status = self._totals, self._engine_status()
        steps = totals.completion_tokens - totals.answers
        speed = f"{steps / totals.decode_s:.1f} tokens/s" if totals.decode_s > 0 else "not measured"
        rows = [
            ("model", f"{self._model_name}, context of {self._max_context} tokens"),
            ("answers", str(totals.answers)),
            ("prompt tokens", str(totals.prompt_tokens)),
            ("answer tokens", str(totals.completion_tokens)),
            ("speed", speed),
            ("KV pages", f"{status.pages_used} of {status.pages_total} in use"),
        ]
        if totals.last is not None:
            used = totals.last.usage.prompt_tokens + totals.last.usage.completion_tokens
            rows.append(("context", f"{used} of {self._max_context} tokens after the last answer"))
            rows.append(("last answer", report_of(totals.last).strip("[]")))
        self._console.write(table(rows))

    def _save(self, text: str) -> None:
        if not text:
            self._console.error("/save needs a file name")
            return
        path = Path(text).expanduser()
        save_conversation(path, self._conversation, self._model_name)
        self._console.notice(f"saved to {path}")

    def _load(self, text: str) -> None:
        if not text:
            self._console.error("/load needs a file name")
            return
        path = Path(text).expanduser()
        loaded = load_conversation(path)
        self._conversation.system = loaded.system
        self._conversation.think = loaded.think
        self._conversation.messages[:] = loaded.messages
        self._conversation.settings.clear()
        self._conversation.settings.update(loaded.settings)
        self._console.notice(f"loaded {len(loaded.messages)} messages from {path}")

    def _exit(self, _: str) -> None:
        self.has_left = True
