"""What is kept, what is dropped, and that the books are right in any order of events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from ninfer.contract.errors import RequestError
from ninfer.gateway.responses.item_pages import item_page
from ninfer.gateway.responses.store import ResponseStore, StoredResponse, Turn, turn_items
from ninfer.gateway.responses.stored_items import stored_input, stored_response


def response(response_id: str, *texts: str) -> dict[str, Any]:
    output = [
        {"type": "message", "id": f"msg_{response_id}_{index}", "content": text}
        for index, text in enumerate(texts)
    ]
    return {"id": response_id, "output": output}


def make(response_id: str, before: Turn | None = None, said: str = "hi") -> StoredResponse:
    item = {"role": "user", "content": said}
    return store_turn(response_id, before, [item], response(response_id, "yes"))


def store_turn(response_id: str, before: Turn | None, said: Any, answer: Any) -> StoredResponse:
    return stored_response(before, stored_input(response_id, said), answer, "key")


def known(store: ResponseStore, *item_ids: str) -> set[str]:
    return {item_id for item_id in item_ids if store.turn_of(item_id) is not None}


def ids_of(turn: Turn) -> list[str]:
    return [item["id"] for part in turn.path() for item in turn_items(part)]


def test_a_chain_is_read_from_its_start() -> None:
    store = ResponseStore()
    first = make("resp_a")
    second = make("resp_b", first.turn)
    store.put("resp_a", first)
    store.put("resp_b", second)
    assert ids_of(store.get("resp_b").turn) == [
        "msg_a_0",
        "msg_resp_a_0",
        "msg_b_0",
        "msg_resp_b_0",
    ]
    assert json.loads(store.get("resp_a").body) == response("resp_a", "yes")


def test_items_are_stored_whole() -> None:
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "type": "message", "id": "mine"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "something_new"},
        {"role": "user"},
    ]
    turn = store_turn("resp_a", None, said, response("resp_a")).turn
    part = {"type": "input_text", "text": "hi"}
    own = {"type": "output_text", "text": "yes", "annotations": []}
    message = {"type": "message", "status": "completed"}
    assert turn_items(turn) == [
        {"role": "user", "content": [part], "id": "msg_a_0", **message},
        {"role": "assistant", "content": [own], "id": "mine", **message},
        {**said[2], "id": "fc_a_2"},
        {"type": "something_new", "id": "item_a_3"},
        {"role": "user", "content": [], "id": "msg_a_4", **message},
    ]


def test_a_call_that_was_cut_off_is_no_history() -> None:
    cut = {"type": "function_call", "id": "fc_1", "status": "incomplete", "arguments": "{"}
    said = {"type": "message", "id": "msg_1", "status": "incomplete", "content": []}
    stored = store_turn("resp_a", None, [], {"id": "resp_a", "output": [said, cut]})
    assert turn_items(stored.turn) == [said]
    assert json.loads(stored.body)["output"] == [said, cut]


def test_unknown_ids_are_not_found() -> None:
    store = ResponseStore()
    for act in (
        lambda: store.get("resp_x", "previous_response_id"),
        lambda: store.delete("resp_x"),
    ):
        with pytest.raises(RequestError) as caught:
            act()
        assert caught.value.code == "response_not_found"


def test_the_least_recently_used_is_dropped() -> None:
    store = ResponseStore(max_responses=2)
    store.put("resp_a", make("resp_a"))
    store.put("resp_b", make("resp_b"))
    store.get("resp_a")
    store.put("resp_c", make("resp_c"))
    assert len(store) == 2
    store.get("resp_a")
    with pytest.raises(RequestError):
        store.get("resp_b")
    assert known(store, "msg_b_0", "msg_a_0", "msg_resp_c_0") == {"msg_a_0", "msg_resp_c_0"}


def test_bytes_are_bounded_and_one_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_bytes=10_000)
    for name in "abcdefgh":
        store.put(f"resp_{name}", make(f"resp_{name}", said="x" * 2000))
        assert 0 < store.num_bytes <= 10_000
    assert 2 <= len(store) <= 4
    store.put("resp_z", make("resp_z", said="x" * 20_000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_deleted_response_leaves_the_conversation_that_goes_on() -> None:
    store = ResponseStore()
    first = make("resp_a")
    second = make("resp_b", first.turn)
    store.put("resp_a", first)
    store.put("resp_b", second)
    store.delete("resp_a")
    assert known(store, "msg_a_0")
    store.delete("resp_b")
    assert not known(store, "msg_a_0")
    assert store.num_bytes == 0


def test_a_turn_that_was_given_up_comes_back_with_the_next_response() -> None:
    store = ResponseStore()
    first = make("resp_a")
    store.put("resp_a", first)
    before = store.num_bytes
    store.delete("resp_a")
    second = make("resp_b", first.turn)
    store.put("resp_b", second)
    assert known(store, "msg_a_0", "msg_b_0") == {"msg_a_0", "msg_b_0"}
    assert store.num_bytes > before


def test_a_long_chain_is_dropped_at_once() -> None:
    store = ResponseStore(max_responses=1)
    turn: Turn | None = None
    for index in range(3000):
        stored = make(f"resp_{index}", turn)
        store.put(f"resp_{index}", stored)
        turn = stored.turn
    store.delete("resp_2999")
    assert store.num_bytes == 0


def test_pages_of_input_items() -> None:
    first = make("resp_a")
    said = [{"role": "user", "content": str(index)} for index in range(25)]
    turn = store_turn("resp_b", first.turn, said, response("resp_b", "x")).turn
    newest = item_page(turn, {})
    assert [item["id"] for item in newest["data"]] == [f"msg_b_{n}" for n in range(24, 4, -1)]
    assert newest["has_more"] is True
    assert (newest["first_id"], newest["last_id"]) == ("msg_b_24", "msg_b_5")
    rest = item_page(turn, {"after": "msg_b_5", "limit": "100"})
    assert [item["id"] for item in rest["data"]][-2:] == ["msg_resp_a_0", "msg_a_0"]
    assert rest["has_more"] is False
    oldest = item_page(turn, {"order": "asc", "limit": "1"})
    assert [item["id"] for item in oldest["data"]] == ["msg_a_0"]
    end = item_page(turn, {"order": "asc", "after": "msg_b_24"})
    assert end == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ({"limit": "0"}, "invalid_value", "limit"),
        ({"limit": "101"}, "invalid_value", "limit"),
        ({"limit": "x"}, "invalid_type", "limit"),
        ({"limit": "-1"}, "invalid_type", "limit"),
        ({"limit": "\u0665"}, "invalid_type", "limit"),
        ({"limit": "9" * 5000}, "invalid_type", "limit"),
        ({"order": "up"}, "invalid_value", "order"),
        ({"after": "msg_x"}, "invalid_value", "after"),
    ],
)
def test_bad_queries_are_named(query: dict[str, str], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        item_page(make("resp_a").turn, query)
    assert (caught.value.code, caught.value.param) == (code, param)


class StoreMachine(RuleBasedStateMachine):
    """Responses come, go on from any earlier one, also one that is gone, and are deleted."""

    turns: Bundle[Turn] = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(max_responses=5, max_bytes=12_000)
        self.known: dict[str, StoredResponse] = {}
        self.count = 0

    @rule(target=turns, size=st.integers(0, 3000))
    def begin(self, size: int) -> Turn:
        return self._put(None, size)

    @rule(target=turns, before=turns, size=st.integers(0, 3000))
    def go_on(self, before: Turn, size: int) -> Turn:
        return self._put(before, size)

    @rule(index=st.integers(0, 50))
    def use_or_delete(self, index: int) -> None:
        name = f"resp_{index}"
        if name in self._alive():
            assert self.store.get(name) is self.known[name]
            if index % 2:
                self.store.delete(name)

    def _put(self, before: Turn | None, size: int) -> Turn:
        name = f"resp_{self.count}"
        self.count += 1
        stored = make(name, before, "x" * size)
        self.known[name] = stored
        self.store.put(name, stored)
        return stored.turn

    def _alive(self) -> dict[str, StoredResponse]:
        alive = {}
        for name, stored in self.known.items():
            try:
                self.store.get(name)
            except RequestError:
                continue
            alive[name] = stored
        return alive

    @invariant()
    def books_are_right(self) -> None:
        alive = self._alive()
        turns = {id(turn): turn for stored in alive.values() for turn in stored.turn.path()}
        bodies = sum(len(stored.body) for stored in alive.values())
        assert self.store.num_bytes == bodies + sum(turn.num_bytes for turn in turns.values())
        assert len(self.store) == len(alive) <= 5
        assert self.store.num_bytes <= 12_000
        wanted = [item_id for turn in turns.values() for item_id in turn.item_ids]
        every = [f"msg_{index}_0" for index in range(self.count)]
        assert known(self.store, *wanted, *every) == set(wanted)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=20)
