"""Real reverse proxies over the configurations of docs/deploy, on loopback with their own TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pytest

ProxyName: TypeAlias = Literal["nginx", "haproxy"]
DEPLOY: Final = Path(__file__).parents[2] / "docs" / "deploy"
REQUIRE: Final = "NINFER_REQUIRE_PROXY"
REPLICAS: Final = ("127.0.0.1:8081", "127.0.0.1:8082")
_START_S: Final = 30.0
_NGINX_MAIN: Final = """\
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/ninfer.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    port: int
    tls: ssl.SSLContext

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("localhost", self.port, ssl=self.tls)


def require_proxy(name: ProxyName) -> str:
    """Where the program is. Skips without it, or fails when NINFER_REQUIRE_PROXY=1 promises it."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is not None:
        return path
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {name} is not installed")
    pytest.skip(f"{name} is not installed")


@asynccontextmanager
async def running_proxy(
    name: ProxyName, folder: Path, ports: Sequence[int]
) -> AsyncIterator[Proxy]:
    """The documented configuration in front of replicas on `ports`."""
    program, port = require_proxy(name), _free_port()
    await asyncio.to_thread(make_certificate, folder)
    write = _write_nginx if name == "nginx" else _write_haproxy
    arguments = write(folder, port, ports)
    with (folder / "stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            program, *arguments, stdout=subprocess.DEVNULL, stderr=stderr
        )
    try:
        await _wait_for(port, process, folder)
        tls = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        yield Proxy(f"https://localhost:{port}", port, tls)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _write_nginx(folder: Path, port: int, replicas: Sequence[int]) -> list[str]:
    changes = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "server_name llm.example.org": "server_name localhost",
        "/etc/ssl/ninfer/fullchain.pem": f"{folder}/cert.pem",
        "/etc/ssl/ninfer/key.pem": f"{folder}/key.pem",
    }
    (folder / "ninfer.conf").write_text(_changed("nginx.conf", changes, replicas))
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "main.conf").write_text(_NGINX_MAIN.format(folder=folder, user=user))
    return ["-p", str(folder), "-e", f"{folder}/error.log", "-c", str(folder / "main.conf")]


def _write_haproxy(folder: Path, port: int, replicas: Sequence[int]) -> list[str]:
    pem = (folder / "cert.pem").read_text() + (folder / "key.pem").read_text()
    (folder / "llm.pem").write_text(pem)
    changes = {
        "bind :443 ssl": f"bind 127.0.0.1:{port} ssl",
        "/etc/haproxy/llm.pem": f"{folder}/llm.pem",
    }
    (folder / "haproxy.cfg").write_text(_changed("haproxy.cfg", changes, replicas))
    return ["-db", "-f", str(folder / "haproxy.cfg")]


def _changed(name: str, changes: dict[str, str], replicas: Sequence[int]) -> str:
    """A documented configuration with addresses and files of this test, and nothing else."""
    text = (DEPLOY / name).read_text()
    pairs = zip(REPLICAS, (f"127.0.0.1:{replica}" for replica in replicas), strict=True)
    for old, new in {**changes, **dict(pairs)}.items():
        assert text.count(old) == 1, f"{old} in {name}"
        text = text.replace(old, new)
    return text


def make_certificate(folder: Path) -> None:
    """`cert.pem` and `key.pem` of localhost, signed by nobody."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def _wait_for(port: int, process: asyncio.subprocess.Process, folder: Path) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError((folder / "stderr").read_text())
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
