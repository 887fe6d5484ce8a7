"""The REPL's behaviour over a scripted engine: turns, commands, failures, files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ninfer.cli import repl_commands
from ninfer.cli.console import Console
from ninfer.cli.conversation import Conversation
from ninfer.cli.repl import Repl
from ninfer.contract.errors import NonFiniteLogits, RequestError, Unavailable
from ninfer.contract.generation import FinishReason
from ninfer.options import SamplingOptions
from tests.helpers.scripted_chat import Script, ScriptedEngine, ScriptedFrontend, turns_of


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class ScriptedReader:
    lines: list[str]
    was_interrupted: bool = False

    async def read(self) -> str | None:
        return self.lines.pop(0) if self.lines else None


@dataclass
class Session:
    """A Repl with everything it touches."""

    engine: ScriptedEngine
    console: Console
    frontend: ScriptedFrontend = field(default_factory=ScriptedFrontend)
    conversation: Conversation = field(default_factory=Conversation)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    async def play(self, *lines: str) -> None:
        repl = Repl(
            self.engine,
            self.frontend,
            self.conversation,
            self.console,
            model_name="tiny",
            sampling=self.sampling,
        )
        await repl.run(ScriptedReader(list(lines)))

    @property
    def out(self) -> str:
        assert isinstance(self.console.out, io.StringIO)
        return self.console.out.getvalue()

    @property
    def err(self) -> str:
        assert isinstance(self.console.err, io.StringIO)
        return self.console.err.getvalue()


def in_pipe(*scripts: Script) -> Session:
    console = Console(io.StringIO(), io.StringIO(), is_interactive=False, has_colour=True)
    return Session(ScriptedEngine(list(scripts)), console)


def on_terminal(*scripts: Script, has_colour: bool = True) -> Session:
    console = Console(TerminalText(), TerminalText(), is_interactive=True, has_colour=has_colour)
    return Session(ScriptedEngine(list(scripts)), console)


def says(*texts: str, thought: str = "") -> Script:
    pieces = [("reasoning", thought)] if thought else []
    return Script((*pieces, *(("content", text) for text in texts)))  # type: ignore[arg-type]


async def test_a_pipe_gets_the_answers_and_nothing_else() -> None:
    session = in_pipe(says("Hel", "lo."), says("Bye.\n"))
    await session.play("hi", "", "ciao")
    assert session.out == "Hello.\nBye.\n"
    assert session.err == ""


async def test_the_conversation_goes_on_over_turns() -> None:
    session = in_pipe(says("A", thought="hm"), says("B"))
    await session.play("one", '"""two\nthree"""')
    assert turns_of(session.frontend.chats[1]) == [
        ("user", "one"),
        ("assistant", "A"),
        ("user", "two\nthree"),
    ]
    assert session.frontend.chats[1].messages[1].reasoning_content == "hm"


async def test_thoughts_stay_off_stdout_in_a_pipe() -> None:
    session = in_pipe(says("4", thought="2 and 2"))
    await session.play("2 + 2?")
    assert session.out == "4\n"
    assert "2 and 2" in session.err
    assert "\x1b" not in session.err


async def test_thoughts_and_the_report_are_dim_on_a_terminal() -> None:
    session = on_terminal(says("4", thought="2 and 2"))
    await session.play("2 + 2?")
    before, _, after = session.out.partition("4\n")
    assert "\x1b[2m2 and 2\x1b[0m" in before
    assert "\x1b[2m[5 prompt + 2 answer tokens, 2.0 tokens/s, 0.60 s]\x1b[0m\n" in after


async def test_without_colour_a_thought_is_marked_by_a_word() -> None:
    session = on_terminal(says("4", thought="2 and 2"), has_colour=False)
    await session.play("2 + 2?")
    assert session.out.startswith("thinking: 2 and 2\n\n4\n")
    assert "\x1b" not in session.out


async def test_control_characters_of_a_model_do_not_reach_a_terminal() -> None:
    hostile = says("a\x1b]0;title\x07b", thought="\x9b2J")
    terminal, pipe = on_terminal(hostile, has_colour=False), in_pipe(hostile)
    await terminal.play("x")
    await pipe.play("x")
    assert not {"\x1b", "\x07", "\x9b"} & set(terminal.out)
    assert pipe.out == "a\x1b]0;title\x07b\n"


async def test_interrupt_stops_the_answer_and_keeps_what_was_said() -> None:
    session = on_terminal(
        Script((("content", "Once upon"),), waits=True),
        says("Fine."),
    )
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    await session.play("a story", "thanks")
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped]" in session.out
    assert turns_of(session.frontend.chats[1])[1] == ("assistant", "Once upon")
    assert all(handle.is_released for handle in session.engine.handles)


async def test_an_answer_stopped_before_its_first_word_leaves_no_turn() -> None:
    session = on_terminal(Script(waits=True), says("Fine."))
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    await session.play("a story", "hello")
    assert turns_of(session.frontend.chats[1]) == [("user", "hello")]


async def test_a_full_context_is_said_with_a_way_out_and_the_chat_goes_on() -> None:
    refusal = RequestError("context_length_exceeded", "too long: 300 tokens > 256 maximum")
    cut = Script((("content", "On and on"),), finish=FinishReason.CONTEXT_CAPACITY)
    session = in_pipe(Script(refusal=refusal), cut, says("Fine."))
    await session.play("long", "shorter", "/reset", "short")
    assert "ninfer: error: too long: 300 tokens > 256 maximum; /reset starts over\n" in session.err
    assert "the context is full; /reset starts over\n" in session.err
    assert session.out == "On and on\nFine.\n"
    assert turns_of(session.frontend.chats[1]) == [("user", "shorter")]
    assert turns_of(session.frontend.chats[2]) == [("user", "short")]


@pytest.mark.parametrize(
    "error", [NonFiniteLogits("row 0"), Unavailable("deadline_exceeded", "too late")]
)
async def test_a_failed_answer_is_one_line_and_the_chat_goes_on(
    error: NonFiniteLogits | Unavailable,
) -> None:
    session = in_pipe(Script((("content", "par"),), error=error), says("Fine."))
    await session.play("a", "b")
    assert session.out == "par\nFine.\n"
    assert session.err == f"ninfer: error: {error}\n"
    assert turns_of(session.frontend.chats[1]) == [("user", "b")]


async def test_a_dead_engine_ends_the_chat() -> None:
    session = in_pipe(Script(refusal=Unavailable("engine_unavailable", "gone")))
    with pytest.raises(Unavailable, match="gone"):
        await session.play("a", "b")


async def test_an_empty_answer_is_an_empty_line_in_a_pipe() -> None:
    session = in_pipe(Script(finish=FinishReason.OUTPUT_LIMIT), says("x"))
    await session.play("a", "b")
    assert session.out == "\nx\n"


async def test_settings_reach_the_request_until_they_are_unset() -> None:
    session = in_pipe(says("a"), says("b"))
    await session.play(
        "/set temperature 0.5", "/set top-k 7", "x", "/set temperature default", "/set", "y"
    )
    first, second = (request.sampling for request in session.engine.requests)
    assert (first.temperature, first.top_k) == (0.5, 7)
    assert (second.temperature, second.top_k) == (0.25, 7)
    assert "temperature = 0.5\n" in session.err
    assert "temperature = 0.25 (default)\n" in session.err


async def test_set_alone_lists_the_values_in_force() -> None:
    session = in_pipe()
    session.sampling = SamplingOptions(seed=4)
    await session.play("/set top_k 7", "/set max_tokens 5", "/set")
    listing = dict(line.split(maxsplit=1) for line in session.out.splitlines())
    assert listing == {
        "temperature": "0.25 (default)",
        "top_k": "7",
        "top_p": "1.0 (default)",
        "min_p": "0.0 (default)",
        "presence_penalty": "0.0 (default)",
        "frequency_penalty": "0.0 (default)",
        "repetition_penalty": "1.0 (default)",
        "seed": "4 (default)",
        "thinking_budget": "no limit (default)",
        "max_tokens": "5",
    }
    unset = in_pipe()
    await unset.play("/set")
    assert "a new one for every answer (default)\n" in unset.out
    assert "the rest of the context (default)\n" in unset.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature 7", "temperature: 7 is out of range (0 to 2)"),
        ("/set temperature warm", "temperature: 'warm' is not a number"),
        ("/set temperature", "/set temperature needs a value"),
        ("/set warmth 1", "warmth: no such setting"),
        ("/think maybe", "/think takes on, off or default, not 'maybe'"),
        ("/dance", "unknown command /dance; /help lists them"),
        ("/save", "/save: a file name is needed"),
        ("/load", "/load: a file name is needed"),
        ("/save -", "/save: - is no file name here"),
        ("/load -", "/load: - is no file name here"),
        ("/load ~nobody.here/x", "/load: ~nobody.here/x: "),
        ("/reset now", "/reset takes nothing after it, not 'now'"),
        ("/exit please", "/exit takes nothing after it, not 'please'"),
        ("/stats all", "/stats takes nothing after it, not 'all'"),
        ("/help set", "/help takes nothing after it, not 'set'"),
        ("/load /nowhere/at/all.json", "/load: cannot read /nowhere/at/all.json"),
        ("/save /nowhere/at/all.json", "/save: cannot write /nowhere/at/all.json"),
    ],
)
async def test_a_bad_command_is_one_clear_line_and_changes_nothing(line: str, message: str) -> None:
    session = in_pipe(says("fine"))
    await session.play(line, "hi")
    assert session.err.startswith(f"ninfer: error: {message}")
    assert session.err.count("\n") == 1
    assert session.out == "fine\n"
    assert session.conversation.settings == {}


async def test_a_leading_blank_sends_a_slash_as_text() -> None:
    session = in_pipe(says("fine"))
    await session.play(" /etc is what?")
    assert turns_of(session.frontend.chats[0]) == [("user", "/etc is what?")]


async def test_system_prompt_and_thinking_are_part_of_the_prompt() -> None:
    session = in_pipe(says("a"), says("b"))
    await session.play(
        "/system Be brief.", "/think on", "x", "/system", "/system -", "/think default", "y"
    )
    first, second = session.frontend.chats
    assert turns_of(first)[0] == ("system", "Be brief.")
    assert first.template_kwargs == {"enable_thinking": True}
    assert turns_of(second)[0] == ("user", "x")
    assert second.template_kwargs == {}
    assert "Be brief.\n" in session.out


async def test_exit_leaves_at_once() -> None:
    session = in_pipe()
    await session.play("/exit", "never asked")
    assert session.frontend.chats == []


async def test_stats_and_help_are_answers_and_go_to_stdout() -> None:
    session = in_pipe(says("a", "b", "c"))
    await session.play("x", "/stats", "/help")
    assert "answer tokens  3\n" in session.out
    assert "prompt tokens  5, 0 of them cached\n" in session.out
    assert "speed          4.0 tokens/s\n" in session.out
    assert "tiny, context of 100 tokens" in session.out
    for name in ("/reset", "/system", "/set", "/think", "/save", "/load", "/exit"):
        assert name in session.out
    assert session.err == ""


async def test_a_saved_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "chat file.json"
    first = in_pipe(says("B é", thought="hm"))
    await first.play("/system S", "/set seed 3", "/think off", "A", f"/save {path}")
    second = in_pipe(says("D"))
    await second.play(f"/load {path}", "C")
    chat = second.frontend.chats[0]
    assert turns_of(chat) == [("system", "S"), ("user", "A"), ("assistant", "B é"), ("user", "C")]
    assert chat.messages[2].reasoning_content == "hm"
    assert chat.template_kwargs == {"enable_thinking": False}
    assert second.engine.requests[0].sampling.seed == 3
    assert "loaded 2 messages from" in second.err
    assert os.listdir(tmp_path) == ["chat file.json"]


async def test_one_message_is_not_counted_as_several(tmp_path: Path) -> None:
    document = {"format": "ninfer-conversation", "version": 1, "settings": {}}
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**document, "messages": [{"role": "user", "content": "x"}]}))
    session = in_pipe()
    await session.play(f"/load {path}")
    assert session.err == f"loaded 1 message from {path}\n"


async def test_interrupt_gives_up_a_load_that_never_ends_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def read_for_ever(path: Path) -> Conversation:
        has_begun.set()
        may_end.wait(30)
        return Conversation(system="late")

    monkeypatch.setattr(repl_commands, "load_conversation", read_for_ever)
    session = on_terminal(says("Fine."))
    interrupt = asyncio.create_task(_interrupt_after(has_begun))
    await session.play("/load some.json", "hi")
    await interrupt
    assert "given up" in session.out
    assert turns_of(session.frontend.chats[0]) == [("user", "hi")]
    may_end.set()


async def _interrupt_after(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait, 10)
    os.kill(os.getpid(), signal.SIGINT)


async def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    session = in_pipe()
    await session.play(f"/load {path}")
    assert session.err == f"ninfer: error: /load: {path} is longer than 64 MiB\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a saved conversation"),
        ("[" * 100_000, "is nested too deeply"),
        ({"version": 2}, "has version 2, not 1"),
        ({"messages": 3}, "'messages' must be a list"),
        ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"settings": {"temperature": 9}}, "temperature: 9 is out of range"),
        ({"settings": {"warmth": 1}}, "warmth: no such setting"),
        ({"settings": []}, "settings: an object is needed"),
        ({"think": "yes"}, "think: true, false or null is needed"),
    ],
)
async def test_a_bad_file_is_one_clear_line_and_changes_nothing(
    tmp_path: Path, text: str | dict[str, object], message: str
) -> None:
    path = tmp_path / "bad.json"
    if isinstance(text, dict):
        good = {"format": "ninfer-conversation", "version": 1, "messages": [], "settings": {}}
        text = json.dumps({**good, **text})
    path.write_text(text)
    session = in_pipe(says("a"), says("b"))
    await session.play("one", f"/load {path}", "two")
    assert session.err.startswith(f"ninfer: error: /load: {path}") or str(path) in session.err
    assert message in session.err
    assert session.err.count("\n") == 1
    assert len(session.frontend.chats[1].messages) == 3
