"""What operators have set for the workers while the job runs, in words. Pure.

In: the event `environment_set`, or a status document. Out: text without colour, one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def variables(found: Document) -> str:
    """Return `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET`."""
    env = found.get("env") or {}
    return " ".join(f"{name}={value}" for name, value in sorted(env.items())) or "all as at the launch"


def told(detail: Document) -> str:
    """Return what an operator has set, and from when on."""
    return f"{variables(detail)}, from generation {detail.get('from_generation')} on"


def now(status: Document) -> str:
    """Return what is set, and whether the workers have it; "" where nothing is."""
    found = status.get("environment")
    if not isinstance(found, Mapping):
        return ""
    first = int(found.get("from_generation") or 0)
    waits = first > int(status.get("generation") or 0)
    return f"{variables(found)}, {'waits for' if waits else 'since'} generation {first}"
