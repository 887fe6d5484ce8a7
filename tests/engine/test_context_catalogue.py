"""Catalogue, tree of pages and memory of evictions against plain lists of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ninfer.contract.cache import CheckpointId, CheckpointKind
from ninfer.contract.errors import InvariantError
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.catalogue import Catalogue
from ninfer.engine.context.demand import Demand
from ninfer.engine.context.evicted import Evicted
from ninfer.engine.context.identity import Identity, identity_of
from ninfer.engine.context.notes import note_of, read_note
from ninfer.engine.context.page_tree import PageTree
from ninfer.engine.context.records import Entry
from ninfer.engine.context.sessions import Sessions, common_tokens
from tests.helpers.context_rig import tokens

END = CheckpointKind.SESSION_END
LENGTH = 200


def identity(ids: tuple[int, ...], salt: str = "") -> Identity:
    return identity_of(PreparedPrompt(np.array(ids, np.int32)), salt)


class CatalogueMachine(RuleBasedStateMachine):
    """Histories that part from each other anywhere, also within a page."""

    @initialize()
    def start(self) -> None:
        self.tree = PageTree()
        self.catalogue = Catalogue(self.tree)
        self.entries: dict[tuple[int, ...], Entry] = {}
        self.histories = [tokens(LENGTH)]
        self.last_id = 0

    @rule(index=st.integers(0, 50), position=st.integers(0, LENGTH - 1), seed=st.integers(0, 9))
    def branch(self, index: int, position: int, seed: int) -> None:
        base = self.histories[index % len(self.histories)]
        self.histories.append((*base[:position], *tokens(LENGTH - position, seed)))

    @rule(index=st.integers(0, 50), frontier=st.integers(1, LENGTH))
    def add(self, index: int, frontier: int) -> None:
        history = self.histories[index % len(self.histories)]
        checkpoint = CheckpointId(self.last_id)
        self.last_id += 1
        if history[:frontier] in self.entries:
            with pytest.raises(InvariantError):
                self.catalogue.add(checkpoint, identity(history), frontier, END, None, 0)
            return
        entry = self.catalogue.add(checkpoint, identity(history), frontier, END, None, 0)
        self.entries[history[:frontier]] = entry

    @rule(index=st.integers(0, 50))
    def remove(self, index: int) -> None:
        if self.entries:
            key = list(self.entries)[index % len(self.entries)]
            self.catalogue.remove(self.entries.pop(key))

    @rule(index=st.integers(0, 50), limit=st.integers(0, LENGTH))
    def look_up(self, index: int, limit: int) -> None:
        history = self.histories[index % len(self.histories)]
        known = identity(history)
        path = self.tree.path(known)
        expected = [
            self.entries[key]
            for key in sorted(self.entries, key=len)
            if len(key) <= limit and history[: len(key)] == key
        ]
        assert self.catalogue.prefixes(path, known, limit) == expected
        found = self.catalogue.find(path, known, limit)
        assert found is self.entries.get(history[:limit])

    @rule(index=st.integers(0, 50))
    def share_pages(self, index: int) -> None:
        history = self.histories[index % len(self.histories)]
        expected = {}
        for key, entry in self.entries.items():
            count = 0
            while count < min(len(key), LENGTH) and key[count] == history[count]:
                count += 1
            if count >= PAGE_TOKENS:
                expected[entry.checkpoint] = count // PAGE_TOKENS
        found = self.catalogue.sharing(self.tree.path(identity(history)))
        assert {e.checkpoint: n for e, n in found if n > 0} == expected

    @invariant()
    def forest_is_right(self) -> None:
        for key, entry in self.entries.items():
            shorter = [k for k in self.entries if len(k) < len(key) and key[: len(k)] == k]
            parent = self.entries[max(shorter, key=len)] if shorter else None
            assert entry.parent is parent
            assert entry.marginal_tokens == len(key) - (parent.frontier if parent else 0)
            for child in entry.children:
                assert child.parent is entry
        roots = sum(entry.parent is None for entry in self.entries.values())
        children = sum(len(entry.children) for entry in self.entries.values())
        assert roots + children == len(self.entries) == len(self.catalogue)

    @invariant()
    def pages_are_held_once(self) -> None:
        pages = {
            key[: (index + 1) * PAGE_TOKENS]
            for key in self.entries
            for index in range(len(key) // PAGE_TOKENS)
        }
        assert self.tree.num_nodes == len(pages)
        assert self.tree.num_bytes == 4 * PAGE_TOKENS * len(pages)

    @invariant()
    def notes_bring_the_identity_back(self) -> None:
        for key, entry in self.entries.items():
            read = read_note(note_of(entry), len(key))
            assert read is not None
            assert read.identity.digest(len(key)) == entry.digest
            assert read.identity.pages == identity(key).pages


CatalogueMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestCatalogueMachine = CatalogueMachine.TestCase


def catalogue_of(*histories: tuple[int, ...]) -> tuple[PageTree, list[Entry]]:
    tree = PageTree()
    catalogue = Catalogue(tree)
    return tree, [
        catalogue.add(CheckpointId(index), identity(ids), len(ids), END, None, 0)
        for index, ids in enumerate(histories)
    ]


def test_evictions_are_found_by_their_tokens_alone() -> None:
    _, entries = catalogue_of(tokens(100), tokens(128), tokens(130))
    evicted = Evicted()
    for entry in entries:
        evicted.add(entry)
    long, other = identity(tokens(300)), identity((*tokens(99), 96, *tokens(200, 5)))
    assert evicted.has_between(long, 0, 299)
    assert evicted.has_between(long, 128, 130)
    assert not evicted.has_between(long, 130, 299)
    assert not evicted.has_between(long, 100, 127)
    assert not evicted.has_between(long, 0, 99)
    assert not evicted.has_between(other, 0, 299)
    evicted.discard(entries[2].digest)
    assert not evicted.has_between(long, 128, 299)


def test_only_the_newest_evictions_are_remembered() -> None:
    histories = [tokens(100 + index) for index in range(6)]
    _, entries = catalogue_of(*histories)
    evicted = Evicted(max_evicted=4)
    for entry in [*entries[:4], entries[0], *entries[4:]]:
        evicted.add(entry)
    assert len(evicted) == 4
    known = identity(tokens(300))
    found = [evicted.has_between(known, 99 + index, 100 + index) for index in range(6)]
    assert found == [True, False, False, True, True, True]


def test_demand_is_observed_with_the_second_session() -> None:
    demand = Demand(max_demands=2)
    demand.note(b"a", 1)
    demand.note(b"a", 1)
    assert not demand.is_observed(b"a")
    demand.note(b"a", 2)
    demand.note(b"a", 3)
    assert demand.is_observed(b"a")
    demand.note(b"b", 1)
    demand.note(b"a", 1)
    demand.note(b"c", 1)
    assert demand.is_observed(b"a")
    assert len(demand) == 2


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 128, 150, 199])
@pytest.mark.parametrize("num_tokens", [64, 100, 190])
def test_common_tokens_with_a_history(position: int, num_tokens: int) -> None:
    tree = PageTree()
    sessions = Sessions(tree)
    history = identity(tokens(num_tokens))
    session = sessions.session_of(history, None, None, 0)
    sessions.publish(session, history, ())
    base = tokens(200)
    prompt = identity((*base[:position], base[position] + 1, *base[position + 1 :]))
    path = tree.path(prompt)
    assert common_tokens(prompt, path, session) == min(position, num_tokens)


def test_pages_of_a_session_are_given_back_with_its_next_history() -> None:
    tree = PageTree()
    sessions = Sessions(tree)
    session = sessions.session_of(identity(tokens(200)), None, "chat", 0)
    sessions.publish(session, identity(tokens(200)), ())
    sessions.publish(session, identity((*tokens(64), *tokens(64, 1))), ())
    assert tree.num_nodes == 2
    assert sessions.forget_oldest(is_bare=False)
    assert (tree.num_nodes, tree.num_bytes, len(sessions)) == (0, 0, 0)
    assert not sessions.forget_oldest(is_bare=False)
    sessions.publish(session, identity(tokens(200)), ())
    assert len(sessions) == 1


def test_sessions_are_bounded() -> None:
    tree = PageTree()
    sessions = Sessions(tree, max_sessions=3)
    for seed in range(10):
        history = identity(tokens(100, seed))
        sessions.publish(sessions.session_of(history, None, None, 0), history, ())
    assert len(sessions) == 3
    assert tree.num_nodes == 3


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "xyz"},
        {"salt": "ab"},
        {"kind": "no kind"},
        {"tokens": "!"},
        {"tokens": "AAAA"},
        {"plain": False},
    ],
)
def test_a_note_that_was_damaged_is_of_no_use(change: dict[str, object]) -> None:
    _, (entry,) = catalogue_of(tokens(100))
    note = note_of(entry)
    assert read_note(note, 100) is not None
    assert read_note({**note, **change}, 100) is None
    assert read_note(note, 99) is None
    for name in ("salt", "kind", "tokens", "plain", "shared"):
        assert read_note({k: v for k, v in note.items() if k != name}, 100) is None


def test_a_note_keeps_positions_and_media() -> None:
    positions = np.tile(np.arange(100, dtype=np.int32), (3, 1))
    positions[:, 70:] -= 5
    prompt = PreparedPrompt(np.array(tokens(100), np.int32), positions, -5)
    tree = PageTree()
    known = identity_of(prompt, "tenant")
    entry = Catalogue(tree).add(CheckpointId(1), known, 90, END, None, 0)
    read = read_note(note_of(entry), 90)
    assert read is not None
    assert read.identity.root == known.root
    assert read.identity.digest(90) == known.digest(90)


def test_a_page_is_dropped_once() -> None:
    tree = PageTree()
    node = tree.hold(identity(tokens(128)), 2)
    tree.drop(node)
    with pytest.raises(InvariantError):
        tree.drop(node)
