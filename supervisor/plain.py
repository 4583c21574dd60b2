"""Documents of the contract as lines for people: status, events, outcomes, jobs. Pure.

In: status, event and job documents. Out: text without colour, one fact a line.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from supervisor import overrides, usage

Document = Mapping[str, Any]
PHASES = ("detect", "stop", "rendezvous", "spawn", "main")
# What a rank printed may hold anything; a terminal must not obey it.
_UNSAFE = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}
LONGEST_FOLD = 12
TRACEBACK = ("Traceback (", "Original Traceback (")
ENDED = ("succeeded", "failed", "stopped")
LONGEST_CHANGE = 4


def safe(text: object) -> str:
    """Return text with control characters made visible; newlines and tabs stay."""
    return str(text).translate(_UNSAFE)


def one_line(text: object) -> str:
    """Return text as a single safe line."""
    return " ".join(safe(text).split())


def ranges(numbers: Sequence[int]) -> str:
    """Return `0-2,5` for 0, 1, 2, 5."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            first, last = ordered[start], ordered[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = place
    return ",".join(parts)


def rank_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-2` or `no rank`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}" if ranks else "no rank"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows (the first is the head) with aligned columns, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def count(number: int, one: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number:,} {one if number == 1 else one + 's'}"


def seconds(ms: float) -> str:
    """Return milliseconds as `0.84 s`; below 10 ms with one more digit."""
    value = ms / 1000.0
    return f"{value:.3f} s" if 0 < value < 0.01 else f"{value:.2f} s"


def age(value: object) -> str:
    """Return an age in seconds as `0.2 s`, `3 min`, `2 h`."""
    if not isinstance(value, (int, float)):
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.0f} h"


def size(value: float) -> str:
    """Return bytes as `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise ValueError(value)


def cut_text(missing: int) -> str:
    """Return the mark at the end of a line of which so many bytes are missing."""
    return f"… +{size(missing)}"


def clock(time: object) -> str:
    """Return the time of day of a UTC stamp of the contract."""
    text = str(time or "")
    return text[11:23] if len(text) >= 23 else text


def when(time_ns: object) -> str:
    """Return nanoseconds since the epoch as a UTC date and time."""
    if not isinstance(time_ns, int) or time_ns <= 0:
        return "-"
    return datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


# --- status


def header(status: Document) -> str:
    """Return the job in one line."""
    parts = [
        f"job {status.get('job')}",
        str(status.get("state")),
        f"generation {status.get('generation')}",
        f"world size {status.get('world_size')}",
        f"restarts {status.get('restarts')}/{status.get('max_restarts')}",
        f"coordinator {status.get('coordinator') or '-'}",
        f"started {status.get('started_at') or '-'}",
    ]
    return "  ".join(one_line(part) for part in parts)


def node_rows(status: Document) -> list[list[str]]:
    """Return the table of nodes, its head first."""
    rows = [["NODE", "STATE", "GROUP", "RANKS", "ADDRESS", "CLOCK", "AGENT", "REASON"]]
    nodes = status.get("nodes", ())
    for node in nodes:
        offset = node.get("clock_offset_ms")
        ranks = [int(rank["rank"]) for rank in node.get("ranks", ())]
        rows.append(
            [
                one_line(node.get("name")),
                one_line(node.get("state")),
                or_dash(node.get("group_rank")),
                ranges(ranks) or "-",
                one_line(node.get("address")),
                "-" if offset is None else f"{float(offset):+.1f} ms",
                or_dash(node.get("agent_pid")),
                one_line(node.get("reason") or ""),
            ]
        )
    more = usage.known_columns(usage.NODE_HEAD, [usage.node_cells(node) for node in nodes])
    return [[*row[:-1], *known, row[-1]] for row, known in zip(rows, more, strict=True)]


def rank_rows(status: Document) -> list[list[str]]:
    """Return the table of ranks, its head first."""
    rows = [["RANK", "NODE", "LOCAL", "PID", "STATE", "EXIT", "STEP", "LAST OUTPUT"]]
    found = [(rank, node) for node in status.get("nodes", ()) for rank in node.get("ranks", ())]
    found.sort(key=lambda pair: int(pair[0]["rank"]))
    for rank, node in found:
        code = rank.get("signal") or rank.get("exit_code")
        rows.append(
            [
                str(rank["rank"]),
                one_line(node.get("name")),
                or_dash(rank.get("local_rank")),
                or_dash(rank.get("pid")),
                one_line(rank.get("state")),
                or_dash(code),
                or_dash(rank.get("step")),
                age(rank.get("last_output_age_s")),
            ]
        )
    more = usage.known_columns(usage.RANK_HEAD, [usage.rank_cells(node, rank) for rank, node in found])
    return [[*row, *known] for row, known in zip(rows, more, strict=True)]


def status_tail(status: Document) -> list[str]:
    """Return what follows the tables: plan, end, newest incident."""
    lines = [f"next: {one_line(status['plan'])}"] if status.get("plan") else []
    if status.get("environment"):
        lines.append(f"set by operators: {one_line(overrides.now(status))}")
    if (tree := status.get("tree")) and tree.get("previous"):
        lines.append(f"work tree: {tree['digest'][:8]}, before it {tree['previous']['digest'][:8]}")
    if status.get("failure"):
        lines.append(f"failed: {one_line(status['failure'])}")
    incident = status.get("incident")
    if incident:
        over = " (over)" if incident.get("ongoing") is False else ""
        lines.append(f"incident {incident.get('id')}{over}: {one_line(incident.get('summary'))}")
    for one in status.get("warnings") or ():
        who = one["node"] if one["rank"] is None else f"rank {one['rank']}"
        lines.append(f"warning: {who}: {one_line(one['message'])}")
    if status.get("coordinator_reachable") is False and status.get("state") not in ENDED:
        lines.append(f"note: {status.get('node')} answers; the coordinator cannot be reached, so this may be old")
    return lines


def status_lines(status: Document) -> list[str]:
    """Return the whole status as text."""
    ranks = rank_rows(status)
    lines = [header(status), "", *table(node_rows(status))]
    if len(ranks) > 1:
        lines += ["", *table(ranks)]
    tail = status_tail(status)
    return [*lines, "", *tail] if tail else lines


def or_dash(value: object) -> str:
    """Return one safe line, a dash where there is nothing."""
    return "-" if value is None else one_line(value)


# --- events


def event_line(event: Document) -> str:
    """Return an event in one line: time, type, generation, node, rank, text."""
    place = " ".join(
        part
        for part in (
            one_line(event["node"]) if event.get("node") else "",
            f"rank {event['rank']}" if event.get("rank") is not None else "",
        )
        if part
    )
    generation = event.get("generation")
    group = "" if generation is None or int(generation) < 0 else f"g{generation}"
    text = event_text(event)
    return f"{clock(event.get('time'))} {event.get('type')!s:<20} {group:<4} {place:<14} {text}".rstrip()


def event_text(event: Document) -> str:
    """Return what an event says beside its type and place."""
    detail: Document = event.get("detail") or {}
    kind = str(event.get("type"))
    teller = _TELLERS.get(kind)
    if teller is not None:
        return one_line(teller(detail))
    if kind == "generation_started":
        return f"world size {detail.get('world_size')} on {_members(detail)}{meeting_text(detail)}"
    if kind == "rank_failed":
        message = _message(detail.get("message"))
        return exit_text(detail.get("exit") or {}) + (f": {message}" if message else "")
    if kind == "incident":
        return one_line(detail.get("summary") or "")
    if kind == "job_started":
        return f"{one_line(detail.get('script'))} on {' '.join(map(str, detail.get('nodes') or ()))}"
    for key in ("reason", "cause", "operator", "message"):
        if detail.get(key):
            return one_line(detail[key])
    if kind == "node_ready" and detail.get("nproc") is not None:
        return f"{detail['nproc']} ranks"
    return " ".join(f"{key}={one_line(value)}" for key, value in detail.items() if not isinstance(value, (dict, list)))


def meeting_text(detail: Document) -> str:
    """Return where torch's own agents of a generation meet, empty where the coordinator forms the group."""
    joining = detail.get("rendezvous")
    if not isinstance(joining, Mapping):
        return ""
    return f", meeting by {joining.get('backend')} at {joining.get('endpoint')}, id {joining.get('run_id')}"


def ranks_text(detail: Document) -> str:
    """Return which ranks torch gave a node."""
    ranks = " ".join(str(rank[0]) for rank in detail.get("ranks") or ())
    return f"torch gave it ranks {ranks} of {detail.get('world_size')}"


def signal_text(detail: Document) -> str:
    """Return which signal went to which ranks, and who sent it."""
    ranks = rank_words([int(rank) for rank in detail.get("ranks") or ()])
    return f"{one_line(detail.get('signal'))} to {ranks} by {one_line(detail.get('operator'))}"


def _message(message: object) -> str:
    if isinstance(message, Mapping):
        message = message.get("message", "")
    lines = [line.strip() for line in safe(message or "").splitlines() if line.strip()]
    if not lines:
        return ""
    # A text may have several lines; the cause of one that hands on another's traceback is that one's end.
    return lines[-1] if any(line.startswith(TRACEBACK) for line in lines) else lines[0]


def _members(detail: Document) -> str:
    return " ".join(str(member.get("node")) for member in detail.get("members") or ())


def phases_of(detail: Document) -> dict[str, float]:
    """Return the phases of a restart in milliseconds, in order."""
    return {name: float(detail[name]) for name in PHASES if isinstance(detail.get(name), (int, float))}


def running_text(detail: Document) -> str:
    """Return `world size 6, 0.84 s (detect 0.00, stop 0.21, …)`."""
    phases = phases_of(detail)
    text = f"world size {detail.get('world_size')}"
    if not phases:
        return text
    parts = ", ".join(f"{name} {value / 1000:.2f}" for name, value in phases.items() if value >= 5 or name != "detect")
    return f"{text}, {seconds(sum(phases.values()))} ({parts})"


def tree_change(detail: Document) -> str:
    """Return `3 files, 12.0 kB: train.py, model.py, lib/a.py, …`."""
    number = int(detail.get("files") or 0)
    paths = [one_line(path) for path in detail.get("paths") or ()][:LONGEST_CHANGE]
    more = ", …" if number > len(paths) else ""
    return f"{number} file{'' if number == 1 else 's'}, {size(int(detail.get('bytes') or 0))}: {', '.join(paths)}{more}"


def tree_text(detail: Document) -> str:
    """Return which work tree the groups start from now, and who wanted it, or why."""
    digest = one_line(str(detail.get("digest") or "")[:8])
    how = f"back to {digest}" if detail.get("rollback") else f"{digest}, {tree_change(detail)}"
    without = f"; without {' '.join(map(one_line, detail['without']))}" if detail.get("without") else ""
    if detail.get("reason"):
        return f"{how}: {one_line(detail['reason'])}"
    return f"{how}{without}; by {one_line(detail.get('operator') or 'an operator')}"


_TELLERS: Mapping[str, Callable[[Document], str]] = {
    "generation_running": running_text,
    "ranks_assigned": ranks_text,
    "environment_set": overrides.told,
    "signal_sent": signal_text,
    "tree_changed": tree_text,
}


def outcome_line(event: Document) -> str:
    """Return how a request ended, in one line."""
    kind = str(event.get("type"))
    if kind == "generation_running":
        return f"generation {event.get('generation')} running: {running_text(event.get('detail') or {})}"
    text = event_text(event)
    words = kind.replace("_", " ")
    place = f" {one_line(event['node'])}" if event.get("node") else ""
    return f"{words}{place}" + (f": {text}" if text else "")


def exit_text(end: Document) -> str:
    """Return `exit 1` or `killed by SIGKILL`."""
    if end.get("signal"):
        return f"killed by {end['signal']}"
    return f"exit {end['code']}" if end.get("code") is not None else "ended"


# --- other


def job_rows(jobs: Sequence[Document]) -> list[list[str]]:
    """Return the table of jobs, its head first."""
    rows = [["JOB", "STATE", "LIVE", "GENERATION", "WORLD", "CREATED", "HOSTS", "SCRIPT"]]
    for job in jobs:
        hosts = [str(host) for host in job.get("hosts", ())]
        shown = " ".join(hosts[:LONGEST_FOLD]) + (f" +{len(hosts) - LONGEST_FOLD}" if len(hosts) > LONGEST_FOLD else "")
        rows.append(
            [
                one_line(job.get("job")),
                or_dash(job.get("state")),
                "yes" if job.get("live") else "no",
                or_dash(job.get("generation")),
                or_dash(job.get("world_size")),
                when(job.get("created_ns")),
                one_line(shown),
                or_dash(job.get("script")),
            ]
        )
    return rows
