"""The newest status document as frozen rows: what every screen draws.

In: the status document, the hosts' progress, incidents. Out: `JobView`, a value; equal inputs give equal views.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.wire.documents import NodeVitals, is_old
from remote_agent.wire.events import ENDED_STATES
from supervisor.errors import EXIT_STATUS, LaunchFailed
from supervisor.link.view import HostView
from supervisor.tui import looks
from supervisor.wording import usage
from supervisor.wording.status import condition_of, next_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from remote_agent.wire.documents import (
        GpuVitals,
        IncidentDocument,
        NodeStatus,
        RankProgress,
        RankStatus,
        RankVitals,
        Status,
    )
    from supervisor.session import Session

# Agents send a status at least every second; after three missing ones it is old.
STALE_S = 3.0
# The severity of a node without problems.
ORDINARY = 4
_SEVERITY = {state: at for at, state in enumerate(looks.RANK_ORDER)}


class RankRow(NamedTuple):
    """One rank: what every update needs of all 512 ranks, and the document for the rows in view."""

    rank: int
    node: str
    state: str
    step: int | None
    verdict: str
    """culprit or victim in the incident of this generation, or ""."""
    look: looks.Look
    """How its state is shown; the first failure differs from its consequences."""
    document: RankStatus
    node_vitals: NodeVitals
    """The usage of its node."""

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return self.document.get("local_rank") or 0

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        return self.document.get("pid")

    @property
    def output_age_s(self) -> float | None:
        """Seconds since its last output."""
        return self.document.get("last_output_age_s")

    @property
    def progress(self) -> RankProgress:
        """The progress in the document: loss, rate with unit, steps_s, lag."""
        return self.document.get("progress") or {}

    @property
    def vitals(self) -> RankVitals:
        """Its usage."""
        return self.document.get("vitals") or {}

    @property
    def gpu(self) -> GpuVitals:
        """The GPU that it uses."""
        return usage.own_gpu(self.node_vitals, self.vitals)

    @property
    def vitals_old(self) -> bool:
        """Whether the usage is too old to be shown as current."""
        return bool(self.vitals and self.node_vitals) and is_old(self.node_vitals)

    @property
    def memory(self) -> float | None:
        """The used share of its GPU's memory; without a GPU its share of the node's memory."""
        gpu = self.gpu
        if gpu.get("mem_used") is not None:
            return _share(gpu["mem_used"], gpu.get("mem_total"))
        return _share(self.vitals.get("rss"), self.node_vitals.get("mem_total"))

    @property
    def has_problem(self) -> bool:
        """Whether it needs attention."""
        return self.state in ("failed", "silent")

    @property
    def outcome(self) -> str:
        """`first: exit 1`, `SIGKILL`, or nothing while it runs."""
        exit_code, signal = self.document.get("exit_code"), self.document.get("signal")
        how = signal or ("" if exit_code is None else f"exit {exit_code}")
        if self.verdict == "culprit" and self.state == "failed":
            return f"first: {how}" if how else "first failure"
        return how


@dataclasses.dataclass(frozen=True)
class NodeRow:
    """One node: its state in the job, and the connection to it."""

    name: str
    state: str
    """A node state of the contract; the state of the connection before the job has one."""
    address: str
    group_rank: int | None
    reason: str
    clock_offset_ms: float | None
    cordoned: bool
    ranks: tuple[RankRow, ...]
    host: HostView
    """Our own connection, as it was then: a screen may be paused."""
    vitals: NodeVitals = dataclasses.field(default_factory=NodeVitals)
    """Its usage, as in the document."""

    @property
    def vitals_old(self) -> bool:
        """Whether the usage is too old to be shown as current."""
        return is_old(self.vitals)

    @property
    def left(self) -> bool:
        """Whether it was removed, and its agent has exited: nothing is wrong."""
        return self.state == "removed" and self.host.state == "lost"

    @property
    def look(self) -> looks.Look:
        """How its state is shown."""
        return looks.NODES.get(self.state, looks.UNKNOWN)

    @property
    def why(self) -> str:
        """One line on why it is in this state."""
        return self.host.error or self.reason or self.host.text

    @property
    def has_problem(self) -> bool:
        """Whether it needs attention."""
        return _node_severity(self) < ORDINARY

    @cached_property
    def worst(self) -> RankRow | None:
        """The rank with the worst state, shown for the node where there is one glyph per node."""
        return min(self.ranks, key=_severity, default=None)

    @cached_property
    def train_step(self) -> int | None:
        """The furthest step of its ranks."""
        return max((rank.step for rank in self.ranks if rank.step is not None), default=None)

    @cached_property
    def output_age_s(self) -> float | None:
        """Seconds since the last output of any of its ranks."""
        return min((age_s for rank in self.ranks if (age_s := rank.output_age_s) is not None), default=None)


@dataclasses.dataclass(frozen=True)
class JobView:
    """One job at one moment."""

    job: str
    state: str
    """A job state of the contract, or "" before the first status."""
    condition: str
    """What the job is doing, in the status document's word; "" before the first status."""
    generation: int | None
    restarts: int
    max_restarts: int | None
    world_size: int | None
    coordinator: str
    coordinator_reachable: bool
    started_at: str
    nodes: tuple[NodeRow, ...]
    incident: IncidentDocument | None
    status: Status
    """The document that all this is from."""
    failure: str
    """Why the job failed, in words."""
    problem: str
    """Why no job can be shown: a failed launch, an unknown job."""
    hint: str
    bringing_up: bool
    """This session launches the job, or has tried to."""
    script: str
    ended: bool
    stale: bool
    """The status is too old to be shown as current."""

    @cached_property
    def ranks(self) -> tuple[RankRow, ...]:
        """All ranks, in order."""
        return tuple(sorted([rank for node in self.nodes for rank in node.ranks], key=attrgetter("rank")))

    @cached_property
    def states(self) -> Counter[str]:
        """How many ranks are in each state."""
        return Counter([rank.state for rank in self.ranks])

    @cached_property
    def nodes_by_name(self) -> dict[str, NodeRow]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def train_step(self) -> int | None:
        """The furthest step of any rank."""
        return max([rank.step for rank in self.ranks if rank.step is not None], default=None)

    @property
    def look(self) -> looks.Look:
        """How the state of the job is shown."""
        return looks.JOBS.get(self.condition, looks.UNKNOWN)

    def next_step(self, now_s: float) -> str:
        """Return what happens next where that is not obvious; it counts, so it is made when it is drawn."""
        return next_step(self.status, now_s)

    @property
    def title(self) -> str:
        """The job in a few words: the title of the terminal."""
        word = self.look.word if self.condition else "LAUNCH FAILED" if self.problem else "CONNECTING"
        return f"{word} {self.job or 'supervisor'}"

    @property
    def exit_status(self) -> int | None:
        """The exit code of a job that is over."""
        return EXIT_STATUS.get(self.state)

    @property
    def launching(self) -> bool:
        """Whether no worker group has been formed yet."""
        return not self.ended and self.state in ("", "starting") and not any(node.ranks for node in self.nodes)

    def rank(self, number: int) -> RankRow | None:
        """Return the rank of that number."""
        return next((rank for rank in self.ranks if rank.rank == number), None)

    def worst_first(self) -> tuple[NodeRow, ...]:
        """Return the nodes, those with problems first, otherwise in inventory order."""
        return tuple(sorted(self.nodes, key=_node_severity))


def take(source: Session) -> JobView:
    """Return the session at this moment."""
    stale = source.status_age_s > STALE_S and not source.ended
    # A bundle shows the job as it was.
    ended = source.ended and (source.made_s is None or source.status.get("state") in ENDED_STATES)
    job_view = build(source.status, source.hosts, source.incidents, job=source.job, ended=ended, stale=stale)
    failure = source.failure
    if failure is None or job_view.state:
        return dataclasses.replace(job_view, bringing_up=source.launching)
    return dataclasses.replace(
        job_view,
        problem=str(getattr(failure, "message", failure)),
        hint=str(getattr(failure, "hint", "")),
        bringing_up=isinstance(failure, LaunchFailed),
    )


def build(
    status: Status,
    hosts: Mapping[str, HostView],
    incidents: Sequence[IncidentDocument],
    *,
    job: str,
    ended: bool,
    stale: bool,
) -> JobView:
    """Return the view of a job from documents; missing fields are unknown, never guessed."""
    documents = {node["name"]: node for node in status.get("nodes", ())}
    names = [*hosts, *(name for name in documents if name not in hosts)]
    incident = status.get("incident") or (incidents[-1] if incidents else None)
    generation = status.get("generation")
    verdicts = _verdicts(incident) if incident and incident.get("generation") == generation else {}
    return JobView(
        job=status.get("job") or job,
        state=status.get("state") or "",
        condition=condition_of(status),
        generation=generation,
        restarts=status.get("restarts") or 0,
        max_restarts=status.get("max_restarts"),
        world_size=status.get("world_size"),
        coordinator=status.get("coordinator") or "",
        coordinator_reachable=bool(status.get("coordinator_reachable", True)),
        started_at=status.get("started_at") or "",
        nodes=tuple(_node(name, documents.get(name), hosts.get(name), verdicts, ended=ended) for name in names),
        incident=incident,
        status=status,
        failure=status.get("failure") or "",
        problem="",
        hint="",
        bringing_up=False,
        script=_command(status),
        ended=ended,
        stale=stale,
    )


def _command(status: Status) -> str:
    script = status.get("script")
    return " ".join((script.get("script") or "", *script.get("args", ()))) if script else ""


def _verdicts(incident: IncidentDocument) -> dict[int, str]:
    verdicts = {rank: "victim" for group in incident.get("victims", ()) for rank in group["ranks"]}
    return {**verdicts, **dict.fromkeys(incident.get("culprit_ranks", ()), "culprit")}


def _node(
    name: str,
    document: NodeStatus | None,
    host: HostView | None,
    verdicts: Mapping[int, str],
    *,
    ended: bool = False,
) -> NodeRow:
    data: NodeStatus = document or {"name": name}
    # A node that only the job knows has no connection of ours.
    host = HostView(name, "") if host is None else dataclasses.replace(host, began=dict(host.began))
    state = data.get("state") or {"up": "ready"}.get(host.state, host.state)
    vitals = data.get("vitals") or {}
    rows = data.get("ranks", [])
    if ended:
        # Ages are of the last status: after the end of the job they would stand still.
        rows = [{**rank, "last_output_age_s": None} for rank in rows]
    ranks = tuple([_rank(name, vitals, rank, verdicts) for rank in rows])
    return NodeRow(
        name=name,
        state=state,
        address=data.get("address") or "",
        group_rank=data.get("group_rank"),
        reason=data.get("reason") or "",
        clock_offset_ms=data.get("clock_offset_ms"),
        cordoned=data.get("cordoned", False),
        ranks=ranks,
        host=host,
        vitals=vitals,
    )


def _rank(node: str, node_vitals: NodeVitals, data: RankStatus, verdicts: Mapping[int, str]) -> RankRow:
    number, state = data["rank"], data.get("state") or ""
    verdict = verdicts.get(number, "")
    is_victim = state == "failed" and verdict == "victim"
    look = looks.VICTIM if is_victim else looks.RANKS.get(state, looks.UNKNOWN)
    return RankRow(number, node, state, data.get("step"), verdict, look, data, node_vitals)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _severity(rank: RankRow) -> int:
    return _SEVERITY.get("killed" if rank.look is looks.VICTIM else rank.state, len(_SEVERITY))


def _node_severity(node: NodeRow) -> int:
    if node.state in ("failed", "lost"):
        return 0
    if node.left:
        return ORDINARY + 1
    if node.worst is not None and node.worst.state == "failed":
        return 1
    if node.host.state in ("lost", "failed") or (node.worst is not None and node.worst.state == "silent"):
        return 2
    if node.state in ("connecting", "draining"):
        return 3
    return ORDINARY + 1 if node.state in ("removed", "spare") else ORDINARY
