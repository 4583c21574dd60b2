"""A job of 128 hosts on this machine whose coordinator is killed again and again.

In: a Cluster whose hosts have the stub of torch; SUPERVISOR_MANY_HOSTS (128), SUPERVISOR_MANY_KILLS (5). Out: a Report:
for each kill of the coordinator's agent and engine, seconds until another node is the coordinator, until all others
follow it, and until their ranks run, with the processor time of the whole machine until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.fleet import processes
from tests.bench.report import NEVER, Report, Table, seconds
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job, journal
from tests.cluster.network import batch, command

HOSTS = int(os.environ.get("SUPERVISOR_MANY_HOSTS", "32"))
KILLS = int(os.environ.get("SUPERVISOR_MANY_KILLS", "5"))
NAME = "many"
UP_S, WAIT_S, POLL_S = 400.0, 120.0, 0.1
# What a launch or a new group still costs, once all ranks run, is no part of the next election.
SETTLE_S = 15.0
# The ranks of 128 hosts leave the processors to the agents.
RANKS = "import time\nwhile True:\n    time.sleep(60)\n"
Times = dict[str, "float | None"]
"""Seconds after the kill, by what happened; None: not within WAIT_S."""


def _introduce(cluster: Cluster) -> None:
    """Tell all hosts each other's links: the kernel has room for a thousand neighbours of all namespaces together."""
    found = [json.loads(command("ip", "-n", host.netns, "-j", "link", "show", "eth0"))[0] for host in cluster.hosts]
    pairs = zip(cluster.hosts, found, strict=True)
    known = [f"neigh replace {host.address} lladdr {link['address']} dev eth0 nud permanent" for host, link in pairs]
    for place, host in enumerate(cluster.hosts):
        batch([*known[:place], *known[place + 1 :]], "-n", host.netns)


def _busy_s() -> float:
    """Return how long all processors of this machine have worked."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


class Contest:
    """One job on all hosts, of which those whose agents were killed are no part any more."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.alive = [host.name for host in cluster.hosts]

    def views(self) -> dict[str, tuple[int, str | None]]:
        """Return the newest term of each living node, and whom it follows, from their disks."""
        found = {}
        for name in self.alive:
            # It may be written just now, or not yet.
            with contextlib.suppress(OSError, ValueError):
                view = json.loads((self.cluster.host(name).home / f".supervisor/jobs/{NAME}/term.json").read_text())
                found[name] = view["term"], view["coordinator"]
        return found

    def coordinator(self) -> str | None:
        """Return the living node that is the coordinator, which follows itself in the newest term."""
        leaders = [(term, name) for name, (term, followed) in self.views().items() if followed == name]
        return max(leaders)[1] if leaders else None

    def followers(self) -> int:
        """Return how many living nodes follow a living one, itself included."""
        leader = self.coordinator()
        return sum(followed == leader for _, followed in self.views().values()) if leader else 0

    def runs(self) -> bool:
        """Return whether the newest group that runs is that of all living nodes."""
        records = journal(self.cluster, self.alive[-1], NAME)
        running = [one for one in records if one["type"] == "generation_running"]
        return bool(running) and running[-1]["detail"]["world_size"] == len(self.alive)

    def kill(self) -> tuple[str, Times, float]:
        """Kill the coordinator's agent and engine; returns its name, what came when, and the processor time for it."""
        name = self.coordinator()
        if name is None:
            raise ClusterError("no coordinator to kill")
        here = {int(pid) for pid in command("ip", "netns", "pids", self.cluster.host(name).netns).split()}
        self.alive.remove(name)
        begun, busy_s = time.monotonic(), _busy_s()
        for pid in here.intersection(processes(self.cluster)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        happens: dict[str, Callable[[], Any]] = {
            "elected": self.coordinator,
            "followed": lambda: self.followers() == len(self.alive),
            "runs": self.runs,
        }
        return name, {what: _when(look, begun) for what, look in happens.items()}, _busy_s() - busy_s


def _when(look: Callable[[], Any], begun: float) -> float | None:
    """Return how long after `begun` something has happened: other processes' files, of which nothing reports."""
    while not look():
        if time.monotonic() > begun + WAIT_S:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - begun


def run() -> Report:
    """Launch the job, and kill its coordinators."""
    with Cluster(HOSTS, stub_torch=True, agent=True) as cluster, tempfile.TemporaryDirectory() as place:
        _introduce(cluster)
        job = Job(cluster, Path(place) / "work", RANKS, nproc_per_node=1, min_nodes=1, max_restarts=100, hang_after=0)
        begun = time.monotonic()
        conf = f"join_timeout={UP_S:g},last_call_timeout={UP_S:g}"
        up = job.run("up", "--detach", "--job", NAME, "--rdzv-conf", conf, "train.py", timeout_s=UP_S)
        contest = Contest(cluster)
        if up.returncode or not _when(contest.runs, time.monotonic()):
            raise ClusterError(f"no job on {HOSTS} hosts: {up.stderr.decode()[-1000:]}")
        up_s = time.monotonic() - begun
        print(f"{HOSTS} hosts are up after {up_s:.0f} s", flush=True)
        kills = []
        for _ in range(KILLS):
            time.sleep(SETTLE_S)
            kills.append(contest.kill())
            print(*kills[-1], flush=True)
            if None in kills[-1][1].values():
                break
    rows = tuple(
        (name, *(NEVER if at is None else seconds(at) for at in times.values()), seconds(busy_s))
        for name, times, busy_s in kills
    )
    head = ("killed", "another coordinator", "all follow it", "all ranks run", "processor time")
    note = f"launch: {up_s:.0f} s; {NEVER}: not within {WAIT_S:g} s"
    data = {"hosts": HOSTS, "up_s": up_s, "kills": kills}
    return Report("many", (Table(f"the coordinator of {HOSTS} hosts is killed", head, rows, (note,)),), data)
