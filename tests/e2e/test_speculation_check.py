"""`bench.check_speculation --device`, over the CPU executor: all prompts in every setting, one
executor for many of them, and what it says when an answer differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.check_speculation import exit_code, print_end, setting_line
from bench.common.speculation_full import FullPlan, check_full
from bench.common.speculation_settings import HOST_BLOCKS, MOST_ROWS, full_settings
from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from tests.helpers.guided_rig import MAX_CONTEXT, GuidedModel, load_guided_model
from tests.helpers.kept_executors import SizedExecutor, part_of
from tests.helpers.lent_executor import LentExecutor
from tests.helpers.speculation_matrix import KINDS, LEAST_PAGES, Setting, Source

pytestmark = pytest.mark.no_cover

CAPACITY = Capacity(
    max_concurrency=MOST_ROWS,
    max_context=MAX_CONTEXT,
    num_pages=8 * MOST_ROWS,
    num_slots=2 * MOST_ROWS + 3,
    prefill_chunk=128,
    num_host_blocks=HOST_BLOCKS + 1,
)


class CpuExecutors:
    """Builds them as large as any setting needs; `built` are those that there were."""

    def __init__(self, model: GuidedModel) -> None:
        self._model = model
        self.built: list[tuple[int, bool]] = []

    def build(self, draft_tokens: int, has_draft_model: bool) -> SizedExecutor:
        self.built.append((draft_tokens, has_draft_model))
        capacity = replace(CAPACITY, max_draft_tokens=draft_tokens, has_draft_model=has_draft_model)
        return SizedExecutor(self._model.executor(capacity), capacity)


class WrongOnce(LentExecutor):
    """The first token of its second answer is another one."""

    def __init__(self, kept: SizedExecutor) -> None:
        super().__init__(kept.executor, kept.capacity.num_host_blocks)
        self._lender = kept.executor
        self._num_answers = 0

    async def prefill(self, row: UnitRow) -> RowOutput:
        output = await super().prefill(row)
        if output.token is None:
            return output
        self._num_answers += 1
        if self._num_answers != 2:
            return output
        return replace(output, token=replace(output.token, token_id=output.token.token_id ^ 1))

    def close(self) -> None:
        self._lender.close()


class FaultyExecutors(CpuExecutors):
    def build(self, draft_tokens: int, has_draft_model: bool) -> SizedExecutor:
        kept = super().build(draft_tokens, has_draft_model)
        return replace(kept, executor=WrongOnce(kept)) if draft_tokens > 0 else kept


@pytest.fixture(scope="module")
def model() -> GuidedModel:
    return load_guided_model()


async def records(
    model: GuidedModel, executors: CpuExecutors, plan: FullPlan
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    await check_full(model, executors.build, plan, found.append)
    return found


async def test_all_prompts_are_compared_in_every_setting(model: GuidedModel) -> None:
    executors = CpuExecutors(model)
    plan = FullPlan(len(KINDS), 8, lengths=(3, 2), row_counts=(1, 8))
    plain, *_, last = await records(model, executors, plan)
    assert executors.built == [(0, False), (3, True), (2, True), (2, False)]
    assert plain["rows"] == []
    assert plain["plain_tokens"] > 100
    assert last["settings"] == last["settings_wanted"] == len(last["rows"]) == 4
    assert last["answers"] == last["cancelled"] == 4 * len(KINDS)
    assert last["tokens"] == 4 * plain["plain_tokens"]
    assert last["differing"] == []
    assert exit_code(last) == 0
    assert {item["by"] for item in last["drafts"] if item["drafted"]} >= {"right", "wrong", "mtp"}


async def test_an_answer_that_differs_is_named(
    model: GuidedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = FullPlan(3, 6, lengths=(2,), row_counts=(2,))
    *_, last = await records(model, FaultyExecutors(model), plan)
    (differing,) = last["differing"]
    assert (differing["draft_tokens"], differing["lanes"], differing["prompt"]) == (2, 2, 1)
    assert setting_line(last["rows"][0]).startswith("K=2 B=2 mtp, 16 pages")
    print_end(last)
    listed, total = capsys.readouterr().out.splitlines()
    assert listed.startswith("differs: K=2 B=2 mtp")
    assert listed.endswith("prompt 1")
    assert "3 cancelled: 1 differ" in total
    assert exit_code(last) == 1


class BrokenExecutor(WrongOnce):
    async def prefill(self, row: UnitRow) -> RowOutput:
        return replace(await super().prefill(row), token=None, is_finite=False)


class BrokenExecutors(CpuExecutors):
    def build(self, draft_tokens: int, has_draft_model: bool) -> SizedExecutor:
        kept = super().build(draft_tokens, has_draft_model)
        return replace(kept, executor=BrokenExecutor(kept))


async def test_plain_answers_that_fail_are_no_answers(model: GuidedModel) -> None:
    with pytest.raises(SystemExit, match="prompt 0 fails without drafts"):
        await records(model, BrokenExecutors(model), FullPlan(1, 2))


async def test_no_setting_is_begun_when_the_time_is_over(model: GuidedModel) -> None:
    plan = FullPlan(1, 2, most_seconds=0.0)
    (found,) = await records(model, CpuExecutors(model), plan)
    assert (found["settings"], found["settings_wanted"]) == (0, 56)


def test_every_length_and_batch_size_is_there_once() -> None:
    settings = list(full_settings())
    some = list(full_settings((1, 3), (8,)))
    assert [setting for setting in settings if setting in some] == some
    assert [(setting.draft_tokens, setting.lanes) for setting in some] == [(3, 8), (1, 8)]
    assert len({(setting.draft_tokens, setting.lanes) for setting in settings}) == 56
    assert [setting.draft_tokens for setting in settings[::8]] == [3, 7, 15, 1, 2, 4, 5]
    assert [setting.lanes for setting in settings[:3]] == [1, 8, 2]
    assert {setting.source(0) for setting in settings} == set(Source)


@pytest.mark.parametrize("has_draft_model", [True, False])
@pytest.mark.parametrize("host_blocks", [0, HOST_BLOCKS])
def test_many_rows_share_few_pages(has_draft_model: bool, host_blocks: int) -> None:
    crowded = [
        setting
        for setting in full_settings()
        if setting.lanes > 5 and setting.num_pages == LEAST_PAGES
    ]
    kinds = {(setting.has_draft_model, setting.host_blocks) for setting in crowded}
    assert (has_draft_model, host_blocks) in kinds


@pytest.mark.parametrize(
    "setting",
    [Setting(1, 9), Setting(1, 8, num_pages=65), Setting(1, 8, host_blocks=HOST_BLOCKS + 2)],
)
def test_a_setting_has_no_more_than_there_is(setting: Setting) -> None:
    with pytest.raises(InvariantError, match="no part of"):
        part_of(CAPACITY, setting)
