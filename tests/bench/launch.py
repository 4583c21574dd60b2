"""From the command to all ranks in main(): `up` of 32 hosts beside clush and pdsh, in one run.

In: a Cluster of 32 hosts on this machine. Out: a Report: whole times, and where ours goes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench import fanout, stamps, steps
from tests.bench.fleet import QUIET_S, ended, event_ns, journal, wait_quiet
from tests.bench.report import NEVER, Report, Table, ratio, seconds
from tests.bench.stamps import Stamps
from tests.bench.steps import Step
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job

HOSTS = 32
TIMEOUT_S = 400.0
# What takes a second is at the mercy of what else the machine does: the middle one of so many.
QUICK_RUNS = 3
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One way to start something on all hosts; seconds from the command."""

    label: str
    main_s: float | None
    """The last rank is in main(); None for what starts no rank."""
    done_s: float
    """The command has returned."""
    start_ns: int
    """When that was, ns since the epoch."""


class Bench:
    """All measurements, one after the other on the same hosts."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        self._cluster = cluster
        self._work = work
        self._count = 0
        (work / "once.py").write_text(stamps.ONCE)
        (work / "imports.py").write_text(stamps.ONCE_TORCH)
        # The script comes with the work tree.
        self._job = Job(cluster, work / "tree", stamps.ONCE, nproc_per_node=1)
        self.steps: dict[str, list[Step]] = {}
        self.events: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def up(self, label: str) -> Run:
        """Launch with `up` and wait for the end of the job; raises ClusterError when it fails."""
        notes = self._stamps()
        name = f"bench-{self._count}"
        trace = self._work / f"{name}.trace"
        words = ["up", str(self._job.inventory), "--headless", "--job", name, "train.py", str(notes.directory)]
        run = self._ours(label, [sys.executable, "-m", "tests.bench.traced", str(trace), *words], notes)
        self.steps[label] = steps.read(trace, run.start_ns)
        self.events[label] = {
            event["type"]: (event_ns(event) - run.start_ns) / 1e9 for event in journal(self._cluster, name)
        }
        left = wait_quiet(self._cluster)
        if left:
            self.notes.append(f"{label}: {left} processes of ours did not end by themselves within {QUIET_S:g} s")
        return run

    def jobs(self) -> Run:
        """Ask all hosts what they know: SSH and our bridge on every host, no job and no torch."""
        label = "supervisor jobs (connect and ask, no ranks)"
        command = [sys.executable, "-m", "supervisor", "jobs", str(self._job.inventory), "--json"]
        return self._ours(label, command, None)

    def tool(self, tool: str, label: str, script: str | None) -> tuple[Run, Stamps]:
        """Start a script by clush or pdsh (or, without one, the shell's `true`); raises ClusterError."""
        notes = self._stamps()
        line = "true"
        if script is not None:
            line = shlex.join([sys.executable, str(self._work / script), str(notes.directory)])
        log = self._work / f"{tool}-{self._count}.log"
        start_ns = time.time_ns()
        status = fanout.run(tool, self._cluster, line, TIMEOUT_S, log)
        done_s = (time.time_ns() - start_ns) / 1e9
        if status != 0:
            raise ClusterError(f"{tool}: status {status}: {log.read_text(errors='replace')[-2000:]}")
        return Run(label, _last_s(notes, "main", start_ns) if script else None, done_s, start_ns), notes

    def _stamps(self) -> Stamps:
        self._count += 1
        return Stamps(self._work / "stamps" / str(self._count), len(self._cluster.hosts))

    def _ours(self, label: str, command: list[str], notes: Stamps | None) -> Run:
        log = self._work / f"ours-{self._count}.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        start_ns = time.time_ns()
        with (
            log.open("wb") as out,
            ended(
                subprocess.Popen(command, cwd=self._job.work, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            ) as process,
        ):
            status = process.wait(TIMEOUT_S)
        done_s = (time.time_ns() - start_ns) / 1e9
        if status != 0:
            raise ClusterError(f"{label}: status {status}: {log.read_text(errors='replace')[-2000:]}")
        return Run(label, _last_s(notes, "main", start_ns) if notes is not None else None, done_s, start_ns)


def _last_s(notes: Stamps, what: str, start_ns: int) -> float:
    last = notes.all_after(what, start_ns)
    if last is None:
        raise ClusterError(f"not every rank came to {what}")
    return (last - start_ns) / 1e9


def _import_s(notes: Stamps) -> float:
    """Return the seconds from the first rank that begins to import torch to the last one that has it."""
    found = notes.read()
    begun = [stamp.t_ns for stamp in found if stamp.what == "main"]
    return (max(stamp.t_ns for stamp in found if stamp.what == "imported") - min(begun)) / 1e9


def run() -> Report:
    """Measure; raises ClusterError, OSError."""
    missing = fanout.missing()
    if missing:
        raise ClusterError(f"to compare with: apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name, Cluster(HOSTS) as cluster:
        bench = Bench(cluster, Path(name))
        first = bench.up("supervisor up, first run (agent and tree are pushed)")
        plain, other, asked, true = _quick(bench)
        second = bench.up("supervisor up, second run (nothing new)")
        torch, notes = bench.tool("clush", "clush, script imports torch", "imports.py")
        import_s = _import_s(notes)
        # The script's main() proper begins behind its imports.
        torch = replace(torch, main_s=_last_s(notes, "imported", torch.start_ns))
        return _report(bench, [first, second, torch, plain, other], [asked, true], import_s)


def _quick(bench: Bench) -> list[Run]:
    """Return clush and pdsh with a script, then `supervisor jobs` and clush without one: in turn, the middle ones."""
    rounds = [
        (
            bench.tool("clush", "clush, script without torch", "once.py")[0],
            bench.tool("pdsh", "pdsh, script without torch", "once.py")[0],
            bench.jobs(),
            bench.tool("clush", "clush true", None)[0],
        )
        for _ in range(QUICK_RUNS)
    ]
    return [
        sorted(runs, key=lambda one: one.main_s or one.done_s)[QUICK_RUNS // 2] for runs in zip(*rounds, strict=True)
    ]


def _report(bench: Bench, runs: list[Run], reached: list[Run], import_s: float) -> Report:
    first, second, torch, plain, _other = runs
    rows = [(one.label, *_cells(one, plain, torch)) for one in runs]
    share = import_s / second.main_s if second.main_s else 0.0
    notes = (
        f"our engines import torch on all {HOSTS} hosts before the first rank starts, and these hosts are one machine:",
        f"{HOSTS} x `import torch` at once takes {seconds(import_s)} here, {share:.0%} of our second run",
        f"clush and pdsh without torch: the middle one of {QUICK_RUNS} runs",
        *bench.notes,
    )
    tables = [
        Table(
            f"launch: {HOSTS} hosts x 1 rank, from the command to the last rank in main()",
            ("", "main()", "to clush", "to clush + import torch", "command returns"),
            tuple(rows),
            notes,
        ),
        Table(
            f"reach {HOSTS} hosts, start nothing",
            ("", "command returns", "to clush"),
            tuple((one.label, seconds(one.done_s), ratio(one.done_s, reached[1].done_s)) for one in reached),
        ),
    ]
    for label in (first.label, second.label):
        tables += [steps.table(f"steps of {label}", bench.steps[label]), _event_table(bench.events[label])]
    data: dict[str, Any] = {
        "hosts": HOSTS,
        "import_torch_s": import_s,
        "runs": {one.label: {"main_s": one.main_s, "done_s": one.done_s} for one in (*runs, *reached)},
        "steps": {label: {one.name: vars(one) for one in found} for label, found in bench.steps.items()},
        "events": bench.events,
    }
    return Report("launch", tuple(tables), data)


def _cells(one: Run, plain: Run, torch: Run) -> tuple[str, str, str, str]:
    return (
        seconds(one.main_s),
        ratio(one.main_s, plain.main_s),
        ratio(one.main_s, torch.main_s),
        seconds(one.done_s),
    )


def _event_table(events: dict[str, float]) -> Table:
    wanted = ("job_started", "generation_started", "generation_running", "job_succeeded")
    cells = tuple(seconds(events[name]) if name in events else NEVER for name in wanted)
    return Table("  its journal, from the command", ("", *wanted), (("at", *cells),))
