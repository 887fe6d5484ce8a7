"""`ninfer serve` as an operator meets it: a real process on a port the system chose."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from ninfer.cli.loading import LoadedModel, LoadProgress, embedded_model_path, load_model
from ninfer.cli.serve import background_loader, is_loopback, with_template_options
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import SequenceSpec
from ninfer.contract.sampling import SamplingParams
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions, SamplingOptions, ServeOptions
from tests.helpers.command import PATIENCE_S, argv_of, clean_environ, ninfer, start_ninfer
from tests.helpers.demo_frontend import chat, demo_frontend, turn


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--port", "0", "--drain-grace", "0", "--model-name", "tiny"]
    with start_ninfer("serve", *flags) as process:
        yield process
        process.kill()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().rstrip("\n")


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_serves_answers_and_drains(
    server: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    url = first_line(server).removeprefix("serving tiny at ")
    assert url.startswith("http://127.0.0.1:")
    assert fetch(f"{url}/health") == {"status": "ok"}
    assert fetch(f"{url}/v1/models")["data"][0]["id"] == "tiny"
    info = fetch(f"{url}/server_info")
    assert info["device"].startswith("cpu (")
    assert info["memory_plan"]["total_bytes"] > 0
    assert info["options"]["max_concurrency"] == 8
    assert {"python", "numpy"} <= set(info["versions"])
    assert fetch(f"{url}/v1/load")["max_running_reqs"] == 8
    answer = fetch(
        f"{url}/v1/chat/completions",
        {
            "model": "any",
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": True},
            "messages": [{"role": "user", "content": "What is 48 + 37?"}],
        },
    )
    message = answer["choices"][0]["message"]
    assert message["content"] == "48 + 37 is 85."
    assert message["reasoning_content"].startswith("48 + 30")
    assert answer["system_fingerprint"].startswith("fp_")
    server.send_signal(number)
    assert server.wait(PATIENCE_S) == 0
    assert server.stderr is not None
    log = server.stderr.read()
    places = [log.find(word) for word in (b"ready: ", b"draining: ", b"stopped\n")]
    assert min(places) >= 0
    assert places == sorted(places)


def test_a_server_that_ignores_interrupts_still_drains_on_sigterm() -> None:
    argv = argv_of("serve", "--port", "0", "--drain-grace", "0", "--model-name", "tiny")
    process = subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environ(),
    )
    with process:
        try:
            assert first_line(process).startswith("serving tiny at ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_a_server_whose_stdout_leads_nowhere_serves_all_the_same(redirection: str) -> None:
    argv = argv_of("serve", "--port", "0", "--drain-grace", "0", "--model-name", "tiny")
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *argv],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clean_environ(),
    )
    with process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith(b"serving tiny at "))
            url = line.decode().strip().removeprefix("serving tiny at ")
            assert fetch(f"{url}/health") == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_taken_port_is_one_line_and_code_2(server: subprocess.Popen[bytes]) -> None:
    port = first_line(server).rpartition(":")[2]
    done = ninfer("serve", "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr.splitlines()[-1]


async def test_a_cancelled_load_ends_at_its_next_object() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    steps: list[int] = []

    def load_blocking(progress: LoadProgress) -> LoadedModel:
        for step in range(100):
            steps.append(step)
            has_begun.set()
            may_go_on.wait(10)
            progress("weights", step, 100)
        raise AssertionError("the load was not stopped")

    load = background_loader(load_blocking, EngineOptions(), SamplingOptions())
    task = asyncio.ensure_future(load())
    await asyncio.to_thread(has_begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == [0]


async def test_a_load_that_ends_as_it_is_cancelled_closes_its_program() -> None:
    options = EngineOptions(max_concurrency=1)
    is_loaded, may_return = threading.Event(), threading.Event()
    loaded: list[LoadedModel] = []

    def load_blocking(progress: LoadProgress) -> LoadedModel:
        source = open_model(embedded_model_path())
        loaded.append(load_model(source, options, SamplingOptions(), progress))
        is_loaded.set()
        may_return.wait(10)
        return loaded[0]

    task = asyncio.ensure_future(background_loader(load_blocking, options, SamplingOptions())())
    await asyncio.to_thread(is_loaded.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    may_return.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    prompt = loaded[0].frontend.prepare_ids((1, 2))
    spec = SequenceSpec("late", prompt, SamplingParams())
    with pytest.raises(InvariantError):
        loaded[0].program.open_sequence(spec)


def test_keys_come_from_the_environment_and_are_shown_nowhere() -> None:
    flags = ["--port", "0", "--drain-grace", "0", "--log-level", "debug"]
    key = "key-from-the-environment"
    with start_ninfer("serve", *flags, environ={"NINFER_API_KEY": key}) as process:
        try:
            url = first_line(process).rpartition(" ")[2]
            assert fetch(f"{url}/health") == {"status": "ok"}
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetch(f"{url}/server_info")
            request = urllib.request.Request(f"{url}/server_info", headers={"x-api-key": key})
            with urllib.request.urlopen(request, timeout=60) as response:
                body = response.read().decode()
            assert key not in body
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None
            assert key not in process.stderr.read().decode()
        finally:
            process.kill()


def test_bodies_are_not_logged_without_a_log() -> None:
    done = ninfer("serve", "--port", "0", "--log-prompts")
    assert done.returncode == 2
    assert "--log-prompts: needs --request-log" in done.stderr


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("fe80::1%eth0", False),
        ("example.org", False),
    ],
)  # fmt: skip
def test_who_reaches_an_address(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


@pytest.mark.parametrize(
    ("flag", "request_value", "seen"),
    [(None, None, ""), (True, None, "True"), (False, None, "False"), (True, False, "False")],
)
async def test_thoughts_are_kept_as_the_option_says_and_the_request_decides(
    flag: bool | None, request_value: bool | None, seen: str
) -> None:
    template = "{% for turn in messages %}{{ turn.content }}{% endfor %}:{{ preserve_thinking }}"
    nothing: Any = None
    model = LoadedModel(
        nothing, demo_frontend(chat_template=template), nothing, nothing, nothing, "cpu"
    )
    served = with_template_options(model, ServeOptions(preserve_thinking=flag))
    kwargs = {} if request_value is None else {"preserve_thinking": request_value}
    prompt = chat(turn("user", "Hi"), template_kwargs=kwargs)
    assert await served.frontend.render_chat(prompt) == f"Hi:{seen}"
