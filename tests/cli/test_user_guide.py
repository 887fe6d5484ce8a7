"""The user guide names every command, option, variable and exit code there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.parser import COMMANDS, Command
from ninfer.options import environment_name_of, flag_of, specs_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "user-guide.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_command_and_its_options_are_described(command: Command) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert command.usage in text
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    for cls in command.options:
        for name, spec in specs_of(cls).items():
            shown = spec.help.replace("|", "\\|")
            assert any(
                flag_of(name) in row and f"`{environment_name_of(name)}`" in row and shown in row
                for row in rows
            ), f"{cls.__name__}.{name}"


def test_exit_codes_are_described() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"\n| {code.value} | " in text
