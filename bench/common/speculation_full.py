"""All prompts in every setting, over executors that stay open from one setting to the next.

plain answers -> settings, one by one, until the time is over -> a record after each
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.speculation_record import figures, setting_row
from bench.common.speculation_settings import FULL_LENGTHS, FULL_ROWS, full_settings
from tests.helpers.guided_rig import GuidedAnswer, GuidedModel
from tests.helpers.kept_executors import BuildExecutor, KeptExecutors
from tests.helpers.speculation_matrix import Matrix, Setting, Tally, cases

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class FullPlan:
    """What is to be checked; no setting is begun `most_seconds` after the start or later."""

    num_prompts: int = 200
    num_tokens: int = 200
    lengths: Sequence[int] = FULL_LENGTHS
    row_counts: Sequence[int] = FULL_ROWS
    most_seconds: float = math.inf


async def check_full(
    model: GuidedModel, build: BuildExecutor, plan: FullPlan, report: Report
) -> None:
    """`report` is told of everything so far after the plain answers and after each setting."""
    executors = KeptExecutors(model.source.config, build)
    matrix = Matrix(model, cases(plan.num_prompts, plan.num_tokens), executors.engine)
    try:
        await _FullCheck(matrix, plan, report).run()
    finally:
        executors.close()


class _FullCheck:
    def __init__(self, matrix: Matrix, plan: FullPlan, report: Report) -> None:
        self._matrix = matrix
        self._plan = plan
        self._report = report
        self._settings = list(full_settings(plan.lengths, plan.row_counts))
        self._started = time.monotonic()
        self._total = Tally()
        self._rows: list[dict[str, Any]] = []

    async def run(self) -> None:
        await self._matrix.ask_plain()
        _require_answers(self._matrix.plain)
        self._report(self._record())
        for setting in self._settings:
            if self._seconds >= self._plan.most_seconds:
                break
            await self._check(setting)
            self._report(self._record())

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    async def _check(self, setting: Setting) -> None:
        tally, started = Tally(), self._seconds
        await self._matrix.check(setting, range(self._plan.num_prompts), tally)
        self._total.add(tally)
        self._rows.append(setting_row(setting, tally, self._seconds - started))

    def _record(self) -> dict[str, Any]:
        """Each row is a setting that was checked."""
        return {
            "prompts": self._plan.num_prompts,
            "tokens_a_prompt": self._plan.num_tokens,
            "plain_tokens": sum(len(item.tokens) for item in self._matrix.plain),
            "settings_wanted": len(self._settings),
            **figures(self._total),
            "seconds": round(self._seconds, 1),
            "rows": list(self._rows),
        }


def _require_answers(plain: Sequence[GuidedAnswer]) -> None:
    """Failures are alike and show nothing."""
    for index, item in enumerate(plain):
        if item.error is not None:
            raise SystemExit(f"prompt {index} fails without drafts: {item.error}")
