"""CostModel: each tier costs more than the one above it, at measured rates."""

from __future__ import annotations

import pytest

from ninfer.contract.cache import Tier
from ninfer.engine.context.costs import CostModel


def test_each_tier_costs_more_than_the_one_above() -> None:
    costs = CostModel()
    times = [costs.transfer_s(1000, tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
    assert times[0] == 0.0
    assert times[0] < times[1] < times[2]


def test_measured_rates_count_and_others_do_not() -> None:
    costs = CostModel()
    costs.note(100.0, 1000.0)
    assert costs.prefill_s(50) == pytest.approx(0.5)
    assert costs.transfer_s(1000, Tier.HOST) == pytest.approx(1.0, rel=0.01)
    costs.note(0.0, -1.0)
    costs.note(None, None)
    assert costs.prefill_s(50) == pytest.approx(0.5)
    assert costs.source_s(150, 100, 1000, Tier.DEVICE) == pytest.approx(0.5)
