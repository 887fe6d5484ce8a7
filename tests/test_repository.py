"""Promises the repository makes about itself."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import ninfer

ROOT = Path(__file__).resolve().parents[1]
TEST_COMMAND = (
    'python3 -m venv .venv && .venv/bin/pip install -q -e ".[dev]" && .venv/bin/python -m pytest'
)
CHAT_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/python -m ninfer"
)


def test_readme_opens_with_the_two_commands() -> None:
    top = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert CHAT_COMMAND in top
    assert TEST_COMMAND in top


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()


def test_changelog_and_package_agree_on_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ninfer.__version__
    assert f"## [{ninfer.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_tracked_text_names_a_home_or_a_registry() -> None:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    needles = ("/" + "root/", "/" + "home/", "pypi" + ".org", "--extra-" + "index-url")
    found = [
        (name, needle)
        for name in listing
        for needle in needles
        if not name.endswith((".safetensors", ".npz", "LICENSE"))
        and needle in (ROOT / name).read_text(errors="replace")
    ]
    assert found == []


def test_python_files_of_the_product_stay_readable_in_one_sitting() -> None:
    """A module past 700 lines has more than one noun in it; split it at a seam."""
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "ninfer").rglob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > 700} == {}
