from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.engine.outstanding import Outstanding, Place


def taken(outstanding: Outstanding) -> Place:
    place = outstanding.take()
    assert place is not None
    return place


def test_no_more_than_the_limit() -> None:
    outstanding = Outstanding(2)
    places = [taken(outstanding) for _ in range(2)]
    assert outstanding.take() is None
    places[0].let_go_response()
    assert outstanding.take() is None
    places[0].let_go_consumer()
    assert outstanding.take() is not None


@pytest.mark.parametrize("is_consumer_first", [True, False])
def test_either_order_frees_once(is_consumer_first: bool) -> None:
    outstanding = Outstanding(1)
    place = taken(outstanding)
    for _ in range(2):
        if is_consumer_first:
            place.let_go_consumer()
    place.let_go_response()
    place.let_go_consumer()
    place.let_go_consumer()
    assert outstanding.num_places == 0
    with pytest.raises(InvariantError):
        place.let_go_response()
    assert outstanding.num_places == 0


async def test_waits_end_with_the_last_response_and_the_last_place() -> None:
    outstanding = Outstanding(2)
    first, second = taken(outstanding), taken(outstanding)
    answered = asyncio.create_task(outstanding.wait_all_answered())
    free = asyncio.create_task(outstanding.wait_all_free())
    first.let_go_response()
    second.let_go_consumer()
    await asyncio.sleep(0)
    assert not answered.done()
    second.let_go_response()
    await answered
    await asyncio.sleep(0)
    assert not free.done()
    first.let_go_consumer()
    await free
    taken(outstanding)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outstanding.wait_all_free(), 0.001)


@given(actions=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_counts_follow_any_order(actions: list[tuple[int, bool]]) -> None:
    outstanding = Outstanding(6)
    places = [taken(outstanding) for _ in range(6)]
    responses: set[int] = set()
    consumers: set[int] = set()
    for index, is_response in actions:
        if is_response and index not in responses:
            places[index].let_go_response()
            responses.add(index)
        elif not is_response:
            places[index].let_go_consumer()
            consumers.add(index)
        assert outstanding.num_unanswered == 6 - len(responses)
        assert outstanding.num_places == 6 - len(responses & consumers)
