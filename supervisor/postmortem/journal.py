"""What the journal of a job adds to the logs of its ranks.

In: a file with journal records. Out: generations, with the exits, lost nodes, hangs and clocks that it records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.incidents import last_lines
from remote_agent.text.names import count as count_of
from remote_agent.wire.documents import parse_event
from remote_agent.wire.events import EventType
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from remote_agent.wire.documents import (
        ErrorDocument,
        EvidenceEntry,
        GenerationStoppedDetail,
        IncidentDocument,
        JournalEvent,
        RankExit,
        RankFailedDetail,
    )
    from supervisor.postmortem.files import RunFile
    from supervisor.postmortem.lines import FileLine

# These causes of a stop are no failures: an operator requested it, or a node has come back.
_REQUESTED = frozenset({"restart", "removed", "added", "returned", "stop"})
# This is far longer than any record of a journal.
LINE_BYTES = 16 << 20


@dataclasses.dataclass
class RankRecord:
    """What the files of a run show about one rank of one generation."""

    node: str | None = None
    lines: list[tuple[str, FileLine]] = dataclasses.field(default_factory=list)
    error: ErrorDocument | None = None
    error_file: str = ""
    exit: RankExit | None = None
    raised_ns: int | None = None
    """The time when its exception was recorded, by its node's clock: a copied error file has lost its time."""
    shift_ns: int | None = None


@dataclasses.dataclass
class Generation:
    """What the files of a run show about one generation."""

    number: int
    ranks: dict[int | None, RankRecord] = dataclasses.field(default_factory=dict)
    lost: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    nodes: dict[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    hang: IncidentDocument | None = None
    """The journal's incident of a hang that lasted until the end: no file of a rank shows it."""
    incident: IncidentDocument | None = None
    """The journal's last incident about its end."""
    cause: str = ""
    """Why it was stopped, according to the journal; empty: it was not, as far as known."""
    stop_asked: bool = False
    failing: bool = False
    """Whether a rank or a node failed before the job was asked to stop: the journal has no incident of that."""
    notes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    shifts_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """The number to add to a node's time to get the coordinator's."""
    clock_error_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    last_lines: list[EvidenceEntry] = dataclasses.field(default_factory=list)
    """Evidence: the last lines of lost nodes' ranks."""
    succeeded: bool = False
    world: int = 0
    """How many ranks a text without a journal says that there are; 0: it does not."""

    def rank(self, number: int | None) -> RankRecord:
        """Return the record of a rank; None: of the lines of no rank."""
        return self.ranks.setdefault(number, RankRecord())

    def stopped_on_request(self) -> bool:
        """Return whether it was stopped on request, and nothing had failed before."""
        return self.cause in _REQUESTED and not (self.failing if self.cause == "stop" else self.lost)

    def is_running(self) -> bool:
        """Return whether it had started, and nothing had failed or ended when the journal was read, or cut off."""
        return bool(self.nodes) and not (self.cause or self.failing or any(rank.error for rank in self.ranks.values()))


def read_journal(file: RunFile, runs: dict[tuple[str, int], Generation]) -> str:
    """Add what a job's journal records: exits, lost nodes, and the node of each rank.

    Returns how many of its lines cannot be read, "" if all can: the last one may be cut off, a disk may have damaged
    others.
    """
    count, why = 0, ""
    with file.path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), b""), 1):
            try:
                event = parse_event(line)
            except Misfit as error:
                count, why = count + 1, why or f"line {number} {error}"
            else:
                group = event["generation"]
                _read_event(event, runs.setdefault((file.group, group), Generation(group)))
    return f"{count_of(count, 'line')} cannot be read: {why}" if count else ""


def _read_event(event: JournalEvent, run: Generation) -> None:
    kind, node, detail = event["type"], str(event["node"]), event["detail"]
    if kind == EventType.GENERATION_STARTED:
        for member in detail["members"]:
            run.nodes[member["node"]] = range(member["base_rank"], member["base_rank"] + member["nproc"])
    elif kind == EventType.RANKS_ASSIGNED:
        run.nodes[node] = [rank for rank, _local_rank, _pid in detail["ranks"]]
    elif kind == EventType.RANK_FAILED:
        _read_failure(event, run)
    elif kind == EventType.GENERATION_STOPPED:
        _read_stop(detail, run)
    elif kind == EventType.INCIDENT:
        _read_incident(detail, run)
    elif kind == EventType.STOP_REQUESTED:
        run.stop_asked, run.cause = True, run.cause or "stop"
    elif kind in (EventType.HANG_OVER, EventType.JOB_SUCCEEDED):
        run.hang, run.succeeded = None, kind == EventType.JOB_SUCCEEDED
    elif kind == EventType.NODE_LOST and node in run.nodes:
        run.lost[node] = (detail.get("alive_ns") or 0, str(detail.get("reason")))
        run.last_lines += last_lines(node, detail.get("said") or ())
        run.failing = run.failing or not run.stop_asked


def _read_incident(detail: IncidentDocument, run: Generation) -> None:
    incident = detail.copy()
    incident.pop("ongoing", None)
    incident.pop("preliminary", None)
    if detail.get("ongoing"):
        run.hang = incident
    else:
        run.incident = incident


def _read_stop(detail: GenerationStoppedDetail, run: Generation) -> None:
    """Add why a group ended, the ranks that did not fail by themselves, and the nodes' clocks."""
    run.cause = str(detail.get("cause") or "unknown")
    for number, t_ns, over_ns in detail.get("left", ()):
        run.rank(number).exit = {
            "code": 0, "signal": None, "t_ns": t_ns, "over_ns": over_ns, "stopped_by_us": False,
        }  # fmt: skip
    for number, t_ns, code, signal, raised_ns, over_ns, asked_ns in detail.get("stopped", ()):
        ending: RankExit = {"code": code, "signal": signal, "t_ns": t_ns, "over_ns": over_ns, "asked_ns": asked_ns}
        run.rank(number).exit = {**ending, "stopped_by_us": True}
        run.rank(number).raised_ns = raised_ns
    for node, (shift_ns, error_ns) in detail.get("clocks", {}).items():
        run.shifts_ns[node] = shift_ns
        run.clock_error_ms[node] = error_ns / 1e6


def _read_failure(event: JournalEvent, run: Generation) -> None:
    """Add a rank that failed by itself."""
    detail: RankFailedDetail = event["detail"]
    run.failing = run.failing or not run.stop_asked
    rank = run.rank(event["rank"])
    rank.node = event["node"]
    rank.exit = {
        "pid": detail.get("pid"), "local_rank": detail.get("local_rank"), "t_ns": detail.get("time_ns"),
        "code": detail["exit"]["code"], "signal": detail["exit"]["signal"],
        "sent": detail.get("sent"), "over_ns": detail.get("over_ns"), "stopped_by_us": False,
    }  # fmt: skip
    rank.raised_ns = detail.get("raised_ns")
    rank.shift_ns = detail.get("shift_ns", 0)
    run.notes.setdefault(str(event["node"]), []).extend(detail.get("notes", ()))
