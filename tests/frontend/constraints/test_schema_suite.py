"""The public JSON Schema Test Suite: nothing invalid is allowed, and what is refused is known."""

from __future__ import annotations

import re

import pytest

from bench.check_schema_suite import SUITE, FileReport, run_draft

REASONS = re.compile(
    r"(?:keyword|format) that cannot be enforced|which cannot be enforced|nothing is fetched"
    r"|names nothing|allows no value|may hold for one value|patterns overlap"
    r"|'multipleOf' has too many digits|has more remainders"
)
MOST_NOT_WRITTEN = {"draft2020-12": 39, "draft4": 6, "draft7": 12}
"""Numbers in other spellings (1.0 for 1), members in another order, leap seconds, quoted local
parts of addresses, IPv6 with an embedded IPv4 address."""

pytestmark = pytest.mark.no_cover


@pytest.mark.parametrize("draft", sorted(MOST_NOT_WRITTEN))
def test_no_invalid_instance_is_accepted(draft: str) -> None:
    reports = run_draft(SUITE / f"{draft}.json")
    assert [place for report in reports for place in report.wrong] == []
    assert [reason for reason in _reasons(reports) if not REASONS.search(reason)] == []
    assert sum(len(report.not_written) for report in reports) <= MOST_NOT_WRITTEN[draft]
    assert sum(report.num_instances for report in reports) > 450


def _reasons(reports: list[FileReport]) -> list[str]:
    return [reason for report in reports for reason in report.refused.values()]
