"""Hosts with a job on them: who is who there, whether all is well, and what the judgement has to know of what was done.

In: a cluster, a directory, the job's settings. Out: `Site`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests import skew
from tests.cluster import Cluster
from tests.cluster.job import POLL_S, Job, journal
from tests.cluster.network import SSH_PORT
from tests.cluster.podman import LIGHT_IMAGE, Podman, mounts
from tests.faults import ranks
from tests.faults.commands import Operator
from tests.faults.invariants import Awake
from tests.faults.ranks import Rank

_HEADS_S = 0.6
"""Within this time a rank that steps has noted a step."""
_LOOK_S = 0.5
_LISTENING = "0A"
_SSH = f"{SSH_PORT:04X}"


class Site:
    """The hosts, the job, its operator, and the notes of its ranks; `clocks`: the clocks of the day can be set.

    `podman`: the ranks run in its containers.
    """

    def __init__(
        self, cluster: Cluster, place: Path, node_timeout: float, *, clocks: bool = False, podman: Podman | None = None
    ) -> None:
        self.cluster = cluster
        self.place = place
        self.node_timeout = node_timeout
        self.nodes = [host.name for host in cluster.hosts]
        self.stamps = ranks.Stamps(place / "stamps")
        self.awake: list[Awake] = []
        self._unseen: list[tuple[int, int]] = []
        self.lost_disks: dict[str, int] = {}
        """When (ns) a node lost its disk last."""
        self.power_failures: dict[str, int] = {}
        """When (ns) a node lost its power last, and with it what was not synced."""
        self._unseen_since: int | None = None
        self._looked = 0.0
        per_node = 2 if len(self.nodes) == 3 else 1
        self.world = per_node * len(self.nodes)
        keys: dict[str, Any] = {"nproc_per_node": per_node, "node_timeout": self.node_timeout, "min_nodes": 1}
        # As a user has it: nothing that is warm may make a fault worse.
        keys |= {"standby": "auto"}
        keys |= {"max_restarts": 1000, "env": {ranks.STAMPS: str(self.stamps.directory)}, "stop_grace": 3.0}
        if clocks:
            keys["hosts"] = self._clocks()
        if podman is not None:
            keys["defaults"] = {"prelude": podman.prelude}
            keys |= {"container": LIGHT_IMAGE, "mounts": [*mounts(), str(place)]}
        self.job = Job(cluster, place / "work", ranks.SCRIPT, **keys)
        self.operator = Operator(place / "commands", self.job.command)

    def _clocks(self) -> dict[str, dict[str, str]]:
        library = skew.build(self.place)
        for node in self.nodes:
            skew.jump(self.clock(node), 0)
        settings = {node: skew.follow(library, self.clock(node)) for node in self.nodes}
        lines = {node: " ".join(f"{name}={value!r}" for name, value in one.items()) for node, one in settings.items()}
        return {node: {"prelude": f"export {line}"} for node, line in lines.items()}

    def clock(self, node: str) -> Path:
        """Return the file by which a host's clock of the day is set, where it can be."""
        return self.place / f"{node}.clock"

    # --- who is who

    def coordinator(self) -> str:
        """Return the node that coordinates, by the longest journal."""
        changes = [record["node"] for record in self.records() if record["type"] == "coordinator_changed"]
        return str([self.nodes[0], *changes][-1])

    def records(self) -> list[dict[str, Any]]:
        """Return the longest journal."""
        return max((self.journal(node) for node in self.nodes), key=len)

    def journal(self, node: str) -> list[dict[str, Any]]:
        """Return the records of a node's file that can be read."""
        with contextlib.suppress(ValueError):
            return journal(self.cluster, node, self.job.name[0])
        return []

    def agents(self, *nodes: str) -> list[int]:
        """Return the pids of these nodes' agents."""
        return self._pids(nodes, lambda line: " serve --job " in line)

    def engines(self, *nodes: str) -> list[int]:
        """Return the pids of these nodes' engines."""
        # A container's tool and its monitor have the engine's command line behind their own.
        tools = ("podman", "conmon")
        return self._pids(nodes, lambda line: " engine --job " in line and not line.split()[0].endswith(tools))

    def workers(self, *nodes: str) -> list[int]:
        """Return the pids of these nodes' ranks."""
        return self._pids(nodes, lambda line: line.endswith(" train.py"))

    def _reachable(self) -> set[str]:
        """Return the nodes whose agent runs and listens; none where one has just looked.

        To look takes the processor that agents need to start.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return set()
        self._looked = now
        return {node for node in self.nodes if any(map(_listens, self.agents(node)))}

    def _pids(self, nodes: Sequence[str], fits: Callable[[str], bool]) -> list[int]:
        return [pid for node in nodes for pid, line in self.cluster.processes(node).items() if fits(line)]

    def journal_file(self, node: str) -> bytes:
        """Return a node's journal as it is."""
        path = self.files(node) / "events.jsonl"
        return path.read_bytes() if path.exists() else b""

    def files(self, node: str) -> Path:
        """Return where a node keeps what belongs to the job."""
        return self.cluster.host(node).home / ".supervisor" / "jobs" / self.job.name[0]

    # --- whether all is well

    def stepping(self) -> list[Rank]:
        """Return the processes that make steps now."""
        return self.stamps.stepping(time.monotonic_ns() - int(_HEADS_S * 1e9))

    def well(self) -> bool:
        """Return whether one group of all hosts steps, each host has an agent, and all have the same journal.

        A group steps on for most of a node_timeout after the agent of one of its nodes was killed.
        """
        if not self._whole() or len(set(map(self.journal_file, self.nodes))) > 1:
            return False
        return self._reachable() == set(self.nodes)

    def _whole(self) -> bool:
        """Return whether one group of all hosts steps, and no other."""
        now = self.stepping()
        newest_group = max(now, key=lambda one: one.times_ns[0]).group if now else None
        newest = [rank for rank in now if rank.group == newest_group]
        return len({rank.rank for rank in newest}) == self.world and {rank.node for rank in newest} == set(self.nodes)

    def state(self) -> str:
        """Say what runs where, for a case that is not well."""
        groups = sorted({f"{rank.node} in {rank.group}" for rank in self.stepping()})
        agents = [node for node in self.nodes if self.agents(node)]
        records = {node: len(self.journal(node)) for node in self.nodes}
        return f"these step: {', '.join(groups) or 'none'}; agents on {agents}; records {records}"

    def until(self, look: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until something is true; raises AssertionError."""
        end = time.monotonic() + timeout_s
        while not look():
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {timeout_s:g} s")
            time.sleep(POLL_S)

    # --- whom the operator's machine reaches

    def hide(self) -> None:
        """Note that the operator's machine reaches no agent from now on, until after the healing one runs."""
        if self._unseen_since is None:
            self._unseen_since = time.monotonic_ns()

    def look_for_agents(self) -> None:
        """Note that an agent can be reached again, if one can be."""
        if self._unseen_since is not None and self._reachable():
            self._unseen.append((self._unseen_since, time.monotonic_ns()))
            self._unseen_since = None

    def unseen_until(self, end_ns: int) -> list[tuple[int, int]]:
        """Return when (ns) the operator's machine reached no agent."""
        return [*self._unseen, *([] if self._unseen_since is None else [(self._unseen_since, end_ns)])]


def _listens(pid: int) -> bool:
    """Return whether a process of a host's network listens there, beside sshd."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(fields[3] == _LISTENING and not fields[1].endswith(_SSH) for fields in map(str.split, lines))
