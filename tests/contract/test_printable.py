from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.contract.printable import MAX_CHARACTERS, printable


@pytest.mark.parametrize("text", ["", "model.layers.0", "größe 模型 ✓", "a b"])
def test_what_can_be_shown_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Ja", r"\x1b[2Ja"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b\x7f\0", r"\x9b\x7f\x00"),
        ("\u202egnp", r"\u202egnp"),
        ("\u2028", r"\u2028"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_moves_the_cursor_or_breaks_the_line_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_keeps_both_ends() -> None:
    shown = printable("a" * 10_000 + "b" * 10_000)
    assert len(shown) < MAX_CHARACTERS + 10
    assert shown.startswith("aaa")
    assert shown.endswith("bbb")


def test_all_parts_of_a_model_file_error_are_printable() -> None:
    error = ModelFileError(Path("m\x1b]0;x\x07"), "a\x1b[31m", "found 'b\r'")
    assert str(error).isprintable()
    assert error.message == str(error)
    assert (error.path, error.field) == (Path("m\x1b]0;x\x07"), "a\x1b[31m")
