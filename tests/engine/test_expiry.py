from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer.engine.expiry import Expiry, ExpiryQueue

_entries = st.lists(
    st.tuples(
        st.floats(0, 100, allow_nan=False), st.integers(0, 20), st.sampled_from(list(Expiry))
    ),
    max_size=40,
)


@given(entries=_entries, now=st.floats(0, 100, allow_nan=False))
def test_exactly_what_is_due_comes_out_earliest_first(
    entries: list[tuple[float, int, Expiry]], now: float
) -> None:
    queue = ExpiryQueue()
    for entry in entries:
        queue.add(*entry)
    due = sorted(entry for entry in entries if entry[0] <= now)
    assert list(queue.take_due(now)) == [(ticket, kind) for _, ticket, kind in due]
    assert len(queue) == len(entries) - len(due)
    assert list(queue.take_due(now)) == []


def test_entries_of_ended_tickets_do_not_pile_up() -> None:
    queue = ExpiryQueue()
    for ticket in range(10_000):
        queue.add(1e9 + ticket, ticket, Expiry.DEADLINE)
        queue.prune(2, lambda live, newest=ticket: live > newest - 2)  # type: ignore[misc]
        assert len(queue) < 200
    assert [ticket for ticket, _ in queue.take_due(2e9)][-2:] == [9998, 9999]
