"""From a failure, or an operator's word, to all ranks in main() again: ours by phase, and beside stock torchrun.

In: a Cluster of two hosts on this machine, two ranks each. Out: a Report. The ranks' own notes give all times.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import stamps, torchrun
from tests.bench.fleet import event_ns, journal, wait_quiet
from tests.bench.report import Report, Table, median, ratio, seconds, spread
from tests.bench.stamps import Stamps
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job

NODES = 2
NPROC = 2
# On the second node: not the one that leads.
VICTIM = 3
OURS = 5
STOCK_RESTARTS = 3
PHASES = ("detect", "stop", "rendezvous", "spawn", "main")
START_TIMEOUT_S = 90.0
RESTART_TIMEOUT_S = 30.0
# A group that has just begun still loads files: the machine comes to rest before the next measurement.
REST_S = 0.7


@dataclass(frozen=True)
class Script:
    """What is started, and the note that says that a rank has all it needs."""

    name: str
    text: str
    complete: str
    meaning: str


SCRIPTS = (
    Script("light", stamps.LIGHT, "main", "a script without torch"),
    Script("gloo", stamps.GLOO, "group", "DDP over gloo; it imports torch in every rank"),
)


@dataclass(frozen=True)
class Sample:
    """One restart, seconds from its cause; None where it did not happen in time."""

    main_s: float | None
    complete_s: float | None
    attempts: int
    """How often the rank that began most often began: more than one is a restart that failed."""
    phases: dict[str, float]
    """Milliseconds, as generation_running tells them; empty for torchrun."""


Samples = list[Sample]


class Measured:
    """The notes of one running group, and the measurement of what happens to it."""

    def __init__(self, notes: Stamps, script: Script, goes_on: Callable[[], bool], said: Callable[[], str]) -> None:
        self._notes = notes
        self._script = script
        self._goes_on = goes_on
        self._said = said

    def wait_start(self) -> None:
        """Wait until every rank has all it needs; raises ClusterError."""
        if self._notes.wait(self._script.complete, 0, START_TIMEOUT_S, self._goes_on) is None:
            raise ClusterError(f"the {self._script.name} script did not start: {self._said()}")
        time.sleep(REST_S)

    def kill(self) -> Sample:
        """SIGKILL one worker and see the group come back."""
        pid = self._notes.pid(VICTIM)
        begun_ns = time.time_ns()
        os.kill(pid, signal.SIGKILL)
        return self.outcome(begun_ns)

    def outcome(self, begun_ns: int) -> Sample:
        """Wait until every rank has all it needs again."""
        whole = self._notes.wait(self._script.complete, begun_ns, RESTART_TIMEOUT_S, self._goes_on)
        main = self._notes.all_after("main", begun_ns)
        time.sleep(REST_S)
        attempts = self._notes.attempts_after(begun_ns)
        return Sample(_since(main, begun_ns), _since(whole, begun_ns), attempts, {})


def _since(at_ns: int | None, begun_ns: int) -> float | None:
    return None if at_ns is None else (at_ns - begun_ns) / 1e9


def ours(cluster: Cluster, work: Path, script: Script) -> dict[str, Samples]:
    """Restart and kill in turn; raises ClusterError, AssertionError."""
    notes = Stamps(work / f"ours-{script.name}", NODES * NPROC)
    words = [str(notes.directory)]
    name = f"bench-{script.name}"
    keys: dict[str, Any] = {"nproc_per_node": NPROC, "max_restarts": 100}
    found: dict[str, Samples] = {"command": [], "kill": []}
    with Job(cluster, work / f"tree-{script.name}", script.text, *words, **keys).start("--job", name) as job:
        measured = Measured(notes, script, lambda: job.up is not None and job.up.poll() is None, job.errors)
        measured.wait_start()
        for _ in range(OURS):
            begun_ns = time.time_ns()
            done = job.run("restart")
            if done.returncode != 0:
                raise ClusterError(f"restart: {done.stderr.decode(errors='replace')}")
            found["command"].append(measured.outcome(begun_ns))
            found["kill"].append(measured.kill())
        events = journal(cluster, name)
        job.run("stop")
        job.wait()
    wait_quiet(cluster)
    return _with_phases(found, events, notes, script)


def _with_phases(
    found: dict[str, Samples], events: list[dict[str, Any]], notes: Stamps, script: Script
) -> dict[str, Samples]:
    """Add what the journal tells: the phases; and the restarts as seen from the moment the request arrived."""
    running = [event["detail"] for event in events if event["type"] == "generation_running"][1:]
    phases = [{phase: detail[phase] for phase in PHASES} for detail in running]
    asked = [event_ns(event) for event in events if event["type"] == "restart_requested"]
    if len(phases) != 2 * OURS or len(asked) != OURS:
        raise ClusterError(f"{len(phases)} restarts in the journal, {2 * OURS} were made")
    restarts = [
        Sample(
            _since(notes.all_after("main", at_ns), at_ns),
            _since(notes.all_after(script.complete, at_ns), at_ns),
            1,
            phases[2 * place],
        )
        for place, at_ns in enumerate(asked)
    ]
    kills = [
        Sample(one.main_s, one.complete_s, one.attempts, phases[2 * place + 1])
        for place, one in enumerate(found["kill"])
    ]
    return {"command": found["command"], "restart": restarts, "kill": kills}


def stock(cluster: Cluster, work: Path, script: Script, *, own_store: bool = False) -> Samples:
    """Kill a worker under torchrun, as often as it may be restarted; raises ClusterError.

    A group that does not come back is given up, and another one is started for the next kill.
    """
    found: Samples = []
    path = work / "stock.py"
    path.write_text(script.text)
    while len(found) < STOCK_RESTARTS:
        name = f"stock-{script.name}-{'own-' if own_store else ''}{len(found)}"
        notes = Stamps(work / name, NODES * NPROC)
        with torchrun.running(
            cluster,
            [str(path), str(notes.directory)],
            nproc=NPROC,
            max_restarts=STOCK_RESTARTS,
            log=work / f"{name}.log",
            env=torchrun.OWN_STORE if own_store else {},
        ) as group:
            measured = Measured(notes, script, group.goes_on, group.said)
            measured.wait_start()
            while len(found) < STOCK_RESTARTS:
                found.append(measured.kill())
                if found[-1].complete_s is None:
                    break
    return found


def run() -> Report:
    """Measure; raises ClusterError, AssertionError, OSError."""
    mine: dict[str, dict[str, Samples]] = {}
    theirs: dict[str, dict[str, Samples]] = {}
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name:
        for script in SCRIPTS:
            # A cluster each: what a torchrun that hangs leaves running ends with its hosts.
            with Cluster(NODES) as cluster:
                mine[script.name] = ours(cluster, Path(name), script)
                found = theirs[script.name] = {"torchrun": stock(cluster, Path(name), script)}
                if script.name == "gloo":
                    found["torchrun, own store"] = stock(cluster, Path(name), script, own_store=True)
    tables = [_phase_table(mine)]
    tables += [_compared(script, mine[script.name], theirs[script.name]) for script in SCRIPTS]
    data = {
        "nodes": NODES,
        "nproc": NPROC,
        "ours": {name: {kind: _numbers(one) for kind, one in found.items()} for name, found in mine.items()},
        "torchrun": {name: {kind: _numbers(one) for kind, one in found.items()} for name, found in theirs.items()},
    }
    return Report("restart", tuple(tables), data)


def _numbers(samples: Samples) -> list[dict[str, Any]]:
    return [vars(sample) for sample in samples]


def _phase_table(mine: dict[str, dict[str, Samples]]) -> Table:
    rows = []
    for script, found in mine.items():
        for kind, label in (("restart", "operator's restart"), ("kill", "worker killed")):
            samples = found[kind]
            cells = [median([sample.phases[phase] / 1e3 for sample in samples]) for phase in PHASES]
            total = median([sum(sample.phases.values()) / 1e3 for sample in samples])
            rows.append((f"{script}, {label}", *(seconds(cell) for cell in cells), seconds(total)))
    title = f"restart by phase, as generation_running tells it: {NODES} nodes x {NPROC} ranks, medians of {OURS}"
    return Table(title, ("", *PHASES, "all"), tuple(rows))


def _compared(script: Script, found: dict[str, Samples], theirs: dict[str, Samples]) -> Table:
    first_step = script.complete != "main"
    base = median([sample.main_s for sample in theirs["torchrun"]])
    lines = [(f"{label}, worker killed", samples) for label, samples in theirs.items()]
    lines += [
        ("supervisor, worker killed", found["kill"]),
        ("supervisor, restart, from the coordinator's hearing it", found["restart"]),
        ("supervisor, restart, from the shell command", found["command"]),
    ]
    rows = []
    for label, samples in lines:
        main = [sample.main_s for sample in samples]
        row = [label, str(len(samples)), seconds(median(main)), spread(main), ratio(base, median(main))]
        if first_step:
            complete = [sample.complete_s for sample in samples]
            row += [seconds(median(complete)), spread(complete), str(complete.count(None))]
        rows.append(tuple(row))
    head = ["", "runs", "all in main()", "least .. most", "torchrun / this"]
    head += ["first step done", "least .. most", "never"] if first_step else []
    return Table(f"restart, {script.name}: {script.meaning}", tuple(head), tuple(rows), tuple(_remarks(script, theirs)))


def _remarks(script: Script, theirs: dict[str, Samples]) -> list[str]:
    notes = ["torchrun: c10d on the first host, same hosts, same script; it has no restart on demand"]
    if script.complete != "main":
        notes.append("own store: with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so that no group reads an older one's keys")
        notes.append(f"never: not within {RESTART_TIMEOUT_S:g} s, or the launcher gave up: ranks read from the shared")
        notes.append("store where the ranks of the group before listened, and find these ports closed")
    for label, samples in theirs.items():
        extra = sum(max(0, sample.attempts - 1) for sample in samples)
        if extra:
            notes.append(f"{label}: {extra} attempts more than failures")
    return notes
