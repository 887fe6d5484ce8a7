"""What a comparison of answers with drafts found, as figures of a record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.helpers.speculation_matrix import Setting, Tally


def figures(tally: Tally) -> dict[str, Any]:
    return {
        "settings": tally.num_settings,
        "answers": tally.num_requests,
        "tokens": tally.num_tokens,
        "differing": [{**asdict(setting), "prompt": index} for setting, index in tally.differing],
        "pauses": tally.num_pauses,
        "cancelled": tally.num_cancelled,
        "ends": dict(sorted(tally.ends.items())),
        "drafts": [
            {
                "by": source.value,
                "rounds": counts.rounds,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "accepted_at": list(counts.accepted_at),
            }
            for source, counts in tally.drafts.items()
        ],
    }


def setting_row(setting: Setting, tally: Tally, seconds: float) -> dict[str, Any]:
    """One setting of a record."""
    drafts = tally.drafts.values()
    return {
        **asdict(setting),
        "answers": tally.num_requests,
        "tokens": tally.num_tokens,
        "pauses": tally.num_pauses,
        "cancelled": tally.num_cancelled,
        "drafted": sum(counts.drafted for counts in drafts),
        "accepted": sum(counts.accepted for counts in drafts),
        "differing": len(tally.differing),
        "seconds": round(seconds, 1),
    }
