"""ContextCache over a real Program: what is kept, where requests start, what goes first."""

from __future__ import annotations

import pytest

from ninfer.contract.cache import CacheUse, CheckpointKind, MissReason, Tier
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Amounts, TransferKind
from ninfer.contract.prompt import MediaSpan
from ninfer.engine.context.limits import CacheLimits
from ninfer.engine.context.sessions import MAX_PER_KEY
from tests.helpers.context_rig import ContextRig, prompt_of, tokens
from tests.helpers.memory_disk import MemoryDisk

STABLE = CheckpointKind.STABLE_PREFIX
CLOSURE = CheckpointKind.TURN_CLOSURE
REPLAY = CheckpointKind.RESPONSE_REPLAY
TAIL = CheckpointKind.PROMPT_TAIL
ANCHOR = CheckpointKind.LONG_ANCHOR
END = CheckpointKind.SESSION_END


class KeptDisk(MemoryDisk):
    """Files that outlive a Program, until nothing can be read any more."""

    def reopen(self) -> None:
        self.found = tuple(file for file, _ in self._files.values())

    def break_down(self) -> None:
        self._failures = 1.0


def disk() -> KeptDisk:
    return KeptDisk(0, max_files=64, failures=0.0)


def drop_memory(rig: ContextRig) -> None:
    """Only what is on disk stays."""
    while rig.cache.relieve(Amounts(pages=1, slots=1)):
        pass
    while rig.cache.relieve(Amounts(host_blocks=1)):
        pass


async def test_the_next_turn_starts_where_the_session_ended() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200), num_output=10, key="chat")
    assert first.use == CacheUse(miss=MissReason.NO_ENTRY)
    second = await rig.serve((*first.history, *tokens(30, seed=1)), key="chat")
    assert second.use == CacheUse(209, END, Tier.DEVICE)


async def test_without_a_key_the_tokens_tell_the_session() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200), num_output=10)
    second = await rig.serve((*first.history, *tokens(30, seed=1)))
    assert second.use == CacheUse(209, END, Tier.DEVICE)


async def test_the_last_prompt_token_is_always_computed() -> None:
    rig = ContextRig()
    await rig.serve(tokens(200), places={100: CLOSURE, 199: TAIL})
    assert (await rig.serve(tokens(200))).use == CacheUse(199, TAIL, Tier.DEVICE)
    assert (await rig.serve(tokens(199))).use.num_tokens == 100


@pytest.mark.parametrize("kind", [STABLE, CLOSURE, REPLAY, TAIL, ANCHOR])
async def test_each_kind_is_captured_where_it_is_wanted(kind: CheckpointKind) -> None:
    rig = ContextRig()
    await rig.serve(tokens(300), places={150: kind})
    other = (*tokens(150), *tokens(100, seed=5))
    assert (await rig.serve(other)).use.num_tokens == 150
    assert rig.cache.metrics.hits == {(kind, Tier.DEVICE): 1}
    assert rig.cache.metrics.hit_tokens == {(kind, Tier.DEVICE): 150}
    assert rig.cache.metrics.captures[kind] == 1


async def test_salts_keep_tenants_apart() -> None:
    rig = ContextRig()
    served = await rig.serve(tokens(200), salt="a")
    assert (await rig.serve(served.history, salt="b")).use.miss is MissReason.NO_ENTRY
    assert (await rig.serve((*served.history, 1), salt="a")).use.num_tokens == 201


async def test_another_image_at_the_same_tokens_is_no_hit() -> None:
    rig = ContextRig()
    ids = tokens(200)
    first, second = (
        prompt_of(ids, {150: CLOSURE}, media=(MediaSpan(100, 110, digest, (1, 2, 5)),))
        for digest in (b"a" * 32, b"b" * 32)
    )
    await rig.serve(first)
    use = (await rig.serve(second)).use
    assert (use.num_tokens, use.first_difference) == (0, 100)
    assert (await rig.serve(first)).use.num_tokens == 150


async def test_short_prompts_leave_nothing() -> None:
    rig = ContextRig()
    assert (await rig.serve(tokens(40), places={30: STABLE})).use.miss is MissReason.TOO_SHORT
    assert rig.program.occupancy().num_checkpoints == 0


async def test_a_place_that_has_a_checkpoint_is_not_captured_again() -> None:
    rig = ContextRig()
    await rig.serve(tokens(300), places={150: STABLE})
    ticket = rig.arrive((*tokens(150), *tokens(150, seed=4)), places={150: STABLE, 250: CLOSURE})
    rig.cache.bound(ticket, await rig.choose(ticket))
    assert rig.cache.stops(ticket) == (250,)


async def test_of_many_anchors_the_last_four_are_wanted() -> None:
    rig = ContextRig()
    places = dict.fromkeys(range(100, 800, 100), ANCHOR)
    ticket = rig.arrive(tokens(900), places=places)
    rig.cache.bound(ticket, await rig.choose(ticket))
    assert rig.cache.stops(ticket) == (400, 500, 600, 700)


async def test_an_older_request_that_ends_later_does_not_take_the_session() -> None:
    rig = ContextRig(lanes=2)
    base = await rig.serve(tokens(200), key="chat")
    older = await rig.start((*base.history, *tokens(20, seed=1)), key="chat")
    newer = await rig.start((*base.history, *tokens(20, seed=2)), key="chat")
    newest = await rig.end(newer, 5)
    late = await rig.end(older, 5)
    assert (await rig.serve((*newest.history, 1), key="chat")).use.kind is END
    use = (await rig.serve((*late.history, 1), key="chat")).use
    assert use.num_tokens == len(base.history) - 1


async def test_a_cancelled_request_leaves_its_captures() -> None:
    rig = ContextRig()
    running = await rig.start(tokens(300), places={299: REPLAY})
    rig.cancel(running)
    assert (await rig.serve(tokens(300))).use.num_tokens == 299


async def test_a_pinned_source_is_not_released() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200))
    ticket = rig.arrive((*first.history, 1))
    choice = rig.cache.choose(ticket)
    assert choice.source is not None
    assert not rig.cache.relieve(Amounts(pages=1))
    assert rig.cache.reclaimable() == Amounts()
    rig.cache.flush()
    rig.program.checkpoint(choice.source.checkpoint)
    rig.cache.unpin(ticket)
    assert rig.cache.reclaimable() == Amounts(pages=4, slots=1)
    assert rig.cache.relieve(Amounts(pages=1))
    assert rig.program.occupancy().num_checkpoints == 0
    assert not rig.cache.relieve(Amounts(pages=1))


async def test_a_second_choice_replaces_the_first_pin() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200))
    ticket = rig.arrive((*first.history, 1))
    rig.cache.choose(ticket)
    rig.cache.choose(ticket)
    rig.cache.left(ticket)
    assert rig.cache.relieve(Amounts(slots=1))


async def test_relief_takes_a_copy_that_is_elsewhere_and_keeps_the_checkpoint() -> None:
    rig = ContextRig(pages=64, slots=6, host_blocks=64)
    first = await rig.serve(tokens(400))
    await rig.serve(tokens(700, seed=1))
    await rig.serve(tokens(800, seed=2))
    assert TransferKind.DEMOTE in await rig.idle()
    while rig.cache.relieve(Amounts(pages=1)):
        pass
    use = (await rig.serve((*first.history, 1))).use
    assert (use.num_tokens, use.tier) == (401, Tier.HOST)
    assert (await rig.serve((*first.history, 2))).use.tier is Tier.DEVICE


async def test_what_was_given_up_is_a_miss_of_its_own() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200), key="chat")
    while rig.cache.relieve(Amounts(pages=1)):
        pass
    second = await rig.serve((*first.history, 1), key="chat")
    assert second.use == CacheUse(miss=MissReason.EVICTED)
    assert rig.cache.metrics.evictions[Tier.DEVICE] == 1
    again = (await rig.serve((*second.history, 2), key="chat")).use
    assert again == CacheUse(204, END, Tier.DEVICE)


async def test_a_flush_leaves_nothing_and_no_memory_of_it() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(200), key="chat", places={100: STABLE})
    rig.cache.flush()
    occupancy = rig.program.occupancy()
    assert (occupancy.num_checkpoints, occupancy.pages_used, occupancy.slots_used) == (0, 0, 0)
    holdings = rig.cache.holdings()
    assert (holdings.num_entries, holdings.id_bytes, holdings.num_sessions) == (0, 0, 0)
    use = (await rig.serve((*first.history, 1), key="chat")).use
    assert use.miss is MissReason.NO_ENTRY


async def test_superseded_checkpoints_go_first() -> None:
    rig = ContextRig()
    places = {200: REPLAY}
    first = await rig.serve(tokens(201), num_output=20, key="a", places=places)
    other = await rig.serve(tokens(80, seed=7), key="b")
    second = await rig.serve((*first.history, *tokens(50, seed=1)), num_output=5, key="a")
    assert rig.cache.relieve(Amounts(slots=1))
    assert rig.cache.relieve(Amounts(slots=1))
    assert (await rig.serve((*second.history, 1), key="a")).use.kind is END
    assert (await rig.serve((*other.history, 1), key="b")).use.kind is END


async def test_places_of_the_newest_prompt_are_not_superseded() -> None:
    rig = ContextRig()
    closure = {150: CLOSURE}
    first = await rig.serve(tokens(200), num_output=20, key="a", places=closure)
    await rig.serve((*first.history, *tokens(60, seed=1)), key="a", places=closure)
    assert rig.cache.relieve(Amounts(slots=1))
    assert rig.cache.relieve(Amounts(slots=1))
    edited = (*tokens(200)[:150], *tokens(40, seed=3))
    assert (await rig.serve(edited, key="a")).use.num_tokens == 150


async def test_the_least_recovery_cost_goes_first() -> None:
    rig = ContextRig()
    long = await rig.serve(tokens(900, seed=1))
    short = await rig.serve(tokens(100, seed=2))
    assert rig.cache.relieve(Amounts(slots=1))
    assert (await rig.serve((*long.history, 1))).use.num_tokens == 901
    assert (await rig.serve((*short.history, 1))).use.miss is MissReason.EVICTED


async def test_a_shared_prefix_in_demand_goes_last() -> None:
    rig = ContextRig()
    system = tokens(128)
    for seed in range(1, 4):
        prompt = (*system, *tokens(300, seed))
        await rig.serve(prompt, places={128: STABLE}, key=f"s{seed}")
    while rig.cache.holdings().num_entries > 1:
        assert rig.cache.relieve(Amounts(slots=1))
    assert (await rig.serve((*system, *tokens(50, 9)), places={128: STABLE})).use.kind is STABLE


async def fill_slots(rig: ContextRig, num_tokens: int = 80) -> None:
    """Sessions until one has to give up its StateImage."""
    seed, num_evicted = 1000, rig.cache.metrics.evictions[Tier.DEVICE]
    while rig.cache.metrics.evictions[Tier.DEVICE] == num_evicted:
        await rig.serve(tokens(num_tokens, seed))
        seed += 1


@pytest.mark.parametrize(
    ("kind", "is_marked", "is_kept"),
    [
        (STABLE, False, False),
        (STABLE, True, True),
        (ANCHOR, False, False),
        (ANCHOR, True, True),
        (CLOSURE, False, True),
        (REPLAY, False, True),
        (TAIL, False, True),
    ],
)
async def test_what_may_take_the_place_of_others(
    kind: CheckpointKind, is_marked: bool, is_kept: bool
) -> None:
    rig = ContextRig(slots=8)
    await fill_slots(rig)
    marks = frozenset({600}) if is_marked else frozenset()
    running = await rig.start(tokens(900), places={600: kind}, marks=marks)
    assert (rig.cache.metrics.captures[kind] == 1) == is_kept
    assert (rig.cache.metrics.captures_refused[kind] == 1) == (not is_kept)
    rig.cancel(running)


async def test_a_prefix_that_two_sessions_asked_for_may_take_the_place_of_others() -> None:
    rig = ContextRig(slots=8)
    system = tokens(600)
    for seed, is_kept in ((1, False), (2, True)):
        await fill_slots(rig)
        prompt = (*system, *tokens(100, seed))
        running = await rig.start(prompt, places={600: STABLE}, key=f"s{seed}")
        assert (rig.cache.metrics.captures[STABLE] == 1) == is_kept
        rig.cancel(running)


async def test_nothing_goes_for_a_checkpoint_that_is_worth_less() -> None:
    rig = ContextRig(slots=8)
    await fill_slots(rig, num_tokens=900)
    running = await rig.start(tokens(300, 5), places={100: CLOSURE})
    assert rig.cache.metrics.captures[CLOSURE] == 0
    rig.cancel(running)


async def test_a_session_goes_on_from_its_end_itself_when_there_is_no_room_for_both() -> None:
    rig = ContextRig(slots=4, pages=40)
    first = await rig.serve(tokens(500), key="a")
    await rig.serve(tokens(600, 2), key="b")
    ticket = rig.arrive((*first.history, 1), key="a")
    choice = rig.cache.choose(ticket)
    assert choice.source is not None
    assert choice.source.consumes
    rig.cache.left(ticket)
    served = await rig.serve((*first.history, 1), key="a")
    assert served.use.num_tokens == 501
    foreign = rig.arrive((*served.history, 1), key="z")
    source = rig.cache.choose(foreign).source
    assert source is not None
    assert not source.consumes


async def test_bounds_hold_and_keep_what_is_worth_more() -> None:
    rig = ContextRig(limits=CacheLimits(max_entries=8))
    long = await rig.serve(tokens(1500, 77))
    for seed in range(30):
        await rig.serve(tokens(100 + seed, seed))
        assert rig.cache.holdings().num_entries <= 8
    assert (await rig.serve((*long.history, 1))).use.num_tokens == 1501


async def test_ids_are_bounded_and_shared() -> None:
    limits = CacheLimits(max_id_bytes=16 * 256)
    rig = ContextRig(limits=limits)
    base = await rig.serve(tokens(512), places={64 * k: CLOSURE for k in range(1, 8)})
    assert rig.cache.holdings().id_bytes == 8 * 256
    for seed in range(20):
        await rig.serve((*base.history[:256], *tokens(256, seed)))
        assert rig.cache.holdings().id_bytes <= limits.max_id_bytes


async def test_sessions_under_one_key_are_bounded() -> None:
    rig = ContextRig()
    for seed in range(3 * MAX_PER_KEY):
        await rig.serve(tokens(100, seed), key="shared")
    assert rig.cache.holdings().num_sessions == MAX_PER_KEY


async def test_a_checkpoint_comes_back_from_disk() -> None:
    store = disk()
    rig = ContextRig(host_blocks=64, disk=store, pages=64, slots=8)
    first = await rig.serve(tokens(600), num_output=5, key="a")
    assert await rig.idle() == [TransferKind.STORE]
    drop_memory(rig)
    use = (await rig.serve((*first.history, 1), key="a")).use
    assert use == CacheUse(604, END, Tier.DISK)


async def test_another_process_finds_what_was_stored() -> None:
    store = disk()
    rig = ContextRig(host_blocks=64, disk=store, pages=64, slots=8)
    first = await rig.serve(tokens(600), num_output=5, key="a", salt="tenant")
    await rig.idle()
    store.reopen()
    later = ContextRig(host_blocks=64, disk=store, pages=64, slots=8)
    assert (await later.serve((*first.history, 1))).use.num_tokens == 0
    use = (await later.serve((*first.history, 1), salt="tenant")).use
    assert use == CacheUse(604, END, Tier.DISK)


async def test_a_damaged_file_is_a_miss() -> None:
    store = disk()
    rig = ContextRig(host_blocks=64, disk=store, pages=64, slots=8)
    first = await rig.serve(tokens(600), num_output=5, key="a")
    await rig.idle()
    drop_memory(rig)
    store.break_down()
    use = (await rig.serve((*first.history, 1), key="a")).use
    assert use == CacheUse(miss=MissReason.NOT_RESTORED)
    assert rig.cache.metrics.transfers_failed[TransferKind.FETCH] == 1


async def test_what_could_not_be_stored_is_tried_again_only_once_it_was_used() -> None:
    """An idle engine asks again at once, and a full disk stays full for a while."""
    store = disk()
    store.break_down()
    rig = ContextRig(host_blocks=64, disk=store, pages=64, slots=8)
    first = await rig.serve(tokens(600), places={599: TAIL}, num_output=5, key="a")
    plan = rig.cache.next_transfer(is_idle=True)
    assert plan is not None
    assert plan.kind is TransferKind.STORE
    assert not await rig.transfer(plan)
    assert rig.cache.next_transfer(is_idle=True) is None
    await rig.serve((*first.history, 1), key="a")
    assert rig.cache.next_transfer(is_idle=True) is not None


async def test_a_copy_to_the_host_that_failed_is_not_made_again_at_once() -> None:
    rig = ContextRig(pages=32, slots=4, host_blocks=64)
    await rig.serve(tokens(1200), key="a")
    plan = rig.cache.next_transfer(is_idle=False)
    assert plan is not None
    assert plan.kind is TransferKind.DEMOTE
    rig.spoils_copies = True
    assert not await rig.transfer(plan)
    assert rig.cache.metrics.transfers_failed[TransferKind.DEMOTE] == 1
    assert rig.cache.next_transfer(is_idle=False) is None


async def test_what_finds_no_room_on_the_device_is_not_restored() -> None:
    rig = ContextRig(lanes=2, pages=36, slots=8, host_blocks=64)
    first = await rig.serve(tokens(1200))
    await rig.idle()
    while rig.cache.relieve(Amounts(pages=1)):
        pass
    blocker = await rig.start(tokens(1900, 5))
    ticket = rig.arrive((*first.history, 1))
    choice = await rig.choose(ticket)
    assert choice.source is None
    assert choice.use.miss is MissReason.NOT_RESTORED
    rig.cache.left(ticket)
    rig.cancel(blocker)


async def test_a_waiting_request_finds_its_checkpoint_brought_up() -> None:
    rig = ContextRig(pages=256, slots=16, host_blocks=64, disk=disk())
    first = await rig.serve(tokens(600), num_output=5, key="a")
    await rig.idle()
    drop_memory(rig)
    ticket = rig.arrive((*first.history, 1), key="a")
    plan = rig.cache.next_transfer(is_idle=False)
    assert plan is not None
    assert plan.kind is TransferKind.FETCH
    await rig.transfer(plan)
    plan = rig.cache.next_transfer(is_idle=False)
    assert plan is not None
    assert plan.kind is TransferKind.RESTORE
    await rig.transfer(plan)
    choice = rig.cache.choose(ticket)
    assert choice.move is None
    assert choice.use.tier is Tier.DISK
    rig.cache.left(ticket)


async def test_short_and_superseded_checkpoints_are_not_stored() -> None:
    rig = ContextRig(host_blocks=64, disk=disk())
    await rig.serve(tokens(300), key="a")
    first = await rig.serve(tokens(600), key="b")
    await rig.serve((*first.history, *tokens(50, 1)), key="b")
    kinds = await rig.idle()
    assert kinds == [TransferKind.STORE]
    holdings = rig.cache.holdings()
    assert (holdings.entries[Tier.DISK], holdings.tokens[Tier.DISK]) == (1, 653)


async def test_the_host_gives_way_to_a_snapshot() -> None:
    rig = ContextRig(pages=64, slots=6, host_blocks=20)
    await rig.serve(tokens(700, 1))
    await rig.serve(tokens(700, 2))
    await rig.serve(tokens(700, 3))
    await rig.idle()
    free = rig.program.free().host_blocks
    assert rig.cache.relieve(Amounts(host_blocks=free + 1))
    assert rig.program.free().host_blocks > free
    while rig.cache.relieve(Amounts(host_blocks=20)):
        pass
    assert rig.program.free().host_blocks == 20


async def test_attention_alone_reuses_whole_pages_of_anything() -> None:
    rig = ContextRig(has_states=False)
    first = await rig.serve(tokens(500))
    use = (await rig.serve((*tokens(500)[:300], *tokens(50, 1)))).use
    assert (use.num_tokens, use.kind, use.miss) == (256, END, MissReason.HISTORY_EDITED)
    assert use.first_difference == 300
    assert (await rig.serve((*first.history, 1))).use.num_tokens == 501
    assert (await rig.serve(tokens(500)[:257])).use.num_tokens == 256
    assert (await rig.serve(tokens(500)[:256])).use.num_tokens == 192


async def test_rates_decide_between_moving_and_computing() -> None:
    rig = ContextRig(pages=64, slots=6, host_blocks=64)
    rig.cache.note_rates(prefill_tokens_s=1e3, move_tokens_s=1e6)
    first = await rig.serve(tokens(700))
    await rig.serve(tokens(900, 1))
    await rig.serve(tokens(700, 2))
    await rig.idle()
    while rig.cache.relieve(Amounts(pages=1)):
        pass
    ticket = rig.arrive((*first.history, 1))
    assert rig.cache.choose(ticket).move is not None
    rig.cache.note_rates(prefill_tokens_s=1e6, move_tokens_s=1e3)
    choice = rig.cache.choose(ticket)
    assert choice.move is None
    assert choice.source is None
    rig.cache.left(ticket)


async def test_a_ticket_arrives_once() -> None:
    rig = ContextRig()
    rig.arrive(tokens(10))
    rig._num_tickets = 0
    with pytest.raises(InvariantError):
        rig.arrive(tokens(10))


async def test_pages_that_nobody_holds_alone_are_freed_together() -> None:
    rig = ContextRig()
    await rig.serve(tokens(120), places={100: CLOSURE, 110: REPLAY})
    assert rig.cache.holdings().num_entries == 3
    assert rig.cache.relieve(Amounts(pages=1))
    assert rig.program.occupancy().pages_used == 0


async def test_a_copy_that_comes_back_cheaply_goes_before_a_shorter_prefix() -> None:
    rig = ContextRig(pages=32, slots=6, host_blocks=64)
    long = await rig.serve(tokens(1200, 1))
    assert await rig.idle() == [TransferKind.DEMOTE]
    short = await rig.serve(tokens(100, 2))
    assert rig.cache.relieve(Amounts(slots=1))
    assert (await rig.serve((*short.history, 1))).use.tier is Tier.DEVICE
    assert (await rig.serve((*long.history, 1))).use.tier is Tier.HOST


async def test_what_a_session_has_gone_past_is_not_copied_to_the_host() -> None:
    rig = ContextRig(pages=32, slots=8, host_blocks=64)
    first = await rig.serve(tokens(900), key="a")
    second = await rig.serve((*first.history, *tokens(200, 1)), key="a")
    assert await rig.idle() == [TransferKind.DEMOTE]
    assert rig.cache.holdings().tokens[Tier.HOST] == len(second.history) - 1


async def test_a_place_that_a_session_comes_back_to_is_not_past_any_more() -> None:
    rig = ContextRig()
    places = {150: CLOSURE}
    first = await rig.serve(tokens(200), key="a", places=places)
    await rig.serve((*first.history, *tokens(50, 1)), key="a")
    await rig.serve((*tokens(150), *tokens(40, 2)), key="a", places=places)
    for _ in range(3):
        assert rig.cache.relieve(Amounts(slots=1))
    assert (await rig.serve((*tokens(150), *tokens(40, 3)), key="a")).use.num_tokens == 150


async def test_what_can_never_be_fetched_leaves_the_next_best() -> None:
    store = disk()
    rig = ContextRig(host_blocks=64, disk=store)
    first = await rig.serve(tokens(600))
    await rig.idle()
    store.reopen()
    later = ContextRig(host_blocks=8, disk=store)
    await later.serve((*tokens(128), *tokens(60, 1)), places={128: STABLE})
    use = (await later.serve((*first.history, 1))).use
    assert (use.num_tokens, use.kind, use.miss) == (128, STABLE, MissReason.NOT_RESTORED)
