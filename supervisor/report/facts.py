"""What a post-mortem says, as one document.

In: a session or a player at its time; NCCL's facts; what the hosts say of themselves. Out: JSON data without secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from supervisor import plain
from supervisor.errors import RequestFailed, Unreachable
from supervisor.recording import redact
from supervisor.recording.form import read_time
from supervisor.session.logs import Selection
from supervisor.session.view import ENDED_EVENTS

if TYPE_CHECKING:
    from supervisor.session.logs import Page

VERSION = 1
# How a rank says where it is; the first and the last rows of a generation are looked through.
_STEP = re.compile(rb"(?i)(?<![a-z])(?:step|iter(?:ation)?)[\"']?\s{0,4}[=:#]?\s{0,8}[\[(]?\s{0,4}(\d{1,15})(?!\.?\d)")
ROWS = 256

# Who was in and who was not, and whose will it was.
MEMBERSHIP = (
    "node_joined",
    "node_added",
    "remove_requested",
    "node_removed",
    "node_lost",
    "node_failed",
    "coordinator_changed",
    "node_cordoned",
    "node_uncordoned",
    "signal_sent",
    "environment_set",
    "tree_changed",
    "restart_requested",
    "stop_requested",
)
# Facts of the hosts and of torch there, in the order of the table.
ENVIRONMENT = (
    ("python", ("hello", "python")),
    ("torch", ("engine", "torch")),
    ("cuda", ("engine", "cuda")),
    ("nccl", ("engine", "nccl")),
    ("gpus", ("engine", "gpus")),
    ("cpus", ("hello", "cpu_count")),
    ("interpreter", ("hello", "executable")),
    ("agent", ("hello", "version")),
)

Json = dict[str, Any]


class Teller(Protocol):
    """A session, or a player."""

    @property
    def status(self) -> Json:
        """The newest status document."""

    async def merged(
        self, selection: Selection, count: int, *, before_ns: int | None = None, after_ns: int | None = None
    ) -> Page:
        """Rows by time."""


async def report(
    teller: Teller,
    events: Sequence[Json],
    incidents: Sequence[Json],
    nccl: Json | None,
    hosts: Iterable[Mapping[str, Any]],
) -> Json:
    """Return the post-mortem; steps are told where the logs tell them."""
    status = teller.status
    generations = [event for event in events if event["type"] == "generation_running"]
    steps = {int(event["generation"]): await _steps(teller, int(event["generation"])) for event in generations}
    script = status.get("script") or {}
    ended = next((event for event in reversed(events) if event["type"] in ENDED_EVENTS), None)
    last = ended or (events[-1] if events else None)
    document = {
        "report": VERSION,
        "job": status.get("job"),
        "script": script.get("script"),
        "args": list(script.get("args") or ()),
        "state": status.get("state"),
        "reason": status.get("failure") or ((ended or {}).get("detail") or {}).get("reason"),
        "started_at": status.get("started_at"),
        "ended_at": ended["time"] if ended else None,
        "lasted_s": _between(status.get("started_at"), last["time"] if last else None),
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
        "membership": [_told(event) for event in events if event["type"] in MEMBERSHIP],
        "environment": environment(hosts),
        "nccl": nccl,
        "timeline": [_told(event) for event in events],
    }
    return dict(redact.document(document))


def _between(begin: str | None, end: str | None) -> float | None:
    return round((read_time(end) - read_time(begin)) / 1e9, 3) if begin and end else None


def _told(event: Mapping[str, Any]) -> Json:
    """Return an event in words, with who asked for it."""
    keys = ("seq", "time", "type", "generation", "node", "rank")
    by = (event.get("detail") or {}).get("operator")
    return {**{key: event.get(key) for key in keys}, "by": by, "text": plain.event_text(event)}


def _generation(event: Mapping[str, Any], events: Sequence[Json], steps: Mapping[int, tuple[int, int] | None]) -> Json:
    """Return one formed group: why, how long each phase took, and how many steps were done again."""
    number = int(event["generation"])
    detail = event.get("detail") or {}
    stops = [one for one in events if one["type"] == "generation_stopped" and int(one["generation"]) < number]
    phases = plain.phases_of(detail)
    before, now = steps.get(number - 1), steps.get(number)
    return {
        "generation": number,
        "time": event.get("time"),
        "cause": (stops[-1].get("detail") or {}).get("cause") if stops else "launch",
        "world_size": detail.get("world_size"),
        **{f"{name}_ms": phases.get(name) for name in plain.PHASES},
        "total_ms": round(sum(phases.values()), 1) if phases else None,
        "first_step": now[0] if now else None,
        "last_step": now[1] if now else None,
        # The step that was under way when the group stopped may not be printed: it is not counted.
        "steps_lost": max(0, before[1] - now[0] + 1) if before and now else None,
    }


async def _steps(teller: Teller, generation: int) -> tuple[int, int] | None:
    """Return the first and the last step that rank 0 printed in a generation, None where it printed none."""
    selection = Selection(generation=generation, ranks=[0])
    try:
        head = await teller.merged(selection, ROWS, after_ns=0)
        tail = await teller.merged(selection, ROWS)
    except (RequestFailed, Unreachable):
        # No log of it is in reach: the report tells the rest.
        return None
    first = [int(match[1]) for row in head.rows for match in _STEP.finditer(row.text)]
    last = [int(match[1]) for row in tail.rows for match in _STEP.finditer(row.text)]
    return (first[0], last[-1]) if first and last else None


def environment(hosts: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Return each fact with its values, the one that most nodes have first."""
    told = list(hosts)
    rows = []
    for fact, (part, key) in ENVIRONMENT:
        values: dict[str, list[str]] = {}
        for host in told:
            value = (host.get(part) or {}).get(key)
            if value is not None:
                values.setdefault(str(value), []).append(str(host["name"]))
        ordered = sorted(values.items(), key=lambda item: -len(item[1]))
        if ordered:
            rows.append({"fact": fact, "values": [{"value": value, "nodes": names} for value, names in ordered]})
    return rows
