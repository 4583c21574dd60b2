"""What a benchmark found: tables for people, numbers for programs.

In: titles, rows, numbers. Out: text on stdout; one JSON document.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = "-"


@dataclass(frozen=True)
class Table:
    """Rows under a head; the notes say what the numbers mean."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: tuple[int, ...] = (0,)
    """The columns that hold words, not numbers."""

    def text(self) -> str:
        """Return the table with aligned columns."""
        lines = [self.head, tuple("-" * len(cell) for cell in self.head), *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        body = [
            "  ".join(
                cell.ljust(width) if place in self.text_columns else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join(line.rstrip() for line in (self.title, *body, *(f"  {note}" for note in self.notes)))


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark."""

    name: str
    tables: tuple[Table, ...]
    data: dict[str, Any] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """Return what the numbers were taken on, with the load of the last minute: others may use the machine too."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def machine_line(found: dict[str, Any]) -> str:
    """Return `machine` as one line."""
    return f"{found['cores']} cores, load {found['load']}, Python {found['python']}, Linux {found['kernel']}"


def write_json(path: Path, reports: Sequence[Report], before: dict[str, Any]) -> None:
    """Write all numbers; raises OSError."""
    document = {"machine": before, "load_after": machine()["load"], **{one.name: one.data for one in reports}}
    path.write_text(json.dumps(document, indent=1) + "\n")


def seconds(value: float | None) -> str:
    """Return seconds as `1.23 s`, or as milliseconds below 0.1; a dash for nothing."""
    if value is None:
        return NEVER
    return f"{value:.2f} s" if value >= 0.0995 else f"{value * 1000:.0f} ms"


def ratio(value: float | None, base: float | None) -> str:
    """Return `x 1.23`: how much longer than the base it took."""
    if value is None or not base:
        return NEVER
    return f"x {value / base:.2f}"


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of what was measured; None where nothing was."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def spread(values: Sequence[float | None]) -> str:
    """Return `0.12 s .. 0.34 s`, the least and the most."""
    found = [value for value in values if value is not None]
    return f"{seconds(min(found))} .. {seconds(max(found))}" if found else NEVER
