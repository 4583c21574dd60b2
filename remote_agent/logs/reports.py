"""What scripts write of their progress for us: the file that SUPERVISOR_METRICS names to each rank.

In: `{"step": 803, "total": 2000, "loss": 1.9, "lr": 3e-4, "grad_norm": 0.7, "rate": 41000, "unit": "tok/s"}` a line,
each field optional. Out: the newest values, for the reader of the rank's progress.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.logs.progress import StepReader

NAME = "metrics.jsonl"
# Of what is new, only the end is read.
LOOK_BACK = 65_536


class Reports:
    """How far each rank's file was read."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def read(self, directory: Path, steps: StepReader) -> None:
        """Give what is new in a rank's file to the reader of its progress."""
        path = directory / NAME
        try:
            facts = os.stat(path)
        except OSError:
            return
        at = self._read.get(path, 0)
        # A file that the script has cut begins anew.
        at = 0 if facts.st_size < at else at
        if facts.st_size == at:
            return
        try:
            with open(path, "rb") as file:
                file.seek(max(at, facts.st_size - LOOK_BACK))
                data = file.read(LOOK_BACK)
                end = file.tell() - len(data) + data.rfind(b"\n") + 1
        except OSError:
            return
        # The last line may still be written.
        self._read[path] = max(at, end)
        if values := _values(data[: data.rfind(b"\n") + 1]):
            steps.take_report(values, facts.st_mtime_ns)


def _values(data: bytes) -> dict[str, Any]:
    """Return the newest value of each field."""
    values: dict[str, Any] = {}
    for line in data.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            values.update(found)
    return values
