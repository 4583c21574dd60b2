"""Rows of logs, with their times on one clock.

In: rows as the nodes send them, the clock offsets in the status. Out: rows by the coordinator's clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from remote_agent.wire.answers import LogEntry, LogPage
    from remote_agent.wire.documents import Status
    from supervisor.link.hub import Hub

# Times on two sets of clocks are the same within this, milliseconds.
SAME_MS = 5.0


LineKey = tuple[int, int, str, int]
"""Generation, rank, stream, line."""


class LogLine(NamedTuple):
    """One line of one file; `t_ns`: its arrival, by the coordinator's clock."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    offset: int
    t_ns: int
    level: str | None
    text: bytes
    cut: int = 0
    """How many bytes of the line follow its text."""
    half: bool = False
    """Its line is still being written; known in pages of merged rows."""

    @property
    def key(self) -> LineKey:
        """Identifies the line."""
        return self.generation, self.rank, self.stream, self.line

    @property
    def mark(self) -> str:
        """Its level, if it is "error" or "warn"; else ""."""
        return {"e": "error", "w": "warn"}.get((self.level or "")[:1].lower(), "")


class HasStatus(Protocol):
    """A session."""

    @property
    def status(self) -> Status:
        """The newest status document, or {}."""


class Clocks:
    """Converts times of the nodes to the coordinator's clock, by the offsets in the status at one moment.

    Offsets are measured repeatedly: further pages are requested with the clocks of the first page.
    """

    def __init__(self, session: HasStatus) -> None:
        self._session = session
        self._ahead_ns = self._newest()

    def _newest(self) -> dict[str, int]:
        nodes = self._session.status.get("nodes", ())
        return {node["name"]: int(float(node.get("clock_offset_ms") or 0.0) * 1e6) for node in nodes}

    @property
    def moved(self) -> bool:
        """True when the newest offsets differ so much that rows would be out of order."""
        return any(abs(ns - self.ahead_ns(node)) > SAME_MS * 1e6 for node, ns in self._newest().items())

    def ahead_ns(self, node: str) -> int:
        """Return by how much the node's clock is ahead of the coordinator's."""
        return self._ahead_ns.get(node, 0)

    def at(self, node: str, t_ns: int | None) -> int | None:
        """Return the node's time at a time of the coordinator's clock."""
        return None if t_ns is None else t_ns + self.ahead_ns(node)

    def rows(self, node: str, answer: Answer) -> list[LogLine]:
        """Return the rows of a log_merged or log_rows answer, with their texts."""
        page: LogPage = answer.data
        entries = page.get("rows")
        if not entries:
            return []
        return [self._row(node, row, text) for row, text in zip(entries, answer.body.split(b"\n"), strict=True)]

    def _row(self, node: str, row: LogEntry, text: bytes) -> LogLine:
        place = (row["generation"], row["rank"], row["stream"], row["line"], row["offset"])
        t_ns = (row.get("t_ns") or 0) - self.ahead_ns(node)
        return LogLine(node, *place, t_ns, row.get("level"), text, row.get("cut", 0), bool(row.get("half")))


def clock_error_ms(status: Status, names: list[str] | None) -> float | None:
    """Return the error in the order of lines of different nodes, in ms; None: one node, or unknown.

    The errors of two clocks add.
    """
    nodes = [node for node in status.get("nodes", ()) if names is None or node["name"] in names]
    errors = sorted(error for node in nodes if (error := node.get("clock_error_ms")) is not None)
    return sum(errors[-2:]) if len(errors) > 1 else None


def now_ns(session: Hub) -> int:
    """Return the time on the coordinator's clock, which the times of rows use, as far as the offsets are known."""
    clocks = Clocks(session)
    for link in session.opened_links():
        ahead_of_us_ms = float(link.view.hello.get("clock_offset_ms") or 0.0)
        return time.time_ns() + int(ahead_of_us_ms * 1e6) - clocks.ahead_ns(link.view.name)
    return time.time_ns()
