"""A job of 128 hosts on this machine: a launch, a restart, and nodes that are removed, killed and cut off.

In: a Cluster whose hosts have the stub of torch; control groups, which also count the processor time of what has ended.
Out: a Report: how long each step takes, what it costs the hosts, and what of tests.faults.invariants did not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.fleet import event_ns
from tests.bench.report import Report, Table, seconds
from tests.cluster import Cluster
from tests.cluster.job import Job
from tests.cluster.leftovers import end
from tests.cluster.network import batch, command
from tests.faults import invariants
from tests.faults.ranks import PERIOD_S, SCRIPT, STAMPS, Stamps

HOSTS, REMOVED, CUT = 128, 16, 32
WAIT_S, UP_S, QUIET_S = 120.0, 400.0, 10.0
# What a step still costs once its events are there is counted, too.
AFTER_S = 1.0
# The ranks of 128 hosts leave most of two processors to the agents.
RANKS = SCRIPT.replace(f"time.sleep({PERIOD_S})", "time.sleep(0.25)")
# Agents; sshd, bridges and all that `sort` has not seen; engines and ranks.
PARTS = ("agents", "reach", "ranks")
_COUNTED = Path("/sys/fs/cgroup/cpuacct")


class Meter:
    """The processor time of a cluster that is made inside, by part, until this process is put back."""

    def __init__(self) -> None:
        self._groups = {part: _COUNTED / f"supervisor-many-{os.getpid()}-{part}" for part in PARTS}
        self._moved = dict.fromkeys(PARTS, 0.0)

    def __enter__(self) -> Meter:
        for group in self._groups.values():
            group.mkdir()
        _put(os.getpid(), self._groups["reach"])
        return self

    def __exit__(self, *_error: object) -> None:
        _put(os.getpid(), _COUNTED)
        end(self.pids())
        _until(lambda: not self.pids(), 10.0)
        for group in self._groups.values():
            group.rmdir()

    def pids(self, *parts: str) -> list[int]:
        files = [self._groups[part] / "cgroup.procs" for part in parts or PARTS]
        return [int(pid) for file in files for pid in file.read_text().split()]

    def sort(self) -> None:
        for pid in self.pids("reach"):
            line, used_s = _look(pid)
            is_rank = " engine --job " in line or line.endswith((" train.py", "sleep 86400"))
            if part := "agents" if " serve --job " in line else "ranks" if is_rank else "":
                _put(pid, self._groups[part])
                self._moved[part] += used_s
                self._moved["reach"] -= used_s

    def read(self) -> dict[str, float]:
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        files = {part: group / "cpuacct.usage" for part, group in self._groups.items()}
        used = {part: int(file.read_text()) / 1e9 + self._moved[part] for part, file in files.items()}
        return {**used, "operator": own.ru_utime + own.ru_stime}


def _put(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def _look(pid: int) -> tuple[str, float]:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words, sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def _introduce(cluster: Cluster) -> None:
    """Tell all hosts each other's links: the kernel has room for a thousand neighbours of all namespaces together."""
    found = [json.loads(command("ip", "-n", host.netns, "-j", "link", "show", "eth0"))[0] for host in cluster.hosts]
    pairs = zip(cluster.hosts, found, strict=True)
    known = [f"neigh replace {host.address} lladdr {link['address']} dev eth0 nud permanent" for host, link in pairs]
    for place, host in enumerate(cluster.hosts):
        batch([*known[:place], *known[place + 1 :]], "-n", host.netns)


def _until(look: Callable[[], Any], timeout_s: float) -> Any:
    limit = time.monotonic() + timeout_s
    while not (found := look()) and time.monotonic() < limit:
        time.sleep(0.1)  # other processes' files: nothing reports them
    return found


class Bench:
    """One job on all hosts of a cluster, step after step."""

    def __init__(self, cluster: Cluster, meter: Meter, place: Path) -> None:
        self.cluster, self.meter, self.name = cluster, meter, place.name
        _put(os.getpid(), _COUNTED)
        place.mkdir()
        self.stamps = Stamps(place / "stamps")
        env = {STAMPS: str(self.stamps.directory)}
        self.job = Job(cluster, place / "work", RANKS, nproc_per_node=1, min_nodes=1, max_restarts=100, env=env)
        self.wrong: list[str] = []
        # What was done, when its events came, how long it took, and what was used until a moment later, by part.
        self.steps: list[tuple[str, dict[str, float | None], float, dict[str, float]]] = []

    def files(self, host: int | str) -> Path:
        return self.cluster.host(host).home / ".supervisor" / "jobs" / self.name

    def records(self) -> list[dict[str, Any]]:
        path = self.files(len(self.cluster.hosts) // 3) / "events.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def verb(self, verb: str, *options: str) -> None:
        done = self.job.run(verb, *options, timeout_s=UP_S)
        if done.returncode:
            self.wrong.append(f"{verb}: exit code {done.returncode}: {done.stderr.decode()[-500:]}")

    def step(self, label: str, act: Callable[[], object], **wanted: int) -> None:
        known, before = len(self.records()), self.meter.read()
        begun, begun_ns = time.monotonic(), time.time_ns()
        act()

        def look() -> dict[str, float]:
            new = [one for one in self.records()[known:] if one["type"] in wanted]
            fit = [one for one in new if wanted[one["type"]] in (0, one["detail"].get("world_size"))]
            return {one["type"]: (event_ns(one) - begun_ns) / 1e9 for one in reversed(fit)}

        _until(lambda: len(look()) == len(wanted), WAIT_S)
        events = {kind: look().get(kind) for kind in wanted}
        if None in events.values():
            last = [(one["type"], one["node"]) for one in self.records()[-5:]]
            self.wrong.append(f"{label}: {events} within {WAIT_S:g} s of {wanted}; the journal ends with {last}")
        time.sleep(AFTER_S)
        self.meter.sort()
        if "job_stopped" in wanted and not _until(lambda: not self.meter.pids("agents", "ranks"), invariants.GONE_S):
            self.wrong.append(f"{label}: after {invariants.GONE_S:g} s {self.meter.pids('agents', 'ranks')} are left")
        used = {part: value - before[part] for part, value in self.meter.read().items()}
        self.steps.append((label, events, time.monotonic() - begun, used))

    def begin(self) -> None:
        hosts, conf = len(self.cluster.hosts), f"join_timeout={UP_S:g},last_call_timeout={UP_S:g}"
        up = partial(self.verb, "up", "--detach", "--job", self.name, "--rdzv-conf", conf, "train.py")
        self.step("launch", up, generation_running=hosts)
        self.job.name = [self.name]
        self.step("quiet", lambda: time.sleep(QUIET_S))
        self.step("status", lambda: self.verb("status"))
        self.step("restart", lambda: self.verb("restart"), generation_running=hosts)

    def violations(self, out: set[str]) -> list[str]:
        # `out`: the hosts that were not in the job when it ended.
        ranks = self.stamps.read()
        names = {host.name for host in self.cluster.hosts} - out
        found = invariants.journal_violations({one: (self.files(one) / "events.jsonl").read_bytes() for one in names})
        for one in ranks:
            log = f"generation_{one.group[0]}/rank_{one.rank}/stdout.log"
            found += invariants.log_violations(one, self.files(one.node) / log)
        return [
            *self.wrong,
            *filter(None, invariants.overlap_ms(ranks)[1:]),
            *(f"{each.invariant}: {each.text}" for each in found),
        ]


def run() -> Report:
    with Meter() as meter, Cluster(HOSTS, stub_torch=True, agent=True) as cluster:
        _introduce(cluster)
        bench = Bench(cluster, meter, Path(tempfile.mkdtemp()) / "many")
        names = [host.name for host in cluster.hosts]
        removed, cut, left = names[-REMOVED:], names[-REMOVED - CUT : -REMOVED], HOSTS - REMOVED
        bench.begin()
        remove = partial(bench.verb, "remove", "--node", f"n[{left + 1}-{HOSTS}]")
        bench.step(f"remove {REMOVED}", remove, generation_running=left)
        kill = partial(os.kill, int((bench.files(0) / "agent.pid").read_text().split()[0]), signal.SIGKILL)
        bench.step("kill -9 the coordinator", kill, coordinator_changed=0, generation_running=left - 1)
        bench.step(f"cut {CUT}", lambda: [*map(cluster.cut, cut)], generation_running=left - 1 - CUT)
        bench.step("heal", cluster.heal, generation_running=left - 1)
        bench.step("stop", lambda: bench.verb("stop"), job_stopped=0)
        wrong = bench.violations({names[0], *removed})
    cells = [(label, events.values(), (whole, *used.values())) for label, events, whole, used in bench.steps]
    rows = [(label, ", ".join(map(seconds, came)), *map(seconds, spent)) for label, came, spent in cells]
    table = Table(f"{HOSTS} hosts", ("", "events", "whole", *PARTS, "operator"), tuple(rows), tuple(wrong))
    return Report("many", (table,), {"wrong": wrong, "steps": bench.steps})
