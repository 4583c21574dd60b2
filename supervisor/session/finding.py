"""One odd thing that a preflight found.

In: the readings of a preflight. Out: what the command line and a launch print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing that is odd: `error` would stop a job, `warning` may, `info` is worth knowing."""

    severity: Severity
    fact: str
    nodes: tuple[str, ...]
    text: str
    hint: str = ""
