"""`ninfer serve` as an operator meets it: a real process on a port the system chose."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.command import argv_of, clean_environ, ninfer


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv_of("serve", "--port", "0", "--drain-grace", "0", "--model-name", "tiny"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    )
    with process:
        yield process
        process.kill()


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
    server: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert server.stdout is not None
    url = server.stdout.readline().strip().removeprefix("serving tiny at ")
    assert url.startswith("http://127.0.0.1:")
    assert fetch(f"{url}/health") == {"status": "ok"}
    assert fetch(f"{url}/v1/models")["data"][0]["id"] == "tiny"
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
    assert server.wait(30) == 0


def test_a_taken_port_is_one_line_and_code_2(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    port = server.stdout.readline().strip().rpartition(":")[2]
    done = ninfer("serve", "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr.splitlines()[-1]
