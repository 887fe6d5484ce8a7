"""Items made in a thread, one ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ninfer.program.read_ahead import read_ahead


def test_items_come_in_order_and_one_is_made_ahead() -> None:
    made = [threading.Event() for _ in range(5)]
    threads = set()

    def items() -> Iterator[int]:
        for index, event in enumerate(made):
            threads.add(threading.current_thread())
            event.set()
            yield index

    seen = []
    for item in read_ahead(items()):
        if item + 1 < len(made):
            assert made[item + 1].wait(10.0)
        assert not any(event.is_set() for event in made[item + 2 :])
        seen.append(item)
    assert seen == [0, 1, 2, 3, 4]
    assert threading.main_thread() not in threads


def test_an_error_comes_out_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("damaged")

    ahead = read_ahead(items())
    assert (next(ahead), next(ahead)) == (1, 2)
    with pytest.raises(ValueError, match="damaged"):
        next(ahead)


def test_who_stops_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    stream = read_ahead(iter(range(100)))
    assert next(stream) == 0
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert list(read_ahead(iter(()))) == []
