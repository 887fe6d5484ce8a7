"""A filled template is the frame that would have been made for the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.gateway.frame_template import FrameTemplate
from ninfer.gateway.sse import data_frame


def frame_of(text: str) -> bytes:
    return data_frame({"model": 'a "name"', "choices": [{"delta": {"content": text}}], "n": None})


@given(st.text())
def test_filled_template_is_the_frame(text: str) -> None:
    assert FrameTemplate(frame_of).fill(text) == frame_of(text)


def test_text_must_have_one_place() -> None:
    with pytest.raises(InvariantError):
        FrameTemplate(lambda text: data_frame([text, text]))
    with pytest.raises(InvariantError):
        FrameTemplate(lambda _: data_frame([]))
