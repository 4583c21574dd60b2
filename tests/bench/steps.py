"""Where the time of an `up` goes, step by step.

In: the notes of traced.py. Out: for each step when it began and how long a host stayed in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Table, median, seconds

MEANING = {
    "resolve": "interpreter, imports, inventory, work tree; wait for a turn",
    "connect": "TCP, key exchange, host key",
    "auth": "public key",
    "python": "session, login shell, loader; where the agent is there: its bridge starts and says hello",
    "push": "the agent's bytes over the link and stored; its bridge starts and says hello",
    "sync": "work tree compared and sent",
    "start": "job directory, certificates, detached agent accepts",
    "engine": "import torch",
    "ready": "",
}


@dataclass(frozen=True)
class Step:
    """One step over all hosts, seconds from the command."""

    name: str
    first_s: float
    last_s: float
    median_s: float | None
    """How long a host stayed in it; None for the last one."""


def read(path: Path, start_ns: int) -> list[Step]:
    """Return the steps in their order."""
    begun: dict[str, list[float]] = {}
    stayed: dict[str, list[float]] = {}
    current: dict[str, tuple[str, float]] = {}
    for line in path.read_text().splitlines():
        word, host, name, _text = line.split(" ", 3)
        at = (int(word) - start_ns) / 1e9
        was, since = current.get(host, ("", 0.0))
        # The end of the connecting is reported as `start` too.
        if name != was and not (name == "start" and was in ("python", "push")):
            current[host] = (name, at)
            begun.setdefault(name, []).append(at)
            if was:
                stayed.setdefault(was, []).append(at - since)
    order = [name for name in MEANING if name in begun] + [name for name in begun if name not in MEANING]
    return [Step(name, min(begun[name]), max(begun[name]), median(stayed.get(name, []))) for name in order]


def table(title: str, steps: list[Step]) -> Table:
    """Return the steps as a table."""
    rows = [
        (step.name, seconds(step.first_s), seconds(step.last_s), seconds(step.median_s), MEANING.get(step.name, ""))
        for step in steps
    ]
    return Table(
        title, ("step", "first host", "last host", "median stay", "what it is"), tuple(rows), text_columns=(0, 4)
    )
