"""The post-mortem of a job, as one document and as Markdown that is readable as plain text.

In: a session; facts about NCCL and the hosts. Out: JSON data without secrets; lines. Imports `logs` and `wording`.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from remote_agent.diagnose.incidents import iso_time
from remote_agent.text.names import by_value, ranges
from remote_agent.wire.documents import EventHead
from remote_agent.wire.events import ENDED_EVENTS, PHASES, EventType, label
from supervisor import redact
from supervisor.errors import RequestFailed, Unreachable
from supervisor.history import query
from supervisor.inventory.pattern import fold
from supervisor.logs.selection import Selection
from supervisor.wording.events import MEMBERSHIP, EventRows, event_text, phase_name, phases_by_generation
from supervisor.wording.events import line as event_row
from supervisor.wording.goodput import KINDS, goodput, measure
from supervisor.wording.incidents import incident_text
from supervisor.wording.status import condition_of
from supervisor.wording.values import clock, local_time, one_line, safe

if TYPE_CHECKING:
    from remote_agent.wire.documents import IncidentDocument, JournalEvent, NcclSummary, ScriptStatus
    from supervisor.bundle import BundledHost
    from supervisor.session import Session
    from supervisor.wording.goodput import Goodput

VERSION = 1
# Ranks print their step like this; it is searched for in the first and the last rows of a generation.
_STEP = re.compile(rb"(?i)(?<![a-z])(?:step|iter(?:ation)?)[\"']?\s{0,4}[=:#]?\s{0,8}[\[(]?\s{0,4}(\d{1,15})(?!\.?\d)")
ROWS = 256
# What the time was spent on is measured at so many ranks.
MEASURED_RANKS, BUCKETS = 64, 240

# Facts of the hosts and of torch there, in the order of the table.
ENVIRONMENT: tuple[tuple[str, Callable[[BundledHost], object]], ...] = (
    ("python", lambda host: host["hello"].get("python")),
    ("torch", lambda host: host["engine"].get("torch")),
    ("cuda", lambda host: host["engine"].get("cuda")),
    ("nccl", lambda host: host["engine"].get("nccl")),
    ("gpus", lambda host: host["engine"].get("gpus")),
    ("cpus", lambda host: host["hello"].get("cpu_count")),
    ("interpreter", lambda host: host["hello"].get("executable")),
    ("agent", lambda host: host["hello"].get("version")),
)


class ReportEvent(EventHead):
    """An event with its text and the operator who requested it."""

    by: str | None
    text: str


ReportedGeneration = dict[str, object]
"""One generation: its cause, the duration of each phase, and how many steps were lost."""
FactValue = TypedDict("FactValue", {"value": str, "nodes": list[str]})
ReportedFact = TypedDict("ReportedFact", {"fact": str, "values": list[FactValue]})


class ReportedNode(TypedDict):
    name: str
    address: str | None
    state: str | None
    reason: str | None
    ranks: list[int]


class Report(TypedDict):
    """The post-mortem of a job."""

    report: int
    job: str | None
    script: str | None
    args: list[str]
    state: str | None
    condition: str
    reason: str | None
    started_at: str | None
    ended_at: str | None
    lasted_s: float | None
    goodput: float | None
    hours: dict[str, float]
    """Hours of all devices, by what they were spent on."""
    coordinator: str | None
    nodes: list[ReportedNode]
    world_size: int | None
    charged_restarts: int | None
    max_restarts: int | None
    incidents: list[IncidentDocument]
    generations: list[ReportedGeneration]
    membership: list[ReportEvent]
    environment: list[ReportedFact]
    nccl: NcclSummary | None
    timeline: list[ReportEvent]


async def report(
    session: Session,
    events: Sequence[JournalEvent],
    incidents: Sequence[IncidentDocument],
    nccl: NcclSummary | None,
    hosts: Iterable[BundledHost],
) -> Report:
    """Return the post-mortem; steps are included if the ranks printed them."""
    status, journal = session.status, EventRows()
    journal.follow(events)
    generations = [event for event in events if event["type"] == EventType.GENERATION_RUNNING]
    steps = {int(event["generation"]): await _steps(session, int(event["generation"])) for event in generations}
    script: ScriptStatus = status.get("script") or {"script": None}
    ended = next((event for event in reversed(events) if event["type"] in ENDED_EVENTS), None)
    now = iso_time(time.time_ns())
    cost = await _cost(session, events)
    document: Report = {
        "report": VERSION,
        "job": status.get("job"),
        "script": script.get("script"),
        "args": list(script.get("args") or ()),
        "state": status.get("state"),
        "condition": condition_of(status),
        "reason": status.get("failure") or ((ended or {}).get("detail") or {}).get("reason"),
        "started_at": status.get("started_at"),
        "ended_at": ended["time"] if ended else None,
        "lasted_s": _between(status.get("started_at"), ended["time"] if ended else now),
        "goodput": None if cost is None else round(cost.share, 4),
        "hours": {} if cost is None else {name: round(hours, 4) for name, hours in cost.hours().items()},
        "coordinator": status.get("coordinator"),
        "nodes": [
            {
                "name": node["name"],
                "address": node.get("address"),
                "state": node.get("state"),
                "reason": node.get("reason"),
                "ranks": [rank["rank"] for rank in node.get("ranks", ())],
            }
            for node in status.get("nodes", ())
        ],
        "world_size": status.get("world_size"),
        "charged_restarts": status.get("restarts"),
        "max_restarts": status.get("max_restarts"),
        "incidents": list(incidents),
        "generations": [_generation(event, events, steps) for event in generations],
        "membership": [_event(event) for event in events if event["type"] in MEMBERSHIP],
        "environment": environment(hosts),
        "nccl": nccl,
        "timeline": [_event(row) for row in journal.rows],
    }
    clean: Report = redact.document(document)
    return clean


async def _cost(session: Session, events: Sequence[JournalEvent]) -> Goodput | None:
    """Return what the time of the job was spent on, as far as its nodes have kept that."""
    sizes = [
        event["detail"].get("world_size") or 0 for event in events if event["type"] == EventType.GENERATION_RUNNING
    ]
    world, began = max(sizes, default=0), local_time(session.status.get("started_at"))
    if not world or began is None:
        return None
    ranks = [*range(0, world, math.ceil(world / MEASURED_RANKS))]
    now_s = time.time()
    try:
        series = await session.series(query(KINDS, ranks, now_s - began.timestamp(), BUCKETS))
    except Unreachable:
        series = None
    return goodput(events, now_s, measure(events, series))


def _between(begin: str | None, end: str | None) -> float | None:
    first, last = local_time(begin), local_time(end)
    return round((last - first).total_seconds(), 3) if first and last else None


def _event(event: JournalEvent) -> ReportEvent:
    return {"seq": event["seq"], "time": event["time"], "type": event["type"], "generation": event["generation"],
            "node": event["node"], "rank": event["rank"], "by": event["detail"].get("operator"),
            "text": event_text(event)}  # fmt: skip


def _generation(
    event: JournalEvent, events: Sequence[JournalEvent], steps: Mapping[int, tuple[int, int] | None]
) -> ReportedGeneration:
    number = int(event["generation"])
    detail = event.get("detail") or {}
    stops = [one for one in events if one["type"] == EventType.GENERATION_STOPPED and int(one["generation"]) < number]
    phases = phases_by_generation(events)[number]
    before, now = steps.get(number - 1), steps.get(number)
    return {
        "generation": number,
        "time": event.get("time"),
        "cause": (stops[-1].get("detail") or {}).get("cause") if stops else "launch",
        "world_size": detail.get("world_size"),
        **{f"{name}_ms": phases.get(name) for name in PHASES},
        "total_ms": round(sum(phases.values()), 1) if phases else None,
        "first_step": now[0] if now else None,
        "last_step": now[1] if now else None,
        # The step that was running when the group stopped may not have been printed; it is not counted.
        "steps_lost": max(0, before[1] - now[0] + 1) if before and now else None,
    }


async def _steps(source: Session, generation: int) -> tuple[int, int] | None:
    """Return the first and the last step that rank 0 printed in a generation, or None."""
    selection = Selection(generation=generation, ranks=[0])
    try:
        head = await source.merged(selection, ROWS, after_ns=0)
        tail = await source.merged(selection, ROWS)
    except (RequestFailed, Unreachable):
        # Its log is unreachable: the report has everything else.
        return None
    first = [int(match[1]) for row in head.rows for match in _STEP.finditer(row.text)]
    last = [int(match[1]) for row in tail.rows for match in _STEP.finditer(row.text)]
    return (first[0], last[-1]) if first and last else None


def environment(hosts: Iterable[BundledHost]) -> list[ReportedFact]:
    """Return each fact with its values, the most frequent value first."""
    known = list(hosts)
    rows: list[ReportedFact] = []
    for fact, read in ENVIRONMENT:
        pairs = ((str(host["name"]), read(host)) for host in known)
        ordered = by_value((name, str(value)) for name, value in pairs if value is not None)
        if ordered:
            rows.append({"fact": fact, "values": [{"value": value, "nodes": names} for value, names in ordered]})
    return rows


# --- Markdown

# More than this many events of one type in a row become one line.
ALIKE = 3


def lines(report: Report) -> list[str]:
    """Return the whole report."""
    return [
        f"# Post-mortem of {_cell(report['job'])}",
        "",
        *_table(["", ""], _header(report)),
        *_verdicts(report["incidents"]),
        *_generations(report["generations"]),
        *_membership(report["membership"]),
        *_timeline(report["timeline"]),
        *_environment(report["environment"]),
        *_nccl(report["nccl"]),
    ]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else one_line(value).replace("|", "\\|")


def _code(value: object) -> str:
    text = one_line(value).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _fenced(text: Sequence[str]) -> list[str]:
    fence = "````" if any("```" in line for line in text) else "```"
    return [fence, *text, fence]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    bar = [f"|{'|'.join('---' for _ in head)}|"]
    return [f"| {' | '.join(head)} |", *bar, *(f"| {' | '.join(row)} |" for row in rows)]


def _header(report: Report) -> Iterator[list[str]]:
    nodes = report["nodes"]
    reason = f": {_cell(report['reason'])}" if report["reason"] else ""
    ended, lasted = report["ended_at"], report["lasted_s"]
    yield ["how it ended" if ended else "now", f"**{_cell(report['condition'])}**{reason}"]
    yield ["script", _code(" ".join(map(str, (report["script"] or "?", *report["args"]))))]
    yield ["began", _cell(report["started_at"])]
    yield ["ended", _cell(ended) if ended else "not yet"]
    yield ["lasted", _lasted(lasted)]
    yield ["goodput", "-" if report["goodput"] is None else f"{report['goodput']:.0%}"]
    yield ["hours of all ranks", ", ".join(f"{name} {hours:.3g}" for name, hours in report["hours"].items()) or "-"]
    yield ["nodes", f"{_cell(fold([node['name'] for node in nodes]))}, world size {_cell(report['world_size'])}"]
    yield ["coordinator", _cell(report["coordinator"])]
    yield ["restarts charged", f"{_cell(report['charged_restarts'])} of {_cell(report['max_restarts'])}"]


def _lasted(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = int(seconds)
    return f"{seconds:.1f} s" if seconds < 100 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


def _verdicts(incidents: Sequence[IncidentDocument]) -> Iterator[str]:
    yield from ("", "## What failed", "")
    if not incidents:
        yield "No failure."
    for incident in incidents:
        traceback = incident.get("traceback")
        first, summary, *rest = incident_text(incident, traceback=False, utc=True)
        yield from (f"### {one_line(summary)}", "", f"* {first}")
        for line in rest:
            # Details of the line before are indented further.
            yield f"{'  ' * ((len(line) - len(line.lstrip()) - 2) // 2)}* {line.strip()}"
        if traceback:
            yield from ("", *_fenced(safe(traceback).rstrip("\n").splitlines()))
        yield ""


def _generations(rows: Sequence[ReportedGeneration]) -> Iterator[str]:
    yield from ("## Launch and restarts, ms", "")
    names = [f"{name}_ms" for name in PHASES]
    head = ["generation", "running at", "cause", "ranks", *map(phase_name, PHASES), "total", "steps", "steps lost"]
    yield from _table(
        head,
        (
            [
                str(row["generation"]),
                _cell(clock(str(row["time"]), millis=True, utc=True)),
                _cell(row["cause"]),
                _cell(row["world_size"]),
                *(_cell(row[name]) for name in (*names, "total_ms")),
                "-" if row["first_step"] is None else f"{row['first_step']}-{row['last_step']}",
                _cell(row["steps_lost"]),
            ]
            for row in rows
        ),
    )


def _membership(rows: Sequence[ReportEvent]) -> Iterator[str]:
    if rows:
        yield from ("", "## Nodes joined and left, and operator requests", "")
        yield from _table(
            ["time", "what", "node", "by", ""],
            (
                [
                    _cell(clock(row["time"], millis=True, utc=True)),
                    _cell(label(row["type"])),
                    _cell(row["node"]),
                    _cell(row["by"]),
                    "" if row["text"] == row["by"] else _cell(row["text"]),
                ]
                for row in rows
            ),
        )


def _timeline(rows: Sequence[ReportEvent]) -> Iterator[str]:
    yield from ("", "## Timeline (UTC)", "", *_fenced(list(_moments(rows))))


def _moments(rows: Sequence[ReportEvent]) -> Iterator[str]:
    for _, group in itertools.groupby(rows, key=lambda row: (row["type"], row["generation"])):
        alike = list(group)
        listed = alike if len(alike) <= ALIKE else alike[:1]
        for row in listed:
            yield event_row(row, one_line(row["text"]), utc=True)
        if len(listed) < len(alike):
            rest = alike[1:]
            ranks = [row["rank"] for row in rest if row["rank"] is not None]
            who = f"ranks {ranges(ranks)}" if ranks else f"{fold([row['node'] or '?' for row in rest])}"
            yield f"{clock(rest[-1]['time'], millis=True, utc=True)} … and {len(rest)} more until then: {who}"


def _environment(rows: Sequence[ReportedFact]) -> Iterator[str]:
    yield from ("", "## Environment", "")
    if not rows:
        yield "No host was reachable."
        return
    yield from _table(
        ["fact", "value", "nodes"],
        (
            [_cell(row["fact"]) if not place else "", _code(one["value"]), _cell(fold(one["nodes"]))]
            for row in rows
            for place, one in enumerate(row["values"])
        ),
    )


def _nccl(facts: NcclSummary | None) -> Iterator[str]:
    yield from ("", "## NCCL", "")
    if facts is None:
        yield "No NCCL output in the logs."
        return
    for name, value in facts.items():
        if name != "warnings" and value not in (None, [], ""):
            yield f"* {name}: {_cell(' '.join(map(str, value)) if isinstance(value, list) else value)}"
    for warning in facts.get("warnings") or ():
        yield f"* warning: {_code(warning)}"
