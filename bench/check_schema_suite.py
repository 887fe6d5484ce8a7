"""The public JSON Schema Test Suite against the grammars: what they take, refuse and leave out.

    python -m bench.check_schema_suite [PATH ...] [--json bench/results/NAME.json]

A path is a draft's folder of a checkout of the suite, or one of the files here that hold a draft
(tests/data/json-schema-test-suite; all of them by default). Every schema is taken strictly. An
instance is written with its members in the order of the schema. That an invalid one is accepted is
an error; a valid one that is not is a value that answers are never written as.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.common.record import host, write_record
from ninfer.contract.errors import RequestError
from tests.helpers.grammar_rig import accepts, schema_matcher

SUITE: Final = Path(__file__).resolve().parents[1] / "tests/data/json-schema-test-suite"


@dataclass(slots=True)
class FileReport:
    """Of one file of a draft. `wrong`: invalid instances that were accepted; `not_written`: valid
    ones that were not."""

    draft: str
    file: str
    num_groups: int = 0
    num_instances: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    not_written: list[str] = field(default_factory=list)


def run_draft(path: Path) -> list[FileReport]:
    return [_run_file(path.stem, name, groups) for name, groups in _files(path)]


def _files(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if path.is_file():
        yield from json.loads(path.read_text()).items()
        return
    for file in sorted(path.rglob("*.json")):
        yield str(file.relative_to(path).with_suffix("")), json.loads(file.read_text())


def _run_file(draft: str, name: str, groups: list[dict[str, Any]]) -> FileReport:
    report = FileReport(draft, name, num_groups=len(groups))
    for group in groups:
        schema = group["schema"]
        try:
            start = schema_matcher(schema)
        except RequestError as error:
            report.refused[group["description"]] = str(error)
            continue
        for test in group["tests"]:
            report.num_instances += 1
            is_accepted = accepts(start, written(schema, test["data"]))
            if is_accepted and not test["valid"]:
                report.wrong.append(f"{group['description']}: {test['description']}")
            elif test["valid"] and not is_accepted:
                report.not_written.append(f"{group['description']}: {test['description']}")
    return report


def written(schema: Any, value: Any) -> str:
    """A value as an answer has it: members in the order of the schema."""
    if isinstance(value, dict) and isinstance(schema, Mapping):
        properties = schema.get("properties", {})
        known = properties if isinstance(properties, dict) else {}
        names = dict.fromkeys([*(name for name in known if name in value), *value])
        value = {name: value[name] for name in names}
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(SUITE.glob("*.json")))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reports = [report for path in arguments.paths for report in run_draft(path)]
    for report in reports:
        print(
            f"{report.draft:14} {report.file:28} {report.num_groups:3} groups,"
            f" {len(report.refused):3} refused; {report.num_instances:4} instances,"
            f" {len(report.not_written):2} not written, {len(report.wrong)} wrong"
        )
        for place in report.wrong:
            print(f"    wrong: {place}")
    if arguments.json is not None:
        rows = [asdict(report) for report in reports]
        write_record(arguments.json, {**host(), "rows": rows})
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
