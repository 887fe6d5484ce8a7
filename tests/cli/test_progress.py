from __future__ import annotations

import io

from ninfer.cli.console import Console
from ninfer.cli.progress import ProgressLine


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def load_on(err: io.StringIO) -> str:
    console = Console(io.StringIO(), err, is_interactive=False, has_colour=True)
    with ProgressLine(console, "loading") as line:
        for done in range(1000):
            line("weights", done, 1000)
    return err.getvalue()


def test_a_terminal_sees_one_line_that_is_gone_at_the_end() -> None:
    written = load_on(TerminalText())
    assert "loading weights 0%" in written
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")
    # Redrawing for each object would cost more than reading it.
    assert written.count("weights") < 50


def test_a_log_file_sees_nothing() -> None:
    assert load_on(io.StringIO()) == ""
