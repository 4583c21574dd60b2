"""One run of a script under stock torchrun or under ours, on the same hosts, with the same questions to ask it.

In: a Cluster and a Setting. Out: a `Run`; after its `with` nothing of it is left on the hosts.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.bench import torchrun
from tests.bench.stamps import POLL_S, Stamps
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job
from tests.cluster.leftovers import end as kill

START_S = 90.0
ANSWER_S = 30.0


@dataclass(frozen=True)
class Setting:
    """What is started, and how: the same for both launchers, but for what each alone needs."""

    script: str
    hosts: tuple[str, ...]
    """Where the job runs at first."""
    nnodes: str
    nproc: int = 1
    max_restarts: int = 3
    options: tuple[str, ...] = ()
    """Options of both."""
    later: tuple[str, ...] = ()
    """Hosts that `add` may bring in."""
    stock_options: tuple[str, ...] = ()
    stock_env: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, object] = field(default_factory=dict)
    """Ours: more keys of [job]."""

    @property
    def ranks(self) -> int:
        """How many ranks there are at first."""
        return len(self.hosts) * self.nproc


class Run(Protocol):
    """What a scenario does to a run, and asks it."""

    cluster: Cluster
    notes: Stamps
    setting: Setting

    def goes_on(self) -> bool:
        """Return whether it may still change."""

    def said(self) -> str:
        """Return its last word, in one line; empty while it goes on."""

    def agent_pids(self, host: str) -> list[int]:
        """Return the launcher's own processes on a host that a fault may hit."""

    def add(self, host: str) -> None:
        """Bring one more host in; raises ClusterError."""

    def restart(self) -> str:
        """Start all ranks again; returns how. Raises ClusterError."""

    def culprit(self) -> int | None:
        """Return the rank that is blamed for the end of the run; waits for it."""

    def first_log(self, rank: int) -> str:
        """Return what is kept of what a rank printed in the first group."""

    def where(self, rank: int) -> str:
        """Return what the launcher can tell of where a rank is now."""


class StockRun:
    """Stock torchrun, c10d: one agent a host, as a user starts them."""

    def __init__(self, cluster: Cluster, notes: Stamps, setting: Setting, group: torchrun.Torchrun) -> None:
        self.cluster = cluster
        self.notes = notes
        self.setting = setting
        self._group = group

    def goes_on(self) -> bool:
        """Return whether an agent is alive."""
        return any(agent.poll() is None for agent in self._group.agents.values())

    def said(self) -> str:
        """Return what the agents ended with."""
        if self.goes_on():
            return ""
        errors = re.findall(r"^[\w.]*?(\w+(?:Error|Exception))\b", self._group.said(), re.MULTILINE)
        return f"all agents ended: {errors[-1]}" if errors else "all agents ended"

    def agent_pids(self, host: str) -> list[int]:
        """Return torchrun on that host."""
        return [self._group.agents[host].pid]

    def add(self, host: str) -> None:
        """Start torchrun there."""
        self._group.start(host)

    def restart(self) -> str:
        """End all agents and start them again: there is no command."""
        for agent in self._group.agents.values():
            agent.terminate()
        for agent in self._group.agents.values():
            agent.wait(ANSWER_S)
        for host in self.setting.hosts:
            self._group.start(host)
        return "no such command; all agents ended and started by hand"

    def culprit(self) -> int | None:
        """Return the rank of torchrun's "Root Cause"."""
        for agent in self._group.agents.values():
            agent.wait(ANSWER_S)
        found = re.search(r"Root Cause.*?^ *rank +: (\d+)", self._group.said(), re.MULTILINE | re.DOTALL)
        return int(found[1]) if found else None

    def first_log(self, rank: int) -> str:
        """Return all stdout.log under torchrun's log directory: one directory serves all hosts here."""
        files = sorted(self._group.log.with_name(f"{self._group.log.name}.d").rglob("stdout.log"))
        return "".join(path.read_text() for path in files)

    def where(self, rank: int) -> str:
        """Return all that the agents have written."""
        return self._group.log.read_text(errors="replace")


class OurRun:
    """`supervisor up --headless` and the verbs beside it."""

    def __init__(self, cluster: Cluster, notes: Stamps, setting: Setting, job: Job) -> None:
        self.cluster = cluster
        self.notes = notes
        self.setting = setting
        self._job = job

    def goes_on(self) -> bool:
        """Return whether `up` runs."""
        return self._job.up is not None and self._job.up.poll() is None

    def said(self) -> str:
        """Return what `up` ended with."""
        lines = self._job.errors().splitlines()
        return "" if self.goes_on() or not lines else lines[-1]

    def agent_pids(self, host: str) -> list[int]:
        """Return our agent on that host."""
        return [pid for pid, line in self.cluster.processes(host).items() if " serve " in f" {line} "]

    def add(self, host: str) -> None:
        """`supervisor add`."""
        self._run("add", "--node", host)

    def restart(self) -> str:
        """`supervisor restart`."""
        self._run("restart")
        return "supervisor restart"

    def culprit(self) -> int | None:
        """Return the one culprit of the newest incident."""
        self._job.wait(ANSWER_S)
        incidents = json.loads(self._run("incidents", "--json"))["incidents"]
        ranks = incidents[-1]["culprit_ranks"] if incidents else []
        return int(ranks[0]) if len(ranks) == 1 else None

    def reported(self, kind: str, timeout_s: float) -> dict[str, Any]:
        """Return the first event of a type; waits for it. Raises AssertionError."""
        return self._job.until(kind, timeout_s)

    def stop(self) -> None:
        """`supervisor stop`."""
        self._run("stop")
        self._job.wait(ANSWER_S)

    def first_log(self, rank: int) -> str:
        """`supervisor logs` of generation 0."""
        return self._run("logs", "--raw", "--rank", str(rank), "--generation", "0")

    def where(self, rank: int) -> str:
        """`supervisor stacks` of the rank."""
        stacks: dict[str, str] = json.loads(self._run("stacks", "--rank", str(rank), "--json"))["stacks"]
        return stacks.get(str(rank), "")

    def _run(self, verb: str, *options: str) -> str:
        done = self._job.run(verb, *options)
        if done.returncode != 0:
            raise ClusterError(f"{verb} exits with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")
        return done.stdout.decode(errors="replace")


@contextlib.contextmanager
def stock(cluster: Cluster, work: Path, setting: Setting) -> Iterator[Run]:
    """Start stock torchrun and wait until all ranks are there; raises ClusterError."""
    notes = Stamps(work / "notes", setting.ranks)
    path = work / "train.py"
    path.write_text(setting.script)
    with torchrun.running(
        cluster,
        [str(path), str(notes.directory)],
        nproc=setting.nproc,
        max_restarts=setting.max_restarts,
        log=work / "torchrun.log",
        env=setting.stock_env,
        hosts=setting.hosts,
        nnodes=setting.nnodes,
        options=[*setting.options, *setting.stock_options],
    ) as group:
        run = StockRun(cluster, notes, setting, group)
        try:
            await_ready(run)
            yield run
        finally:
            # Not asked first: an agent that ends by itself leaves a worker that ignores SIGTERM behind, or waits 30 s.
            end_all(cluster)


@contextlib.contextmanager
def ours(cluster: Cluster, work: Path, setting: Setting) -> Iterator[Run]:
    """Launch with supervisor and wait until all ranks are there; raises ClusterError."""
    notes = Stamps(work / "notes", setting.ranks)
    spares = {name: {"spare": True} for name in setting.later}
    keys: dict[str, Any] = {"nproc_per_node": setting.nproc, "only": [*setting.hosts, *setting.later], "hosts": spares}
    keys |= {"max_restarts": setting.max_restarts, **setting.keys}
    launch = Job(cluster, work / "tree", setting.script, str(notes.directory), **keys)
    try:
        with launch.start("--nnodes", setting.nnodes, *setting.options) as job:
            run = OurRun(cluster, notes, setting, job)
            await_ready(run)
            yield run
    finally:
        # After `up`, which would start a killed agent again.
        end_all(cluster)


def await_ready(run: Run) -> None:
    """Wait until every rank of the first group is ready; raises ClusterError."""
    if run.notes.wait("ready", 0, START_S, run.goes_on) is None:
        raise ClusterError(f"the job did not start: {run.said()}")
    time.sleep(10 * POLL_S)  # a group that has just begun still starts threads: the fault meets one that runs


def end_all(cluster: Cluster) -> None:
    """Kill all that runs on the hosts but their own services; a host without power has nothing."""
    for host in cluster.hosts:
        kill(cluster.pids(host))
