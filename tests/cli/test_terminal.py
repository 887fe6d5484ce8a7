"""The REPL as a person meets it: the real program, the demo model, a pseudo-terminal."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ninfer.cli.terminal import ForgivingHistory, history_path
from tests.helpers.command import argv_of, clean_environ
from tests.helpers.terminal_process import TerminalProcess

CTRL_C, CTRL_D, ENTER, ESCAPE, UP = "\x03", "\x04", "\r", "\x1b", "\x1b[A"


def start(
    state: Path, *flags: str, columns: int = 200, term: str = "xterm-256color", **extra: str
) -> TerminalProcess:
    environ = clean_environ(XDG_STATE_HOME=str(state), **extra)
    return TerminalProcess(argv_of(*flags), environ, columns=columns, term=term)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[TerminalProcess]:
    with start(tmp_path, "--temperature", "0") as process:
        process.expect("/help lists the commands.")
        process.expect(">>>")
        yield process


def test_an_answer_streams_with_a_dim_report_and_the_chat_goes_on(chat: TerminalProcess) -> None:
    chat.send("What is a volcano?" + ENTER)
    chat.expect("A volcano is a mountain")
    chat.expect("\x1b[2m[")
    assert "prompt +" in chat.expect("tokens/s")
    chat.expect(">>>")
    chat.send(CTRL_D)
    assert chat.wait() == 0


def test_thoughts_are_dimmed_when_they_are_asked_for(chat: TerminalProcess) -> None:
    chat.send("/think on" + ENTER)
    chat.expect("thinking: on")
    chat.expect(">>>")
    chat.send("What is 48 + 37?" + ENTER)
    chat.expect("\x1b[2m4")
    thought = chat.expect("48 + 37 is 85.")
    assert thought.replace("\x1b[0m\x1b[2m", "").startswith("8 + 30")
    assert thought.endswith("\x1b[0m")
    assert "thinking)" in chat.expect("tokens/s")


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: TerminalProcess) -> None:
    # The penalty keeps the model from ending its answer soon.
    chat.send("/set repetition_penalty 10" + ENTER)
    chat.expect("repetition_penalty = 10")
    chat.expect(">>>")
    chat.send("Tell me a story." + ENTER)
    chat.expect("Once upon")
    chat.send(CTRL_C)
    chat.expect("; stopped]")
    chat.expect(">>>")
    chat.send("/stats" + ENTER)
    chat.expect("answers        1")
    chat.expect(">>>")
    chat.send("/exit" + ENTER)
    assert chat.wait() == 0


@pytest.mark.parametrize("rest", ["", "/stats" + ENTER], ids=["alone", "typed ahead"])
def test_ctrl_c_right_behind_enter_stops_the_answer(chat: TerminalProcess, rest: str) -> None:
    chat.send("Tell me a story." + ENTER + CTRL_C + rest)
    assert "+ 0 answer tokens" in chat.expect("; stopped]")
    chat.expect(">>>")
    chat.send("" if rest else "/stats" + ENTER)
    chat.expect("answers        1")


def test_ctrl_c_at_the_prompt_clears_the_input(chat: TerminalProcess) -> None:
    chat.send("/unfinished business")
    chat.expect("business")
    chat.send(CTRL_C)
    chat.expect(">>>")
    chat.send("/system" + ENTER)
    chat.expect("(no system prompt)")
    assert "unknown command" not in chat.text


@pytest.mark.parametrize("break_keys", [ESCAPE + ENTER, None], ids=["alt-enter", "quotes"])
def test_several_lines_are_one_turn(chat: TerminalProcess, break_keys: str | None) -> None:
    if break_keys is None:
        chat.send('"""one' + ENTER)
        chat.expect("...")
        chat.send('two"""' + ENTER)
    else:
        chat.send("one" + break_keys)
        chat.expect("...")
        chat.send("two" + ENTER)
    chat.expect("tokens/s")
    chat.expect(">>>")
    chat.send("/stats" + ENTER)
    chat.expect("answers        1")


def test_history_is_kept_in_the_state_directory(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        first.expect(">>>")
        first.send("/system Be kind." + ENTER)
        first.expect("system prompt set")
        first.expect(">>>")
        first.send(CTRL_D)
        assert first.wait() == 0
    path = tmp_path / "ninfer" / "history"
    assert "/system Be kind." in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with start(tmp_path) as second:
        second.expect(">>>")
        second.send(UP)
        second.expect("/system Be kind.")
        second.send(ENTER)
        second.expect("system prompt set")


def test_no_color_means_no_colours(tmp_path: Path) -> None:
    with start(tmp_path, "--temperature", "0", "--think", NO_COLOR="1") as process:
        process.expect(">>>")
        process.send("What is 48 + 37?" + ENTER)
        process.expect("thinking: 48 + 30")
        process.expect("tokens/s")
        process.expect(">>>")
        process.send(CTRL_D)
        assert process.wait() == 0
        assert "\x1b[2m" not in process.text


def test_a_dumb_terminal_gets_text_alone(tmp_path: Path) -> None:
    with start(tmp_path, "--temperature", "0", "--think", term="dumb") as process:
        assert process.expect(">>>").count("\n") == 1
        time.sleep(0.5)
        process.send("What is 48 + 37?" + ENTER)
        assert process.expect("thinking: ").count(">>>") == 0
        process.expect("48 + 30")
        process.expect("48 + 37 is 85.")
        process.expect("tokens/s")
        process.expect(">>>")
        # There, the editor shows its prompt before it takes the keys.
        time.sleep(0.5)
        process.send("/exit" + ENTER)
        assert process.wait() == 0
        assert b"\x1b" not in process.raw


def test_a_narrow_terminal_breaks_between_words(tmp_path: Path) -> None:
    with start(tmp_path, "--temperature", "0", columns=40) as process:
        process.expect(">>>")
        process.send("/load /nowhere/at/all/with-a-long-name.json" + ENTER)
        process.expect("ninfer: error: /load: cannot read\n/nowhere/at/all/with-a-long-name.json:")


def test_a_user_without_a_home_can_chat() -> None:
    code = (
        "import pathlib, sys\n"
        "def homeless(*_): raise RuntimeError('no home')\n"
        "pathlib.Path.home = homeless\n"
        "from ninfer.cli.main import main\nsys.exit(main(['--temperature', '0']))"
    )
    environ = clean_environ(XDG_STATE_HOME="")
    with TerminalProcess([sys.executable, "-c", code], environ) as process:
        process.expect(">>>")
        process.send("/exit" + ENTER)
        assert process.wait() == 0


def test_a_history_that_cannot_be_written_is_only_forgotten(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    history = ForgivingHistory(blocker / "ninfer" / "history")
    history.store_string("hello")
    assert list(history.load_history_strings()) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "/h/.local/state/ninfer/history"),
        ({"XDG_STATE_HOME": "/s"}, "/s/ninfer/history"),
        ({"XDG_STATE_HOME": "relative"}, "/h/.local/state/ninfer/history"),
    ],
)
def test_where_the_history_is(environ: dict[str, str], expected: str) -> None:
    assert history_path(environ, Path("/h")) == Path(expected)
