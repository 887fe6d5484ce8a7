from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.cli.block_input import is_open_block, turn_text


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("", False),
        ("hello", False),
        ('say """ twice', False),
        ('"""', True),
        ('""""', True),
        ('"""one\ntwo', True),
        ('"""one\ntwo"""', False),
        ('""""""', False),
        ('"""one"""', False),
    ],
)
def test_a_block_is_open_until_it_ends_in_quotes(text: str, is_open: bool) -> None:
    assert is_open_block(text) is is_open


@given(st.text(alphabet=st.characters(exclude_characters='"', exclude_categories=["C", "Z"])))
def test_a_closed_block_is_its_inner_text(inner: str) -> None:
    text = f'"""\n{inner}\nend\n"""\n'
    assert not is_open_block(text)
    assert turn_text(text) == f"{inner}\nend".strip("\n")


def test_lines_keep_their_indentation_inside_a_block_only() -> None:
    assert turn_text("  a line \n") == "a line"
    assert turn_text('"""\n  if x:\n    y\n"""') == "  if x:\n    y"
