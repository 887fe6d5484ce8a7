"""AnswerPrinter: lays a streamed answer out as text, thought before answer."""

from __future__ import annotations

from ninfer.cli.console import Console
from ninfer.contract.generation import Channel


class AnswerPrinter:
    """Writes deltas as they come. The thought is secondary text: dimmed, or on stderr in a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._channel: Channel | None = None
        self._ends_in_newline = True

    def write(self, channel: Channel, text: str) -> None:
        if channel != self._channel:
            self._open(channel)
        if not text:
            return
        if channel == "reasoning":
            self._console.write_secondary(text)
        else:
            self._console.write(text)
        self._ends_in_newline = text.endswith("\n")

    def finish(self) -> None:
        """End the line that is open, if one is."""
        if self._ends_in_newline:
            return
        if self._channel == "reasoning":
            self._console.write_secondary("\n")
        else:
            self._console.write("\n")
        self._ends_in_newline = True

    def _open(self, channel: Channel) -> None:
        if self._channel == "reasoning":
            self._console.write_secondary("\n" if self._ends_in_newline else "\n\n")
            self._ends_in_newline = True
        elif channel == "call" and not self._ends_in_newline:
            self._console.write("\n")
        elif channel == "reasoning" and not self._console.dims_secondary:
            self._console.write_secondary("thinking: ")
        self._channel = channel
