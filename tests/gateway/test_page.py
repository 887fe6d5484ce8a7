"""How the page and its files are served; what it does in a browser stands in tests/browser."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from ninfer.gateway.page.assets import load_assets
from ninfer.gateway.page.routes import SECURITY_HEADERS, accepts_html
from ninfer.options import ServeOptions
from tests.helpers.gateway_rig import HOST, PATIENT_LIMITS, Rig, running_gateway
from tests.helpers.model_paths import REPOSITORY

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NAMES = sorted(load_assets())


async def test_browsers_get_the_page_and_others_json(rig: Rig) -> None:
    page = await rig.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body.startswith(b"<!doctype html>")
    probe = await rig.get("/")
    assert probe.json()["name"] == "ninfer"
    assert page.headers["vary"] == probe.headers["vary"] == "Accept"
    assert (await rig.get("/v1", headers=BROWSER)).json() == probe.json()


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        ("text/html", True),
        ("Text/HTML; charset=utf-8", True),
        ("application/json, text/html;q=0.1", True),
        ("text/html;q=0", False),
        ("text/html; q=0.000", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("", False),
        (",;,;q=", False),
    ],
)
def test_who_wants_html(accept: str, is_html: bool) -> None:
    assert accepts_html({"Accept": accept}) is is_html


@pytest.mark.parametrize("name", NAMES)
async def test_files_are_served_with_their_type(rig: Rig, name: str) -> None:
    answer = await rig.get(f"/page/{name}")
    assert answer.status == 200
    assert (
        answer.body == resources.files("ninfer").joinpath(f"gateway/page/files/{name}").read_bytes()
    )
    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg", "html": "text/html"}
    assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
async def test_every_answer_is_locked_down_and_checked_again(rig: Rig, path: str) -> None:
    answer = await rig.get(path, headers=BROWSER)
    for name, value in SECURITY_HEADERS.items():
        assert answer.headers[name.lower()] == value
    assert answer.headers["cache-control"] == "no-cache"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/", "/page/style.css"])
async def test_a_browser_that_has_a_file_is_told_so(rig: Rig, path: str) -> None:
    etag = (await rig.get(path, headers=BROWSER)).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = await rig.get(path, headers={**BROWSER, "If-None-Match": known})
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
    answer = await rig.get(path, headers={**BROWSER, "If-None-Match": '"other"'})
    assert answer.status == 200


async def test_head_has_the_headers_alone(rig: Rig) -> None:
    for path in ("/", "/page/app.js"):
        whole = await rig.get(path, headers=BROWSER)
        head = await rig.request("HEAD", path, headers=BROWSER)
        assert (head.status, head.body) == (200, b"")
        for name in ("content-type", "content-length", "etag"):
            assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize("name", ["nothing.js", "../routes.py", "..%2Froutes.py", "__init__.py"])
async def test_nothing_else_of_the_package_is_served(rig: Rig, name: str) -> None:
    answer = await rig.get(f"/page/{name}")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert (await rig.post("/page/app.js", {})).status == 405


async def test_the_page_needs_no_key_but_its_requests_do() -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",))
    async with running_gateway(limits=PATIENT_LIMITS, options=options) as rig:
        for path in ("/", "/page/app.js"):
            assert (await rig.get(path, headers=BROWSER)).status == 200
        assert (await rig.get("/v1/status")).status == 401
        key = {"Authorization": "Bearer secret"}
        assert (await rig.get("/v1/status", headers=key)).status == 200


def test_every_file_goes_into_the_package() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["ninfer"]
    for name in NAMES:
        path = Path("gateway/page/files") / name
        assert (REPOSITORY / "ninfer" / path).is_file()
        assert any(path.match(pattern) for pattern in patterns), name


def test_the_page_names_nothing_from_elsewhere() -> None:
    for name, asset in load_assets().items():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(src|href)=["'](https?:)?//|url\(|@import|\bimport\(""", text), (
            name
        )
        assert "innerHTML" not in text, name
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in NAMES, f"{name} imports {module}"
    index = load_assets()["index.html"].body.decode()
    for name in re.findall(r'(?:href|src)="page/([^"]+)"', index):
        assert name in NAMES
    assert not re.search(r"<style|style=|\son\w+=|<script>", index), "the policy forbids these"
