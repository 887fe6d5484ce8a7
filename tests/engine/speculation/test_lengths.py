"""How much is drafted and proposed: what brings the most tokens for the time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.drafting import DraftCosts
from ninfer.engine.speculation.costs import AssumedCosts
from ninfer.engine.speculation.lengths import LEAST_GAIN, choose_lengths, proposal_length

SHARES = st.lists(st.sampled_from((0.0, 0.2, 0.5, 0.8, 1.0)), max_size=3)


class Tiles:
    """Costs that rise only with every eighth input."""

    def step(self, num_rows: int, num_columns: int, width: int) -> float:
        return 1.0 + 0.5 * ((num_columns - 1) // 8)

    def proposals(self, num_rows: int, num_tokens: int) -> float:
        return 0.01 * num_tokens


class Padded:
    """Rows that all take the time of the longest."""

    def step(self, num_rows: int, num_columns: int, width: int) -> float:
        return 1.0 + 0.05 * num_rows * (width - 1)

    def proposals(self, num_rows: int, num_tokens: int) -> float:
        return 0.01 * num_tokens


def worths(*rows: Sequence[float]) -> list[tuple[float, ...]]:
    return [tuple(accumulate(row, float.__mul__)) for row in rows]


def best_rate(guesses: list[tuple[float, ...]], costs: DraftCosts) -> float:
    """Over all ways to cut the guesses."""
    num_rows = len(guesses)
    return max(
        (num_rows + sum(sum(guess[:length]) for guess, length in zip(guesses, cut, strict=True)))
        / costs.step(num_rows, num_rows + sum(cut), 1 + max(cut))
        for cut in product(*(range(len(guess) + 1) for guess in guesses))
    )


@given(st.lists(SHARES, min_size=1, max_size=4), st.sampled_from((AssumedCosts(), Tiles())))
def test_no_other_cut_of_the_guesses_is_faster(
    shares: list[list[float]], costs: AssumedCosts | Tiles
) -> None:
    guesses = worths(*shares)
    lengths = choose_lengths(guesses, len(guesses), costs)
    assert all(length <= len(guess) for length, guess in zip(lengths, guesses, strict=True))
    found = len(guesses) + sum(
        sum(guess[:length]) for guess, length in zip(guesses, lengths, strict=True)
    )
    rate = found / costs.step(len(guesses), len(guesses) + sum(lengths), 1 + max(lengths))
    assert rate * LEAST_GAIN >= best_rate(guesses, costs) - 1e-9


def test_a_row_fills_its_tile_and_begins_another_only_for_good_guesses() -> None:
    assert choose_lengths(worths([0.3] * 8), 1, Tiles()) == [7]
    assert choose_lengths(worths([0.3] * 16), 1, Tiles()) == [7]
    assert choose_lengths(worths([1.0] * 15), 1, Tiles()) == [15]


def test_the_better_row_of_a_batch_gets_the_columns() -> None:
    lengths = choose_lengths(worths([0.9] * 7, [0.1] * 7, []), 3, Tiles())
    assert lengths[0] > lengths[1]
    assert sum(lengths) == 5


def test_a_full_batch_drafts_less() -> None:
    alone = choose_lengths(worths([0.6] * 8), 1, AssumedCosts())
    together = choose_lengths(worths(*([0.6] * 8 for _ in range(8))), 8, AssumedCosts())
    assert sum(together) < 8 * alone[0] / 2


def test_where_rows_are_padded_no_single_row_makes_all_wait() -> None:
    alone = worths([0.8] * 7)
    assert choose_lengths(alone, 1, Padded())[0] >= 5
    among = choose_lengths([*alone, *worths(*([0.1] for _ in range(7)))], 8, Padded())
    assert among[0] <= 2
    # What comes with the width is not left out.
    assert choose_lengths(worths([0.8] * 3, [0.3]), 2, Padded()) == [3, 1]


def test_gains_too_small_to_tell_are_none() -> None:
    assert choose_lengths(worths([0.1]), 1, AssumedCosts()) == [0]
    assert choose_lengths(worths([0.0], [0.0]), 2, Tiles()) == [0, 0]
    assert choose_lengths([(), ()], 0, Tiles()) == [0, 0]


def test_proposals_are_as_long_as_they_pay() -> None:
    costs = AssumedCosts()
    assert proposal_length(worths([0.95, 0.4, 0.1, 0.1]), 1, costs) == 2
    assert proposal_length(worths([0.95] * 5), 1, costs) == 5
    assert proposal_length(worths([0.1] * 5), 1, costs) == 0
    assert proposal_length([(), ()], 2, costs) == 0


def test_rows_that_need_no_proposal_make_them_dearer_for_the_others() -> None:
    good = worths([0.7] * 5)
    assert proposal_length([*good, (), (), ()], 4, AssumedCosts()) < proposal_length(
        good, 1, AssumedCosts()
    )
