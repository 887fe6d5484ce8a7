"""The program as scripts meet it: real processes, the demo model, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import (
    PATIENCE_S,
    argv_of,
    clean_environ,
    ninfer,
    start_ninfer,
    wait_until_read,
)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "ninfer" / "data" / "demo_model"
GOLDEN = ROOT / "tests" / "golden" / "qwen3_5-dense"
QUESTION, ANSWER = "What is 48 + 37?", "48 + 37 is 85."


def error_line(stderr: str) -> str:
    assert stderr.startswith("ninfer: error: ")
    assert stderr.count("\n") == 1
    return stderr.removeprefix("ninfer: error: ").rstrip("\n")


def test_a_piped_chat_is_plain_answers_in_order() -> None:
    turns = f'/think on\n{QUESTION}\n"""\nName three\nfarm animals.\n"""'
    done = ninfer("--temperature", "0", stdin=turns)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == ANSWER
    assert len(lines) > 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "48 + 30 = 78" in done.stderr


def test_chat_takes_broken_bytes_and_an_empty_input() -> None:
    assert ninfer("--temperature", "0", stdin=b"caf\xe9 \xff?\n").returncode == 0
    empty = ninfer(stdin="")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "")


def test_a_chat_longer_than_the_context_says_so_and_goes_on() -> None:
    done = ninfer(
        "--temperature", "0", "--max-context", "256", "--max-tokens", "4",
        stdin="word " * 400 + "\nHello!\n",
    )  # fmt: skip
    assert done.returncode == 0
    assert "maximum context length is 256 tokens" in error_line(done.stderr)
    assert "/reset" in done.stderr
    assert done.stdout.count("\n") == 1


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    with start_ninfer("--max-tokens", "20", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(b"Hello!\n" * 3)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["info", "--json"], ["run", "--prompt", "Hello!"]]
)
def test_a_reader_that_never_read_is_no_failure(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start_ninfer(*arguments, stdout=writer) as process:
        os.close(writer)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_interrupting_a_waiting_pipe_ends_with_130() -> None:
    with start_ninfer("--temperature", "0", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"What is 48 + 37?\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.write(b"and")
        process.stdin.flush()
        wait_until_read(process.stdin)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "--messages", "-"],
        ["score", "--text", "-"],
        ["score", "--ids", "-"],
    ],
)
def test_interrupting_a_read_of_stdin_ends_with_130(arguments: list[str]) -> None:
    with start_ninfer(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"[")
        process.stdin.flush()
        wait_until_read(process.stdin)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_an_interrupt_during_a_piped_answer_ends_with_130() -> None:
    arguments = ["run", "--prompt", "Tell me a story.", "--repetition-penalty", "10"]
    with start_ninfer(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("arguments", [["run", "--prompt", "Tell me a story."], []])
def test_sigterm_ends_the_line_of_a_piped_answer(arguments: list[str]) -> None:
    with start_ninfer(*arguments, "--repetition-penalty", "10", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Tell me a story.\n")
        process.stdin.flush()
        assert process.stdout.read(4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
        assert process.stdout.read().endswith(b"\n")
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "module", ["ninfer.cli.main", "ninfer.cli.console", "argparse", "ninfer.cli.info", "numpy"]
)
def test_an_interrupt_while_the_program_is_imported_is_quiet(module: str) -> None:
    code = (
        "import signal, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupter())\nsys.argv = ['ninfer', 'info']\n"
        "from ninfer.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, env=clean_environ()
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interrupt_in_the_import_of_a_library_is_no_error_of_the_library() -> None:
    """NumPy's C code turns an interrupt into an ImportError of its own."""
    code = (
        "import signal, sys\n"
        "class Library:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name != 'numpy': return\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt: raise ImportError('PLEASE READ THIS')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Library())\nsys.argv = ['ninfer', 'info']\n"
        "from ninfer.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, env=clean_environ()
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def in_shell(*arguments: str, redirection: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *argv_of(*arguments)],
        input=b"Hello!\n", capture_output=True, env=clean_environ(), timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_closed_stdin_is_an_empty_one() -> None:
    assert in_shell("--max-tokens", "4", redirection="<&-") == (0, "", "")
    code, _, stderr = in_shell("score", "--text", "-", redirection="<&-")
    assert code == 4
    assert "empty" in error_line(stderr)


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["serve", "--help"],
        ["info"],
        ["info", "--json"],
        ["--max-tokens", "4"],
        ["run", "--max-tokens", "4"],
        ["run", "--max-tokens", "4", "--json"],
        ["score", "--text", "-", "--json"],
    ],
    ids=" ".join,
)
def test_stdout_that_cannot_be_written_is_one_line_and_code_6(
    arguments: list[str], redirection: str, reason: str
) -> None:
    code, _, stderr = in_shell(*arguments, redirection=redirection)
    assert code == 6
    assert error_line(stderr) == f"stdout: cannot write: {reason}"


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_stderr_that_cannot_be_written_is_done_without(redirection: str) -> None:
    code, stdout, _ = in_shell("run", "--max-tokens", "4", redirection=redirection)
    assert code == 0
    assert stdout
    assert in_shell("info", "nowhere", redirection=redirection) == (3, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["score", "--ids", "{ids}", "--logits", "{place}.npz"],
        ["convert", "--out", "{place}.ninfer"],
        ["bench", "--record", "{place}.json"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", ["{folder}/none/x", "{folder}/" + "x" * 300])
def test_a_file_that_cannot_be_written_is_one_line_and_code_6(
    arguments: list[str], place: str, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2]")
    place = place.format(folder=tmp_path)
    done = ninfer(*(argument.format(ids=ids, place=place) for argument in arguments))
    assert done.returncode == 6
    assert error_line(done.stderr).startswith(f"{arguments[-2]}: cannot write {place}")
    assert done.stdout == ""


def test_a_folder_of_kernels_that_cannot_be_written_is_code_6(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = ninfer("kernels", "build", "--arch", "sm_90a", "--jobs", "1", "--out", str(blocker))
    assert done.returncode == 6
    assert error_line(done.stderr).startswith(f"--out: cannot write {blocker}")


def test_run_streams_the_answer_to_stdout_and_the_rest_to_stderr() -> None:
    done = ninfer("run", "--prompt", QUESTION, "--think", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout == ANSWER + "\n"
    assert "48 + 30 = 78" in done.stderr
    assert "tokens/s" in done.stderr


def test_run_prints_one_object_as_json() -> None:
    done = ninfer("run", "--json", "--think", "--temperature", "0", stdin=QUESTION + "\n")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["text"] == ANSWER
    assert answer["reasoning"].startswith("48 + 30")
    assert answer["finish_reason"] == "stop_token"
    usage = answer["usage"]
    assert usage["completion_tokens"] > usage["reasoning_tokens"] > 0
    assert answer["timings"]["total_s"] > 0
    assert _names(_example_of_the_guide()) == _names(answer)


def _example_of_the_guide() -> object:
    guide = (ROOT / "docs" / "user-guide.md").read_text(encoding="utf-8")
    lines = guide.partition('    {"model": ')[2].partition("\n\n")[0]
    return json.loads('{"model": ' + re.sub(r": \.\.\.", ": 0", lines))


def _names(value: object) -> object:
    """The names of an object's members, and theirs."""
    if not isinstance(value, dict):
        return None
    return {name: _names(member) for name, member in value.items()}


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_run_answers_a_messages_file(tmp_path: Path, is_wrapped: bool) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": messages} if is_wrapped else messages))
    done = ninfer("run", "--messages", str(path), "--think", "--temperature", "0")
    assert done.stdout == ANSWER + "\n"


def test_raw_text_is_continued_without_a_template() -> None:
    raw = "<|im_start|>user\nWhat is 48 + 37?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    done = ninfer("run", "--raw", "--temperature", "0", "--prompt", raw)
    assert done.returncode == 0
    assert done.stdout.startswith("48 + 30 = 78")
    assert "</think>" in done.stdout or ANSWER in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", "a", "--messages", "b"], "--messages: goes without --prompt"),
        (["--prompt", "a", "--raw", "--think"], "--think: goes without --raw"),
        ([""], "MODEL: the name is empty"),
        (["--messages", "nowhere.json"], "--messages: cannot read nowhere.json"),
        (["--messages", "-"], "--messages: - is not JSON"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--executor", "tpu"], "--executor: 'tpu' is not one of auto, cpu, cuda"),
        (["--prompt", "a", "--max-context", "999999"], "--max-context"),
        (["--colour"], "--colour"),
    ],
)
def test_a_bad_option_is_one_line_and_code_2(arguments: list[str], named: str) -> None:
    done = ninfer("run", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert named in error_line(done.stderr)


@pytest.mark.parametrize(
    "arguments", [[], ["--prompt", ""], ["--prompt", " \n"], ["--raw"], ["--raw", "--prompt", ""]]
)
def test_a_prompt_without_text_is_code_2(arguments: list[str]) -> None:
    done = ninfer("run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert error_line(done.stderr) == "--prompt: the prompt is empty"


def test_a_bad_variable_is_named() -> None:
    done = ninfer("info", environ={"NINFER_MAX_CONCURRENCY": "many"})
    assert done.returncode == 2
    assert error_line(done.stderr) == "NINFER_MAX_CONCURRENCY: 'many' is not a whole number"


def test_a_bad_log_level_is_named_by_every_command() -> None:
    done = ninfer("info", environ={"NINFER_LOG_LEVEL": "loud"})
    assert done.returncode == 2
    assert error_line(done.stderr).startswith("NINFER_LOG_LEVEL: 'loud' is not one of debug, ")
    assert ninfer("--version", environ={"NINFER_LOG_LEVEL": "loud"}).returncode == 0


def test_a_prompt_wins_over_a_messages_file_of_the_environment() -> None:
    done = ninfer(
        "run", "--prompt", QUESTION, "--think", "--temperature", "0",
        environ={"NINFER_MESSAGES": "nowhere.json", "NINFER_RAW": ""},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ANSWER + "\n")


def test_the_traceback_is_there_for_those_who_ask() -> None:
    done = ninfer("info", "nowhere", environ={"NINFER_LOG_LEVEL": "debug"})
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ninfer: error: nowhere: ")


@pytest.mark.parametrize("command", ["chat", "serve", "run", "info", "score", "convert"])
def test_a_model_that_is_not_there_is_one_line_and_code_3(command: str, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2]")
    needed = {"run": ["--prompt", "x"], "score": ["--ids", str(ids)],
              "convert": ["--out", str(tmp_path / "x.ninfer")]}  # fmt: skip
    done = ninfer(command, "no/such/model", *needed.get(command, []))
    assert done.returncode == 3
    assert error_line(done.stderr).startswith("no/such/model: ")
    assert done.stdout == ""


def test_a_damaged_model_is_named_with_its_file(tmp_path: Path) -> None:
    for source in DEMO.iterdir():
        if source.name != "model.safetensors":
            (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:10_000])
    done = ninfer("run", str(tmp_path), "--prompt", "x")
    assert done.returncode == 3
    assert "model.safetensors" in error_line(done.stderr)


def test_a_model_without_a_tokenizer_cannot_chat_or_run() -> None:
    for arguments in (["chat"], ["run", "--prompt", "x"]):
        done = ninfer(*arguments, str(GOLDEN / "model"))
        assert done.returncode == 4
        assert "tokenizer" in error_line(done.stderr)


def test_an_answer_that_takes_too_long_is_code_5() -> None:
    done = ninfer("run", "--prompt", "Tell me a story.", "--timeout", "0.001")
    assert done.returncode == 5
    assert "ninfer: error: " in done.stderr


def test_info_says_what_a_model_is_and_needs() -> None:
    text = ninfer("info").stdout
    for expected in (
        "Qwen3_5ForCausalLM",
        "15.30 M",
        "3 attention, 9 gated DeltaNet",
        "2048 tokens",
    ):
        assert expected in text
    facts = json.loads(ninfer("info", "--json", "--max-concurrency", "2").stdout)
    assert facts["num_parameters"] == facts["parameters"]["text"] + facts["parameters"]["mtp"]
    assert facts["has_mtp"] is True
    assert facts["has_vision"] is False
    assert facts["memory_plan"]["capacity"]["max_concurrency"] == 2
    assert facts["memory_plan"]["total_bytes"] <= facts["memory_plan"]["budget_bytes"]


def test_info_describes_a_model_that_does_not_fit() -> None:
    done = ninfer("info", "--json", "--memory-budget", "1MiB")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["memory_plan"] is None
    assert "--memory-budget" in facts["memory_plan_error"]


def test_score_gives_the_logits_of_an_independent_implementation(tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "golden.npz")
    name = max((key.split("/")[0] for key in golden if key.endswith("/logits")
                and golden[key].shape[0] > 1), key=lambda item: int(item[1:]))  # fmt: skip
    token_ids, expected = golden[f"{name}/input_ids"], golden[f"{name}/logits"]
    ids, out = tmp_path / "ids.json", tmp_path / "logits.npz"
    ids.write_text(json.dumps(token_ids.tolist()))
    done = ninfer(
        "score", str(GOLDEN / "model"), "--ids", str(ids), "--logits", str(out),
        "--window", "64", "--stride", "64", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logits = np.load(out)["logits"]
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-3
    result = json.loads(done.stdout)
    shifted = expected[:-1].astype(np.float64)
    log_total = np.log(np.exp(shifted).sum(axis=1))
    nlls = log_total - shifted[np.arange(len(token_ids) - 1), token_ids[1:]]
    assert result["token_nlls"][0] is None
    assert np.allclose(result["token_nlls"][1:], nlls, atol=1e-3)
    assert result["mean_nll"] == pytest.approx(nlls.mean(), abs=1e-3)
    assert result["scored_tokens"] == len(token_ids) - 1


def test_score_of_text_parses_special_tokens_and_prints_a_table(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("<|im_start|>user\nHello!<|im_end|>\n")
    done = ninfer("score", "--text", str(text))
    assert done.returncode == 0
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert int(rows["tokens"]) < 12
    assert float(rows["perplexity"]) == pytest.approx(
        np.exp(float(rows["mean"].split()[-1])), rel=1e-4
    )
    assert (rows["window"], rows["stride"]) == ("2048", "1024")


def test_a_single_token_has_no_score(tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1]")
    rows = dict(line.rsplit(maxsplit=1) for line in ninfer("score", "--ids", str(ids)).stdout
                .splitlines() if "elapsed" not in line)  # fmt: skip
    assert (rows["mean nll"], rows["perplexity"], rows["scored tokens"]) == ("-", "-", "0")


@pytest.mark.parametrize(
    ("ids", "flags", "code", "message"),
    [
        ("[1, 2.5]", [], 2, "entry 1 is 2.5"),
        ("{}", [], 2, "a JSON list of token ids"),
        ("[1", [], 2, "is not JSON"),
        ("[]", [], 4, "token"),
        ("[1, 999999]", [], 4, "999999 is outside"),
        ("[1, 2]", ["--window", "9999999"], 2, "--window"),
        ("[1, 2]", ["--window", "8", "--stride", "9"], 2, "--stride"),
        ("[1, 2]", ["--text", "x"], 2, "--text"),
        ("[1, 2]", ["--logits", "/no/such/place.npz"], 6, "--logits"),
        ("[1, 2]", ["--logits", "-"], 2, "--logits"),
    ],
)
def test_bad_input_of_score_is_one_line(
    tmp_path: Path, ids: str, flags: list[str], code: int, message: str
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(ids)
    done = ninfer("score", "--ids", str(path), *flags)
    assert done.returncode == code
    assert message in error_line(done.stderr)


def test_a_converted_model_answers_identically(tmp_path: Path) -> None:
    out = tmp_path / "demo.ninfer"
    done = ninfer("convert", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    assert os.listdir(tmp_path) == ["demo.ninfer"]
    flags = ["run", "--prompt", "Tell me a story.", "--seed", "7", "--max-tokens", "40"]
    original, converted = ninfer(*flags), ninfer(flags[0], str(out), *flags[1:])
    assert original.stdout == converted.stdout != ""
    refused = ninfer("convert", "--out", str(out))
    assert refused.returncode == 2
    assert "--force" in error_line(refused.stderr)
    assert ninfer("convert", "--out", str(out), "--force").returncode == 0
    onto_itself = ninfer("convert", str(out), "--out", str(out), "--force")
    assert onto_itself.returncode == 2
    assert error_line(onto_itself.stderr).startswith(f"--out: {out} is a file of the model")


def test_convert_wants_to_know_where() -> None:
    done = ninfer("convert")
    assert done.returncode == 2
    assert "--out" in error_line(done.stderr)


def test_help_imports_neither_numpy_nor_a_server() -> None:
    code = (
        "import sys\nfrom ninfer.cli.main import main\nassert main(['--help']) == 0\n"
        "print([name for name in ('numpy', 'aiohttp', 'prompt_toolkit') if name in sys.modules])"
    )
    argv = argv_of()
    done = subprocess.run(
        [*argv[: argv.index("-m")], "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_piped_chat_imports_no_server_editor_or_device_library() -> None:
    code = (
        "import sys\nfrom ninfer.cli.main import main\nassert main([]) == 0\n"
        "names = ('aiohttp', 'prompt_toolkit', 'cupy', 'torch')\n"
        "print([name for name in names if name in sys.modules])"
    )
    argv = argv_of()
    done = subprocess.run(
        [*argv[: argv.index("-m")], "-c", code],
        input="", capture_output=True, text=True, check=True, env=clean_environ(),
    )  # fmt: skip
    assert done.stdout == "[]\n"
