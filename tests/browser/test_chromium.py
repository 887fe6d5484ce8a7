"""A missing browser skips its tests, unless one is required."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.chromium import REQUIRE, find_browser


def test_no_browser_skips_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        find_browser()


def test_no_browser_fails_where_one_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=REQUIRE):
        find_browser()
