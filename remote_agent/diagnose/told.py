"""The incidents that a journal tells of.

In: the journal's records, on a node, in a session or in a recording. Out: the contract's incidents as they stood then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

JOB_ENDS = ("job_succeeded", "job_failed", "job_stopped")
ENDS_OF_A_HANG = ("hang_over", "generation_stopped", *JOB_ENDS)


def told_incidents(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents of a journal; of a hang also whether it goes on, and how it was over."""
    found: list[dict[str, Any]] = []
    for record in records:
        detail = record["detail"]
        if record["type"] == "incident":
            found.append({key: value for key, value in detail.items() if key != "fingerprint"})
        elif found and found[-1].get("ongoing") and record["type"] in ENDS_OF_A_HANG:
            found[-1] = {**found[-1], "ongoing": False, "over": detail.get("reason") or detail.get("cause")}
    return found
