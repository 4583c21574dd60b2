"""A row: one job on fresh hosts that has one fault after the other, and must be well after each; then it is judged.

In: faults, a seed, from which everything else is drawn. Out: a `Result` for each case that was reached.

In a row a fault finds a job that has a history: other coordinators, many generations, nodes that were lost before. The
hosts, the agents and the operator's programs are started once. A row ends with the first case in which something does
not hold; the faults behind it belong into another row.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.network import await_ends
from tests.cluster.podman import Podman
from tests.faults import invariants
from tests.faults.case import Case, Fault, Result
from tests.faults.invariants import GONE_S, StatusJudge
from tests.faults.matrix import BY_NAME, FAULTS
from tests.faults.ranks import Rank
from tests.faults.site import Site

_ROWS = -(-len(FAULTS) // 12)
"""Jobs for all faults of a seed."""
_FORM_S = 60.0


def drawn(fault: Fault, seed: int) -> tuple[int, float]:
    """Return how many hosts a fault gets with a seed, and the node_timeout."""
    return _drawn(fault, seed, _order(seed))


def rows(faults: Iterable[Fault], seed: int) -> list[tuple[Fault, ...]]:
    """Return which faults one job has, and in which order; those of a row by themselves make that row again."""
    order = _order(seed)
    alike: dict[tuple[int, int, float], list[Fault]] = {}
    for fault in sorted(faults, key=lambda fault: order[fault.name]):
        alike.setdefault((order[fault.name] % _ROWS, *_drawn(fault, seed, order)), []).append(fault)
    made: list[tuple[Fault, ...]] = []
    for group in alike.values():
        # What ends the job comes last.
        ends = [[fault] for fault in group if fault.over] or [[]]
        others = [fault for fault in group if not fault.over]
        made += [(*others[number :: len(ends)], *end) for number, end in enumerate(ends)]
    return made


def _order(seed: int) -> dict[str, int]:
    names = sorted(BY_NAME)
    random.Random(f"{seed}:order").shuffle(names)
    return {name: place for place, name in enumerate(names)}


def _drawn(fault: Fault, seed: int, order: Mapping[str, int]) -> tuple[int, float]:
    rng = random.Random(f"{order[fault.name] % _ROWS}:{seed}:hosts")
    return rng.choice(fault.hosts), rng.choice(fault.node_timeouts)


def run(
    faults: Sequence[Fault], seed: int, place: Path, keep: Path | None = None, *, containers: bool = False
) -> list[Result]:
    """Run a row in a fresh directory, and remove its hosts; an interrupt goes through.

    `keep`: where the files of a row are copied in which something did not hold; `containers`: the ranks run in some.
    """
    hosts, node_timeout = drawn(faults[0], seed)
    disk_mb = min(fault.disk_mb for fault in faults)
    with Cluster(hosts, disk_mb=disk_mb, agent=True, stub_torch=True) as cluster:
        podman = Podman(cluster) if containers else None
        site = Site(cluster, place, node_timeout, clocks=any(fault.clocks for fault in faults), podman=podman)
        row = _Row(site, faults, seed)
        with contextlib.ExitStack() as ending:
            ending.enter_context(site.job)
            ending.callback(site.operator.end)
            try:
                row.run()
            except (AssertionError, OSError) as error:
                row.cases[-1].result.wrong("case", f"{type(error).__name__}: {error}")
            if keep is not None and any(case.result.violations for case in row.cases):
                site.operator.end()
                _copy(row, keep / f"{row.cases[-1].fault.name.replace(' ', '-')}-{seed}")
    return [case.result for case in row.cases]


class _Row:
    def __init__(self, site: Site, faults: Sequence[Fault], seed: int) -> None:
        self.site = site
        self._faults = faults
        self._seed = seed
        self._status = StatusJudge()
        self.cases = [Case(site, faults[0], seed)]

    def run(self) -> None:
        """Form, then break and heal with one fault after the other, end, judge."""
        self._form()
        for number, fault in enumerate(self._faults):
            if number:
                after = [fault.name for fault in self._faults[:number]]
                self.cases.append(Case(self.site, fault, self._seed, after))
            case = self.cases[-1]
            case.run()
            if number + 1 == len(self._faults) or case.result.violations:
                break
            case.settle()
            case.judge(self._status, time.monotonic_ns())
            if case.result.violations:
                break
        self._end(self.cases[-1])

    def _form(self) -> None:
        self.site.job.start("--detach", "--nnodes", f"1:{len(self.site.nodes)}")
        assert self.site.job.wait() == 0, self.site.job.errors()
        self.site.until(self.site.well, _FORM_S, "first group")
        watch = self.site.operator.begin_watch()
        self.site.until(lambda: watch.documents, _FORM_S, "status")

    def _end(self, case: Case) -> None:
        """Stop the job, and judge what can be judged only then."""
        end_ns = time.monotonic_ns()
        answer = self.site.operator.run("stop")
        if answer.status != 0 and not case.fault.over:
            case.result.wrong("verb", f"`stop` exit code {answer.status}: {answer.err[-400:]}")
        self._await_end(case)
        found = self.site.stamps.read()
        if case.fault.over:
            # What follows the end is not a matter of the status that was watched.
            end_ns = min(end_ns, max((rank.times_ns[-1] for rank in found if rank.times_ns), default=0))
        self._compare_raw(case, found)
        case.judge(self._status, end_ns)
        for rank in found:
            if rank.times_ns and rank.times_ns[-1] > self.site.lost_disks.get(rank.node, 0):
                its = max((one for one in self.cases if one.begun_ns < rank.times_ns[-1]), key=lambda one: one.begun_ns)
                cut = rank.times_ns[-1] <= self.site.power_failures.get(rank.node, 0)
                its.result.violations += invariants.log_violations(rank, self._log(rank), cut=cut)
        journals = {node: self.site.journal_file(node) for node in self.site.nodes}
        case.result.violations += invariants.journal_violations(journals, all_there=not case.fault.over)

    def _await_end(self, case: Case) -> None:
        end = time.monotonic() + GONE_S
        cluster = self.site.cluster
        while left := {pid: line for node in self.site.nodes for pid, line in cluster.processes(node).items()}:
            if time.monotonic() > end:
                some = "; ".join(f"{pid} {line[-70:]}" for pid, line in list(left.items())[:4])
                case.result.wrong("orphan", f"{len(left)} processes {GONE_S:g} s after `stop`: {some}")
                return
            await_ends(left, end - time.monotonic())

    def _log(self, rank: Rank) -> Path:
        return self.site.files(rank.node) / f"generation_{rank.group[0]}" / f"rank_{rank.rank}" / "stdout.log"

    def _compare_raw(self, case: Case, found: list[Rank]) -> None:
        """Compare what the program says is a log with the log, for one process."""
        there = [rank for rank in found if self._log(rank).exists()]
        if not there:
            return
        rank = case.rng.choice(there)
        options = ("--raw", "--rank", str(rank.rank), "--generation", str(rank.group[0]), "--stream", "stdout")
        answer = self.site.operator.run("logs", *options)
        have = self._log(rank).read_bytes()
        if answer.out != have:
            text = f"`logs {' '.join(options)}` prints {len(answer.out)} bytes, the file has {len(have)}"
            case.result.wrong("log", f"{text}; exit code {answer.status} {answer.err[-300:]}")


def _special(directory: str, names: list[str]) -> list[str]:
    """Return which of these are pipes and sockets."""
    return [name for name in names if not ((path := Path(directory, name)).is_file() or path.is_dir())]


def _copy(row: _Row, target: Path) -> None:
    site = row.site
    shutil.rmtree(target, ignore_errors=True)
    for node in site.nodes:
        if site.files(node).exists():
            shutil.copytree(site.files(node), target / node, ignore=_special)
    for name in ("commands", "stamps"):
        shutil.copytree(site.place / name, target / name)
    documents = site.operator.watch.documents if site.operator.watch is not None else []
    (target / "status.jsonl").write_text("".join(f"{json.dumps([one.t_ns, one.status])}\n" for one in documents))
    results = [case.result.to_json() for case in row.cases]
    (target / "results.json").write_text(json.dumps(results, indent=1))
