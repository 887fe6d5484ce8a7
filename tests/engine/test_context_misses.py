"""Each reason of a miss with the token histories that lead to it."""

from __future__ import annotations

import pytest

from ninfer.contract.cache import CacheUse, CheckpointKind, MissReason, Tier
from ninfer.contract.program import Amounts
from ninfer.engine.context.misses import ClosestHistory, Reuse, first_difference, miss_reason
from tests.helpers.context_rig import ContextRig, tokens

STABLE = CheckpointKind.STABLE_PREFIX
CLOSURE = CheckpointKind.TURN_CLOSURE
REPLAY = CheckpointKind.RESPONSE_REPLAY
END = CheckpointKind.SESSION_END

SYSTEM = tokens(200, seed=100)
OPENER = tokens(4, seed=101)
FIRST_USER = tokens(60, seed=102)
SECOND_USER = tokens(50, seed=103)
CLOSER = tokens(3, seed=104)


def first_turn(key: str | None = "chat") -> tuple[tuple[int, ...], dict[int, CheckpointKind]]:
    """system, user, opener; with the places a chat template gives."""
    prompt = (*SYSTEM, *FIRST_USER, *OPENER)
    return prompt, {200: STABLE, 260: CLOSURE}


def second_turn(answer: tuple[int, ...]) -> tuple[int, ...]:
    prompt, _ = first_turn()
    return (*prompt, *answer, *CLOSER, *SECOND_USER, *OPENER)


async def test_nothing_with_this_beginning_was_seen() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    assert (await rig.serve(prompt, places=places)).use == CacheUse(miss=MissReason.NO_ENTRY)
    foreign = await rig.serve(tokens(300, seed=1))
    assert foreign.use.miss is MissReason.NO_ENTRY
    assert foreign.use.num_tokens == 0


async def test_a_history_that_continues_is_no_miss() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    use = (await rig.serve(second_turn(first.output), places=places, key="chat")).use
    assert use == CacheUse(len(prompt) + 79, END, Tier.DEVICE)


@pytest.mark.parametrize("key", ["chat", None])
async def test_thinking_that_the_template_drops_rewrites_the_history(key: str | None) -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key=key, num_output=80)
    spoken = first.output[60:]
    use = (await rig.serve(second_turn(spoken), places=places, key=key)).use
    assert use.num_tokens == 260
    assert use.kind is CLOSURE
    assert use.miss is MissReason.TEMPLATE_REWROTE_HISTORY
    assert use.first_difference == len(prompt)


async def test_an_opener_that_the_template_writes_otherwise_later_belongs_to_the_answer() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    later = (*prompt[:-1], *first.output[60:], *SECOND_USER, *OPENER)
    use = (await rig.serve(later, places=places, key="chat")).use
    assert use.miss is MissReason.TEMPLATE_REWROTE_HISTORY
    assert use.first_difference == len(prompt) - 1


async def test_an_answer_of_two_turns_ago_is_an_earlier_answer() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    second_prompt = second_turn(first.output)
    second = await rig.serve(second_prompt, places=places, key="chat", num_output=40)
    without = (
        *prompt,
        *first.output[60:],
        *second.history[len(prompt) + 80 :],
        *tokens(30, seed=5),
    )
    use = (await rig.serve(without, places=places, key="chat")).use
    assert use.miss is MissReason.TEMPLATE_REWROTE_HISTORY
    assert use.first_difference == len(prompt)


async def test_a_message_that_was_changed_is_an_edit() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    second = second_turn(first.output)
    await rig.serve(second, places=places, key="chat", num_output=20)
    edited = (*second[:220], *tokens(30, seed=7), *second[250:])
    use = (await rig.serve(edited, places=places, key="chat")).use
    assert use == CacheUse(200, STABLE, Tier.DEVICE, MissReason.HISTORY_EDITED, 220)


async def test_an_edit_of_the_last_message_keeps_what_was_before_it() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    second = second_turn(first.output)
    await rig.serve(second, places=places, key="chat", num_output=20)
    position = len(prompt) + 80 + len(CLOSER) + 10
    edited = (*second[:position], *tokens(30, seed=7))
    use = (await rig.serve(edited, places=places, key="chat")).use
    expected = CacheUse(len(prompt) + 79, END, Tier.DEVICE, MissReason.HISTORY_EDITED, position)
    assert use == expected


async def test_tokens_that_match_without_a_state() -> None:
    rig = ContextRig()
    await rig.serve((*SYSTEM, *tokens(300, seed=1)), key="a")
    use = (await rig.serve((*SYSTEM, *tokens(300, seed=2)), key="b")).use
    assert use == CacheUse(miss=MissReason.NO_STATE_AT_FRONTIER, first_difference=200)


async def test_another_conversation_behind_a_shared_prefix_is_no_miss() -> None:
    rig = ContextRig()
    await rig.serve((*SYSTEM, *tokens(100, 1)), places={200: STABLE}, key="a")
    use = (await rig.serve((*SYSTEM, *tokens(100, 2)), places={200: STABLE}, key="b")).use
    assert use == CacheUse(200, STABLE, Tier.DEVICE, None, 200)


async def test_a_history_cut_short_has_no_state_at_its_end() -> None:
    rig = ContextRig()
    first = await rig.serve(tokens(400), key="chat")
    use = (await rig.serve(first.history[:300], key="chat")).use
    assert use == CacheUse(miss=MissReason.NO_STATE_AT_FRONTIER)


async def test_what_was_evicted_says_so_also_for_the_shorter_part_that_is_left() -> None:
    rig = ContextRig()
    prompt, places = first_turn()
    first = await rig.serve(prompt, places=places, key="chat", num_output=80)
    for seed in range(2):
        await rig.serve((*SYSTEM, *tokens(90, seed)), places={200: STABLE}, key=f"s{seed}")
    while rig.cache.holdings().num_entries > 1:
        assert rig.cache.relieve(Amounts(slots=1))
    use = (await rig.serve(second_turn(first.output), places=places, key="chat")).use
    assert use == CacheUse(200, STABLE, Tier.DEVICE, MissReason.EVICTED)
    assert rig.cache.metrics.misses[MissReason.EVICTED] == 1


async def test_an_evicted_end_that_the_template_rewrote_is_not_to_blame() -> None:
    rig = ContextRig()
    prompt, _ = first_turn()
    first = await rig.serve(prompt, key="chat", num_output=80)
    while rig.cache.relieve(Amounts(slots=1)):
        pass
    use = (await rig.serve(second_turn(first.output[60:]), key="chat")).use
    assert use.miss is MissReason.TEMPLATE_REWROTE_HISTORY
    assert use.first_difference == len(prompt)


HISTORY = ClosestHistory(common=300, num_tokens=400, answers=((250, 310),), is_same=True)


@pytest.mark.parametrize(
    ("reuse", "reason", "position"),
    [
        (Reuse(500, 499, 64, 1, HISTORY), None, 300),
        (Reuse(64, 0, 64, 1, None), MissReason.TOO_SHORT, None),
        (Reuse(65, 0, 64, 1, None), MissReason.NO_ENTRY, None),
        (Reuse(65, 64, 64, 1, None), None, None),
        (Reuse(500, 0, 64, 1, HISTORY, has_unrestored=True), MissReason.NOT_RESTORED, 300),
        (Reuse(500, 0, 64, 1, HISTORY, has_evicted=True), MissReason.EVICTED, 300),
        (
            Reuse(500, 0, 64, 1, HISTORY, has_unrestored=True, has_evicted=True),
            MissReason.NOT_RESTORED,
            300,
        ),
        (Reuse(500, 300, 64, 1, HISTORY), MissReason.TEMPLATE_REWROTE_HISTORY, 300),
        (
            Reuse(500, 0, 64, 1, ClosestHistory(310, 400, ((250, 310),), is_same=True)),
            MissReason.HISTORY_EDITED,
            310,
        ),
        (
            Reuse(500, 200, 64, 1, ClosestHistory(264, 400, (), is_same=False)),
            MissReason.NO_STATE_AT_FRONTIER,
            264,
        ),
        (Reuse(500, 201, 64, 1, ClosestHistory(264, 400, (), is_same=False)), None, 264),
        (Reuse(500, 192, 64, 64, ClosestHistory(255, 400, (), is_same=False)), None, 255),
        (
            Reuse(500, 0, 64, 1, ClosestHistory(63, 400, (), is_same=False)),
            MissReason.NO_ENTRY,
            63,
        ),
        (Reuse(300, 235, 64, 1, HISTORY), MissReason.NO_STATE_AT_FRONTIER, None),
        (Reuse(300, 236, 64, 1, HISTORY), None, None),
        (Reuse(500, 400, 64, 1, ClosestHistory(400, 400, (), is_same=True)), None, None),
    ],
)
def test_reasons_from_facts(reuse: Reuse, reason: MissReason | None, position: int | None) -> None:
    assert miss_reason(reuse) is reason
    assert first_difference(reuse) == position
