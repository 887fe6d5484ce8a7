"""TerminalReader: line editing, history and multi-line input on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.plain_text import PlainTextOutput

from ninfer.cli.block_input import is_open_block

_PROMPT: Final = ">>> "
_CONTINUATION: Final = "... "


class TerminalReader:
    """Enter sends; Alt-Enter (or Esc, Enter) and open triple quotes make a new line.

    Ctrl-C clears the input (an empty turn), Ctrl-D on an empty line is the end.
    """

    def __init__(
        self, command_names: Sequence[str], history_path: Path, *, has_cursor: bool
    ) -> None:
        """`has_cursor`: the terminal understands cursor movement; else it gets text alone."""
        # The editor has a plain mode for dumb terminals, but looks for the output by itself then.
        plain = None if has_cursor else PlainTextOutput(sys.stdout)
        with create_app_session(output=plain):
            self._session: PromptSession[str] = PromptSession(
                history=ForgivingHistory(history_path),
                multiline=True,
                prompt_continuation=_CONTINUATION,
                key_bindings=_key_bindings(),
                completer=_CommandCompleter(command_names),
                complete_while_typing=False,
            )
        self.was_interrupted = False

    async def read(self) -> str | None:
        self.was_interrupted = False
        try:
            text = await self._session.prompt_async(_PROMPT)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        self.was_interrupted = self._take_early_interrupt()
        return text

    def _take_early_interrupt(self) -> bool:
        """Whether Ctrl-C is among the keys typed before the terminal made signals of it again.

        What follows it stays for the next input, what stands before it is cleared as ever.
        """
        source = self._session.input
        with source.raw_mode():
            keys = [*get_typeahead(source), *source.read_keys()]
        places = [place for place, press in enumerate(keys) if press.key == Keys.ControlC]
        store_typeahead(source, keys[places[-1] + 1 :] if places else keys)
        return bool(places)


class ForgivingHistory(FileHistory):
    """A history file that may be missing, unreadable or read-only: then this session's only."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            super().store_string(string)
        except OSError:
            return


def history_path(environ: Mapping[str, str], home: Path) -> Path:
    """`$XDG_STATE_HOME/ninfer/history`; a relative XDG_STATE_HOME does not count."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    base = state if state.is_absolute() else home / ".local" / "state"
    return base / "ninfer" / "history"


class _CommandCompleter(Completer):
    """Completes command names on Tab at the start of the input."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if typed.startswith("/") and " " not in typed:
            for name in self._names:
                if name.startswith(typed):
                    yield Completion(name, start_position=-len(typed))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
