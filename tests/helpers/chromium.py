"""A headless Chromium for tests: one process, driven over the DevTools protocol.

    Chromium (a process) <-- websocket -- DevTools -- session --> Tab (its own storage)

A Tab collects what its page complains about; `Tab.complaints` is empty after a good test.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest

REQUIRE: Final = "NINFER_REQUIRE_BROWSER"
PATIENCE_S: Final = 60.0
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_KEYS: Final = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    " ": (32, " "),
    "ArrowDown": (40, ""),
}
_SHIFT: Final = 8


def find_browser() -> str:
    """The program; skips the test where there is none, unless one is required."""
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    reason = "no Chromium in PATH (Debian: apt-get install chromium)"
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1: {reason}")
    pytest.skip(reason)


@contextmanager
def running_chromium() -> Iterator[str]:
    """Start the browser with a fresh profile; the URL of its DevTools."""
    program = find_browser()
    with tempfile.TemporaryDirectory(prefix="ninfer-chromium-", ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={home}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        try:
            yield _devtools_url(process, Path(home) / "DevToolsActivePort")
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _devtools_url(process: subprocess.Popen[bytes], port_file: Path) -> str:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended at once with {process.returncode}")
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.02)
    raise RuntimeError("Chromium did not open its DevTools")


class PageError(AssertionError):
    """A script of the test threw inside the page."""


class DevTools:
    """The connection to a browser; commands are answered in any order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send_str(orjson.dumps(message).decode())
        return await asyncio.wait_for(answer, PATIENCE_S)

    def add(self, session: str, tab: Tab) -> None:
        self._tabs[session] = tab

    async def read(self) -> None:
        async for message in self._socket:
            content = orjson.loads(message.data)
            if "id" in content:
                self._settle(self._answers.pop(content["id"]), content)
            elif (tab := self._tabs.get(content.get("sessionId", ""))) is not None:
                tab.note(content["method"], content["params"])

    def _settle(self, answer: asyncio.Future[dict[str, Any]], content: dict[str, Any]) -> None:
        if answer.done():
            return
        if "error" in content:
            answer.set_exception(RuntimeError(content["error"]["message"]))
        else:
            answer.set_result(content["result"])


class Tab:
    """One page with storage of its own."""

    def __init__(self, devtools: DevTools, session: str) -> None:
        self._devtools = devtools
        self._session = session
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._devtools.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Errors and warnings of the page, its scripts and its policy."""
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    async def open(self, url: str) -> None:
        """Load a page, or the same one again."""
        await self.call("Page.navigate", url="about:blank")
        await self.until("location.href === 'about:blank'")
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", details).get("description", str(details)))
        return result["result"].get("value")

    async def until(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for an expression to hold; navigations in between are no matter."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                if await self.evaluate(f"Boolean({condition})"):
                    return
            except (PageError, RuntimeError) as error:
                last: object = error
            else:
                last = None
            if time.monotonic() > end_s:
                text = await self.evaluate("document.body.innerText")
                raise AssertionError(f"never: {condition} ({last}) in\n{text}")
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        """What is shown of an element."""
        value = await self.evaluate(f"document.querySelector({selector!r}).innerText")
        assert isinstance(value, str)
        return value

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key of the keyboard, down and up."""
        code, text = _KEYS[key]
        common = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": _SHIFT if shift else 0,
        }
        kind = "keyDown" if text else "rawKeyDown"
        await self.call("Input.dispatchKeyEvent", type=kind, text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        """With the mouse, in the middle of an element, so that something may be in the way."""
        box = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **place)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **place)

    async def prefer(self, **features: str) -> None:
        """What the system of the user prefers: color_scheme="dark", reduced_motion="reduce"."""
        listed = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=listed)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    async def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def open_tab(devtools_url: str) -> AsyncIterator[Tab]:
    """A new tab in a context of its own: no storage is shared with other tabs."""
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(devtools_url, max_msg_size=0) as socket,
    ):
        devtools = DevTools(socket)
        reading = asyncio.create_task(devtools.read())
        context = (await devtools.call("Target.createBrowserContext"))["browserContextId"]
        try:
            yield await _new_tab(devtools, context)
        finally:
            await devtools.call("Target.disposeBrowserContext", browserContextId=context)
            reading.cancel()
            await asyncio.wait((reading,))


async def _new_tab(devtools: DevTools, context: str) -> Tab:
    target = await devtools.call("Target.createTarget", url="about:blank", browserContextId=context)
    attached = await devtools.call(
        "Target.attachToTarget", targetId=target["targetId"], flatten=True
    )
    tab = Tab(devtools, attached["sessionId"])
    devtools.add(attached["sessionId"], tab)
    for domain in ("Page", "Runtime", "Log"):
        await tab.call(f"{domain}.enable")
    await tab.resize(1280, 800)
    return tab
