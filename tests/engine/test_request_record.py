from __future__ import annotations

import itertools

import pytest

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import FinishReason, GenerationRequest, Timings
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.event_stream import EventStream
from ninfer.engine.outstanding import Outstanding
from ninfer.engine.request_checks import OutputBudget
from ninfer.engine.request_record import Phase, RequestRecord
from tests.helpers.engine_rig import prompt_of
from tests.helpers.scripted_session import ScriptedSession

LEGAL = {
    "WAITING": {"MATERIALIZING", "PREFILL", "DONE"},
    "MATERIALIZING": {"PREFILL", "REPLAY", "DECODE_READY", "PAUSED", "DONE"},
    "PREFILL": {"DECODE_READY", "PAUSED", "MODEL_FINISHED"},
    "REPLAY": {"DECODE_READY", "PAUSED", "MODEL_FINISHED"},
    "DECODE_READY": {"PAUSED", "MODEL_FINISHED"},
    "PAUSED": {"MATERIALIZING", "PREFILL", "REPLAY", "DECODE_READY", "DONE"},
    "MODEL_FINISHED": {"DONE"},
    "DONE": set(),
}
PATHS = {
    Phase.WAITING: [],
    Phase.MATERIALIZING: [Phase.MATERIALIZING],
    Phase.PREFILL: [Phase.PREFILL],
    Phase.REPLAY: [Phase.PREFILL, Phase.PAUSED, Phase.REPLAY],
    Phase.DECODE_READY: [Phase.PREFILL, Phase.DECODE_READY],
    Phase.PAUSED: [Phase.PREFILL, Phase.PAUSED],
    Phase.MODEL_FINISHED: [Phase.PREFILL, Phase.MODEL_FINISHED],
    Phase.DONE: [Phase.DONE],
}


def record_in(phase: Phase) -> RequestRecord:
    place = Outstanding(1).take()
    assert place is not None
    record = RequestRecord(
        ticket=0,
        request=GenerationRequest("r1", prompt_of(3), SamplingParams(), ScriptedSession(), 4),
        budget=OutputBudget(4, FinishReason.OUTPUT_LIMIT, 1),
        stream=EventStream(),
        place=place,
        submitted_s=10.0,
    )
    for step in PATHS[phase]:
        record.move(step)
    return record


@pytest.mark.parametrize(("start", "to"), [*itertools.product(Phase, Phase)])
def test_every_pair_of_phases(start: Phase, to: Phase) -> None:
    record = record_in(start)
    if to.name in LEGAL[start.name]:
        record.move(to)
        assert record.phase is to
        return
    with pytest.raises(InvariantError, match=f"r1 cannot go from {start.name} to {to.name}"):
        record.move(to)
    assert record.phase is start


def test_sequence_of_a_request_without_lane_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="r1"):
        _ = record_in(Phase.WAITING).resident


def test_ledger_of_a_request_that_was_not_paused_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="r1"):
        _ = record_in(Phase.PREFILL).ledger


@pytest.mark.parametrize("phase", Phase)
def test_units_run_in_prefill_replay_and_decode_only(phase: Phase) -> None:
    running = {Phase.PREFILL, Phase.REPLAY, Phase.DECODE_READY}
    assert record_in(phase).is_resident == (phase in running)


@pytest.mark.parametrize(
    ("admitted", "first", "last", "expected"),
    [
        (None, None, None, Timings(7.0, 0.0, 0.0, 7.0)),
        (12.0, None, None, Timings(2.0, 5.0, 0.0, 7.0)),
        (12.0, 13.0, 13.0, Timings(2.0, 1.0, 0.0, 7.0)),
        (12.0, 13.0, 16.5, Timings(2.0, 1.0, 3.5, 7.0)),
    ],
)
def test_timings_of_phases_never_reached_are_zero(
    admitted: float | None, first: float | None, last: float | None, expected: Timings
) -> None:
    record = record_in(Phase.WAITING)
    record.admitted_s, record.first_token_s, record.last_token_s = admitted, first, last
    assert record.timings(17.0) == expected
