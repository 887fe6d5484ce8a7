"""A sealed thought comes back whole or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.gateway.responses.sealed_text import seal, unseal

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_round_trip(text: str) -> None:
    assert unseal(seal(text)) == text


@given(TEXTS, st.integers(0, 1000), st.characters(min_codepoint=33, max_codepoint=126))
def test_any_changed_character_is_noticed(text: str, position: int, character: str) -> None:
    blob = seal(text)
    position %= len(blob)
    changed = blob[:position] + character + blob[position + 1 :]
    assert unseal(changed) in (None, text)


@pytest.mark.parametrize("blob", ["", "nr1.", "nr1.AAAA", "nr1.\u00e9", "gAAAAAB_x", "nr1.AA A="])
def test_foreign_blobs_do_not_open(blob: str) -> None:
    assert unseal(blob) is None


def test_a_cut_blob_does_not_open() -> None:
    blob = seal("a long enough thought")
    assert all(unseal(blob[:stop]) is None for stop in range(len(blob)))


def test_another_process_opens_it() -> None:
    code = "import sys; from ninfer.gateway.responses.sealed_text import unseal;"
    code += "sys.stdout.buffer.write(unseal(sys.argv[1]).encode())"
    done = subprocess.run(
        [sys.executable, "-c", code, seal("th\u00f6ught")], capture_output=True, check=True
    )
    assert done.stdout.decode() == "th\u00f6ught"
