"""The status of a job, the list of jobs and NCCL's facts as text: one-line summaries and tables. Pure.

In: status and job documents, a Fabric. Out: lines without colour, rows of tables with their head first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.text.names import ranges, size_text
from remote_agent.wire.events import ENDED_STATES, Condition, NodeState, RankState, phases_of
from supervisor.inventory.pattern import fold
from supervisor.wording import usage
from supervisor.wording.events import phases_text, snapshot_step, start_text, starts_text, variables
from supervisor.wording.incidents import hang_step, standing
from supervisor.wording.slow import slow_line
from supervisor.wording.values import age, clock_ns, date, date_ns, one_line, or_dash, table

if TYPE_CHECKING:
    from remote_agent.wire.answers import JobRow
    from remote_agent.wire.documents import NodeStatus, SnapshotStatus, Status
    from supervisor.nccl import Fabric

# The list of jobs names at most this many hosts of a job.
MAX_HOSTS = 12
# The state of a rank, node or job has this role of the themes.
STATE_ROLES: Mapping[str, str] = {
    each: role
    for role, states in {
        "bad": (NodeState.FAILED, NodeState.LOST),
        "hung": (RankState.SILENT, Condition.HUNG),
        "warn": (NodeState.DRAINING, Condition.DEGRADED, Condition.SLOW, Condition.RESTARTING, Condition.STOPPING),
        "start": (RankState.STARTING, NodeState.CONNECTING, NodeState.READY, Condition.LAUNCHING, Condition.IMPORTING),
        "ok": (RankState.RUNNING,),
        "done": (RankState.SUCCEEDED,),
        "off": (RankState.KILLED, NodeState.REMOVED, NodeState.SPARE, Condition.STOPPED),
    }.items()
    for each in states
}


def condition_of(status: Status) -> str:
    """Return what the job is doing: launching, importing, running, degraded, hung, restarting, stopping, or its end."""
    return str(status.get("condition") or status.get("state") or "")


def next_step(status: Status, now_s: float | None = None) -> str:
    """Return what happens next where that is not obvious; now_s: Unix time, for a screen that counts."""
    incident = status.get("incident")
    if incident is not None and condition_of(status) == Condition.HUNG:
        return hang_step(incident, now_s)
    return status.get("plan") or ""


def start_of(status: Status) -> str:
    """Return how long the newest start took: `restart 4.2 s to first step`; "" where it is not known."""
    return start_text(status.get("generation"), phases_of(status.get("phases") or {}))


def header(status: Status) -> str:
    """Return the job in one line."""
    parts = [
        f"job {status.get('job')}",
        condition_of(status) or "-",
        f"generation {status.get('generation')}",
        f"world size {status.get('world_size')}",
        f"restarts {status.get('restarts')}/{status.get('max_restarts')}",
        f"coordinator {status.get('coordinator') or '-'}",
        f"started {date(status.get('started_at'))}",
    ]
    return "  ".join(one_line(part) for part in parts)


def node_rows(status: Status) -> list[list[str]]:
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


def rank_rows(status: Status) -> list[list[str]]:
    """Return the table of ranks, its head first."""
    rows = [["RANK", "NODE", "LOCAL", "PID", "STATE", "EXIT", "STEP", "LAST OUTPUT"]]
    pairs = [(rank, node) for node in status.get("nodes", ()) for rank in node.get("ranks", ())]
    pairs.sort(key=lambda pair: int(pair[0]["rank"]))
    for rank, node in pairs:
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
    more = usage.known_columns(usage.RANK_HEAD, [usage.rank_cells(node, rank) for rank, node in pairs])
    return [[*row, *known] for row, known in zip(rows, more, strict=True)]


def status_tail(status: Status) -> list[str]:
    """Return the lines below the tables: what happens next, how the job ended, the newest incident."""
    following = next_step(status)
    lines = [f"next: {one_line(following)}"] if following else []
    if start := start_of(status):
        lines.append(f"{start}: {phases_text(phases_of(status['phases']))}")
    lines += warm_lines(status)
    if status.get("environment"):
        lines.append(f"set by operators: {one_line(environment(status))}")
    if (tree := status.get("tree")) and (before := tree["previous"]):
        lines.append(f"work tree: {tree['digest'][:8]}, before {before['digest'][:8]}")
    if status.get("failure"):
        lines.append(f"failed: {one_line(status['failure'])}")
    incident = status.get("incident")
    if incident:
        now = f" ({text})" if (text := standing(incident)) else ""
        lines.append(f"incident {incident.get('id')}{now}: {one_line(incident.get('summary'))}")
    lines += [slow_line(one) for one in status.get("slow") or ()]
    for one in status.get("warnings") or ():
        if one["kind"] == "slow":
            continue
        who = one["node"] if one["rank"] is None else f"rank {one['rank']}"
        lines.append(f"warning: {who}: {one_line(one['message'])}")
    if status.get("coordinator_reachable") is False and status.get("state") not in ENDED_STATES:
        where = status.get("node")
        lost = any(node["name"] == where and node.get("state") == NodeState.LOST for node in status.get("nodes", ()))
        text = (
            "no agent of the job runs where hosts answer: `supervisor attach` starts them, and the job continues"
            if lost
            else f"{where} answers, but the coordinator is unreachable; this status may be out of date"
        )
        lines.append(f"note: {text}")
    return lines


def warm_lines(status: Status) -> list[str]:
    """Return whether the ranks were started warm, and whether the next ones will be; the reasons where they are not."""
    nodes = status.get("nodes", ())
    starts = {one_line(node["name"]): start for node in nodes if (start := node.get("start"))}
    lines = [f"ranks started {one_line(starts_text(starts))}"] if starts else []
    groups: dict[str, list[NodeStatus]] = {}
    for node in nodes if status.get("state") not in ENDED_STATES else ():
        waiting = node.get("standby")
        text = _NEXT_START.get(waiting["state"], "").format(why=waiting.get("why")) if waiting else ""
        groups.setdefault(text, []).append(node)
    parts = [
        f"{fold(one_line(node['name']) for node in group)} {text}{_memory(group)}"
        for text, group in groups.items()
        if text
    ]
    lines += [f"next start: {one_line('; '.join(parts))}"] if parts else []
    left_out = {why for node in nodes if (waiting := node.get("standby")) for why in waiting.get("left_out", ())}
    return [*lines, *(f"not loaded early: {one_line(why)}" for why in sorted(left_out))] if parts else lines


# The state of a node's waiting process decides how the next start is.
_NEXT_START = {"ready": "warm", "loading": "cold until modules are loaded", "failed": "cold: {why}"}


def _memory(nodes: Sequence[NodeStatus]) -> str:
    most_mb = max(waiting.get("mb") or 0 for node in nodes if (waiting := node.get("standby")))
    return f" ({most_mb} MB{' each' if len(nodes) > 1 else ''})" if most_mb else ""


def status_lines(status: Status) -> list[str]:
    """Return the whole status as text."""
    ranks = rank_rows(status)
    lines = [header(status), "", *table(node_rows(status))]
    if len(ranks) > 1:
        lines += ["", *table(ranks)]
    tail = status_tail(status)
    return [*lines, "", *tail] if tail else lines


def environment(status: Status) -> str:
    """Return the environment that operators have set for the workers, and since when; nothing if they have not."""
    overrides = status.get("environment")
    if overrides is None:
        return ""
    first = overrides.get("from_generation") or 0
    waits = first > (status.get("generation") or 0)
    return f"{variables(overrides)}, {'from' if waits else 'since'} generation {first}"


def job_rows(jobs: Sequence[JobRow]) -> list[list[str]]:
    """Return the table of jobs, its head first."""
    # A job that is over may still keep a process on its hosts.
    shows_warm = any(job.get("warm_until_ns") for job in jobs)
    rows = [
        [
            "JOB",
            "STATE",
            *(["WARM UNTIL"] if shows_warm else []),
            "LIVE",
            "GENERATION",
            "WORLD",
            "CREATED",
            "HOSTS",
            "SCRIPT",
        ]
    ]
    for job in jobs:
        hosts = [str(host) for host in job.get("hosts", ())]
        listed = " ".join(hosts[:MAX_HOSTS]) + (f" +{len(hosts) - MAX_HOSTS}" if len(hosts) > MAX_HOSTS else "")
        rows.append(
            [
                one_line(job.get("job")),
                or_dash(job.get("state")),
                *([clock_ns(job.get("warm_until_ns"), millis=False)] if shows_warm else []),
                "yes" if job.get("live") else "no",
                or_dash(job.get("generation")),
                or_dash(job.get("world_size")),
                date_ns(job.get("created_ns")),
                one_line(listed),
                or_dash(job.get("script")),
            ]
        )
    return rows


_SKIPPED = "skipped: the job went back to an older one"


def snapshot_rows(snapshots: Sequence[SnapshotStatus]) -> list[list[str]]:
    """Return the table of kept snapshots, its head first."""
    rows = [["ID", "STEP", "SAVED", "SIZE", "NODES", "PATH"]]
    for one in snapshots:
        skipped = f" ({_SKIPPED})" if one.get("skipped") else ""
        nodes = fold(map(str, one.get("nodes") or ()))
        step, saved = snapshot_step(one) or "-", date_ns(one.get("time_ns"))
        path, size = f"{one_line(one.get('path'))}{skipped}", size_text(int(one.get("bytes") or 0))
        rows.append([one_line(one.get("id")), step, saved, size, one_line(nodes), path])
    return rows


def snapshot_words(one: SnapshotStatus) -> tuple[str, str]:
    """Return a kept snapshot in short, and where and how large it is."""
    step = snapshot_step(one)
    label = f"step {step}" if step else one_line(one.get("path"))
    size = size_text(int(one.get("bytes") or 0))
    facts = (clock_ns(one.get("time_ns"), millis=False), one_line(one.get("path")), size)
    skipped = _SKIPPED if one.get("skipped") else ""
    return label, "  ".join(filter(None, (*facts, f"on {one_line(fold(map(str, one.get('nodes') or ())))}", skipped)))


# --- NCCL, the short form of the NCCL screen

ODDITIES = 4


def fabric_lines(fabric: Fabric) -> list[str]:
    """Return version, networks and transports of the job, then the oddities, the worst first."""
    if not fabric.nodes:
        return []
    parts = [fabric.all_of("version"), f"network {network(fabric)}" if fabric.common("network") else ""]
    parts += [f"inside nodes {kinds(fabric.inside())}" if fabric.inside() else ""]
    parts += [f"between nodes {kinds(fabric.between())}" if fabric.between() else ""]
    parts += [f"NVLS {fabric.all_of('nvls')}" if fabric.common("nvls") else ""]
    lines = [one_line("nccl: " + ", ".join(part for part in parts if part))]
    lines += [f"  {'-' if odd.severity == 'info' else '!'} {one_line(odd.text)}" for odd in fabric.odd[:ODDITIES]]
    if len(fabric.odd) > ODDITIES:
        lines.append(f"  and {len(fabric.odd) - ODDITIES} more: the NCCL screen shows them")
    missing = absent(fabric)
    return [*lines, f"  missing: {missing}"] if missing else lines


def absent(fabric: Fabric) -> str:
    """Return the nodes without NCCL facts, and why."""
    reasons = ((fabric.unanswered, "did not answer"), (fabric.silent, "no NCCL output"))
    return "; ".join(f"{one_line(fold(nodes))} {why}" for nodes, why in reasons if nodes)


def network(fabric: Fabric) -> str:
    """Return the networks in use, that of most nodes first, with its plug-in if known."""
    plugin = fabric.common("plugin")
    name = fabric.all_of("network")
    return f"{name} ({plugin})" if plugin and plugin != name else name


def kinds(transports: Counter[str]) -> str:
    """Return the transports, the one with most channels first."""
    return ", ".join(kind for kind, _ in transports.most_common())
