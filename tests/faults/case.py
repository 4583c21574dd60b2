"""One case: a job on fresh hosts, something done to it, all of it healed, the job ended, and the judgement.

In: a fault and a seed, from which everything else is drawn. Out: a `Result`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import skew
from tests.cluster import Cluster
from tests.cluster.job import POLL_S, Job, journal
from tests.cluster.network import OPERATOR, await_ends
from tests.faults import invariants, ranks
from tests.faults.commands import Operator, Verb
from tests.faults.invariants import BACK_S, GONE_S, Awake, Violation

_FORM_S = 60.0
_HEADS_S = 0.6
"""Within this time a rank that steps has noted a step."""
DISK_MB = 24


@dataclass(frozen=True)
class Fault:
    """Something that is done to a job."""

    name: str
    does: str
    heals: str
    apply: Callable[[Case], None]
    hold: tuple[float, float] = (0.5, 2.5)
    """How long it lasts at least and at most before it is healed, in node_timeouts."""
    attended: bool | None = None
    """Whether an operator is attached meanwhile; None: by chance. After the healing one always is."""
    hosts: tuple[int, ...] = (3, 4, 5)
    node_timeouts: tuple[float, ...] = (4.0, 6.0)
    disk_mb: int = 0
    clocks: bool = False
    """Whether the hosts' clocks of the day can be set."""


@dataclass
class Result:
    """What was measured in a case, and what did not hold."""

    fault: str
    seed: int
    hosts: int
    node_timeout: float
    did: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    back_s: float | None = None
    """From healing until one group of all hosts steps."""
    pause_s: float = 0.0
    """The longest time from the fault on in which no rank made a step."""
    overlap_ms: float = 0.0
    false_s: float = 0.0
    answer_s: float = 0.0
    load: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as a document."""
        return asdict(self)


class Case:
    """What a fault works on: hosts, the job, chance; and what it has to note for the judgement."""

    def __init__(self, cluster: Cluster, fault: Fault, seed: int, result: Result, place: Path) -> None:
        self.cluster = cluster
        self.fault = fault
        self.result = result
        self.rng = random.Random(f"{fault.name}:{seed}")
        self.place = place
        self.node_timeout = result.node_timeout
        self.nodes = [host.name for host in cluster.hosts]
        self.stamps = ranks.Stamps(place / "stamps")
        self.healing: list[Callable[[], object]] = []
        """What to do when the fault is over, the newest first."""
        self.over = False
        """Whether the fault itself ends the job."""
        self.stopped: set[int] = set()
        """Processes that it has stopped: nobody can expect steps of them."""
        self._awake: list[Awake] = []
        self._unseen: list[tuple[int, int]] = []
        self._unseen_since: int | None = None
        self._lost_disks: dict[str, int] = {}
        per_node = 2 if len(self.nodes) == 3 else 1
        self.world = per_node * len(self.nodes)
        keys: dict[str, Any] = {"nproc_per_node": per_node, "node_timeout": self.node_timeout, "min_nodes": 1}
        # As a user has it: nothing that is warm may make a fault worse.
        keys |= {"standby": "auto"}
        keys |= {"max_restarts": 1000, "env": {ranks.STAMPS: str(self.stamps.directory)}, "stop_grace": 3.0}
        if fault.clocks:
            keys["hosts"] = self._clocks()
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
        """Return the file by which a host's clock of the day is set, in a case with such clocks."""
        return self.place / f"{node}.clock"

    # --- who is who

    def coordinator(self) -> str:
        """Return the node that coordinates, by the longest journal."""
        records = max((self.journal(node) for node in self.nodes), key=len)
        changes = [record["node"] for record in records if record["type"] == "coordinator_changed"]
        return str([self.nodes[0], *changes][-1])

    def members(self, count: int = 1) -> list[str]:
        """Return that many nodes that do not coordinate, by chance."""
        return self.rng.sample([node for node in self.nodes if node != self.coordinator()], count)

    def some(self, least: int = 1, most: int | None = None) -> list[str]:
        """Return nodes by chance, with or without the coordinator."""
        return self.rng.sample(self.nodes, self.rng.randint(least, most or len(self.nodes)))

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
        return self._pids(nodes, lambda line: " engine --job " in line)

    def workers(self, *nodes: str) -> list[int]:
        """Return the pids of these nodes' ranks."""
        return self._pids(nodes, lambda line: line.endswith(" train.py"))

    def _pids(self, nodes: Sequence[str], fits: Callable[[str], bool]) -> list[int]:
        return [pid for node in nodes for pid, line in self.cluster.processes(node).items() if fits(line)]

    # --- what faults are made of

    def note(self, text: str) -> None:
        """Say what is done, for whoever repeats the case."""
        self.result.did.append(text)

    def heal_by(self, *does: Callable[[], object]) -> None:
        """Do this when the fault is over, or earlier, with `heal`."""
        self.healing += does

    def heal(self) -> None:
        """Undo what was done, the newest first."""
        while self.healing:
            self.healing.pop()()

    def sleep(self, least: float, most: float) -> None:
        """Let some time pass, in node_timeouts."""
        time.sleep(self.rng.uniform(least, most) * self.node_timeout)

    def kill(self, pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes that may have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, pids: Sequence[int]) -> None:
        """Stop processes until the healing."""
        self.stopped |= set(pids)
        self.kill(pids, signal.SIGSTOP)
        self.heal_by(lambda: self.kill(pids, signal.SIGCONT))

    def freeze(self, node: str) -> None:
        """Stop all of a machine until the healing."""
        frozen = self.workers(node)
        self.stopped |= set(frozen)
        self.cluster.freeze(node)

        def thaw() -> None:
            self._awake += [Awake(pid, time.monotonic_ns()) for pid in frozen]
            self.cluster.thaw(node)

        self.heal_by(thaw)

    def crash(self, node: str, *, lose_disk: bool = False) -> None:
        """End a machine until the healing."""
        self.cluster.crash(node)
        if lose_disk:
            self._lost_disks[node] = time.monotonic_ns()
            for path in self.cluster.host(node).home.iterdir():
                shutil.rmtree(path)
        self.heal_by(lambda: self.cluster.boot(node))

    def hide(self) -> None:
        """Cut the operator's machine off until the healing."""
        self.cluster.cut(OPERATOR)
        self.unseen()
        self.heal_by(lambda: self.cluster.heal(OPERATOR))

    def unseen(self) -> None:
        """Note that the operator's machine reaches no agent from now on, until after the healing one runs."""
        if self._unseen_since is None:
            self._unseen_since = time.monotonic_ns()

    def _look_for_agents(self) -> None:
        if self._unseen_since is not None and self.agents(*self.nodes):
            self._unseen.append((self._unseen_since, time.monotonic_ns()))
            self._unseen_since = None

    def verb(self, verb: str, *options: str) -> Verb:
        """Start a command beside what goes on."""
        self.note(f"`{' '.join((verb, *options))}`")
        return self.operator.begin(verb, *options)

    # --- the course of a case

    def run(self) -> None:
        """Form, break, heal, end, judge."""
        self._form()
        if self.fault.attended or (self.fault.attended is None and self.rng.random() < 0.5):
            self.operator.attach()
        watch = self.operator.begin_watch()
        self._until(lambda: watch.documents, _FORM_S, "status")
        time.sleep(self.rng.uniform(0.0, 1.5))
        broken_ns = time.monotonic_ns()
        self.fault.apply(self)
        self.sleep(*self.fault.hold)
        self.heal()
        if not self.operator.attached:
            self.operator.attach()
        if not self.over:
            self._come_back()
        self.result.pause_s = invariants.pause_s(self.stamps.read(), broken_ns, time.monotonic_ns())
        ended = watch.ended()
        if ended is not None and not self.over:
            self._wrong("status", f"`status --watch` ended by itself: {ended}")
        end_ns = time.monotonic_ns()
        self._end()
        self._judge(end_ns)

    def _form(self) -> None:
        self.job.start("--detach", "--nnodes", f"1:{len(self.nodes)}")
        assert self.job.wait() == 0, self.job.errors()
        self._until(self._whole, _FORM_S, "first group")

    def _whole(self) -> bool:
        """Return whether one group of all hosts steps, and no other."""
        now = self.stamps.stepping(time.monotonic_ns() - int(_HEADS_S * 1e9))
        newest_group = max(now, key=lambda one: one.times_ns[0]).group if now else None
        newest = [rank for rank in now if rank.group == newest_group]
        return len({rank.rank for rank in newest}) == self.world and {rank.node for rank in newest} == set(self.nodes)

    def _until(self, look: Callable[[], object], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not look():
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _come_back(self) -> None:
        begin = time.monotonic()
        while not self._whole():
            self._look_for_agents()
            if time.monotonic() - begin > BACK_S:
                stepping = self.stamps.stepping(time.monotonic_ns() - int(_HEADS_S * 1e9))
                nodes = sorted({f"{rank.node} in {rank.group}" for rank in stepping})
                self._wrong("back", f"{BACK_S:g} s after healing these step: {', '.join(nodes) or 'none'}")
                return
            time.sleep(POLL_S)
        self.result.back_s = time.monotonic() - begin
        self._look_for_agents()

    def _end(self) -> None:
        answer = self.operator.run("stop")
        if answer.status != 0 and not self.over:
            self._wrong("verb", f"`stop` exit status {answer.status}: {answer.err[-400:]}")
        end = time.monotonic() + GONE_S
        while left := {pid: line for node in self.nodes for pid, line in self.cluster.processes(node).items()}:
            if time.monotonic() > end:
                some = "; ".join(f"{pid} {line[-70:]}" for pid, line in list(left.items())[:4])
                self._wrong("orphan", f"{len(left)} processes {GONE_S:g} s after `stop`: {some}")
                return
            await_ends(left, end - time.monotonic())

    # --- the judgement

    def _wrong(self, invariant: str, text: str) -> None:
        self.result.violations.append(Violation(invariant, text))

    def _judge(self, end_ns: int) -> None:
        if self._unseen_since is not None:
            self._unseen.append((self._unseen_since, end_ns))
        found = self.stamps.read()
        self.result.overlap_ms, text = invariants.overlap_ms(found, self._awake)
        if text:
            self._wrong("one group", text)
        documents = self.operator.watch.documents if self.operator.watch is not None else []
        # In a case that ends the job, what follows the end is not a matter of the status that was watched.
        last_ns = min(end_ns, max((rank.times_ns[-1] for rank in found if rank.times_ns), default=0))
        self.result.false_s, text = invariants.status_false_s(
            documents, found, last_ns if self.over else end_ns, unseen=self._unseen, stopped=self.stopped
        )
        if self.result.false_s > invariants.FALSE_S:
            self._wrong("status", f"false for {self.result.false_s:.1f} s: {text}")
        for rank in found:
            if rank.times_ns and rank.times_ns[-1] > self._lost_disks.get(rank.node, 0):
                self.result.violations += invariants.log_violations(rank, self._log(rank))
        self._compare_raw(found)
        journals = {node: self._journal_file(node) for node in self.nodes}
        self.result.violations += invariants.journal_violations(journals, all_there=not self.over)
        for answer in self.operator.answers():
            self.result.answer_s = max(self.result.answer_s, answer.seconds)
            self.result.violations += answer.violations()

    def job_files(self, node: str) -> Path:
        """Return where a node keeps what belongs to the job."""
        return self.cluster.host(node).home / ".supervisor" / "jobs" / self.job.name[0]

    def _journal_file(self, node: str) -> bytes:
        path = self.job_files(node) / "events.jsonl"
        return path.read_bytes() if path.exists() else b""

    def _log(self, rank: ranks.Rank) -> Path:
        return self.job_files(rank.node) / f"generation_{rank.group[0]}" / f"rank_{rank.rank}" / "stdout.log"

    def _compare_raw(self, found: list[ranks.Rank]) -> None:
        """Compare what the program says is a log with the log, for one process."""
        there = [rank for rank in found if self._log(rank).exists()]
        if not there:
            return
        rank = self.rng.choice(there)
        options = ("--raw", "--rank", str(rank.rank), "--generation", str(rank.group[0]), "--stream", "stdout")
        answer = self.operator.run("logs", *options)
        have = self._log(rank).read_bytes()
        if answer.out != have:
            text = f"`logs {' '.join(options)}` prints {len(answer.out)} bytes, the file has {len(have)}"
            self._wrong("log", f"{text}; exit status {answer.status} {answer.err[-300:]}")


def _copy(case: Case, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for node in case.nodes:
        if case.job_files(node).exists():
            shutil.copytree(case.job_files(node), target / node, ignore=shutil.ignore_patterns(".run-*", "*.sock"))
    for name in ("commands", "stamps"):
        shutil.copytree(case.place / name, target / name)
    documents = case.operator.watch.documents if case.operator.watch is not None else []
    (target / "status.jsonl").write_text("".join(f"{json.dumps([one.t_ns, one.status])}\n" for one in documents))
    (target / "result.json").write_text(json.dumps(case.result.to_json(), indent=1))


def run(fault: Fault, seed: int, place: Path, keep: Path | None = None) -> Result:
    """Run one case in a fresh directory, and remove its hosts; an interrupt goes through.

    `keep`: where the files of a case are copied in which something did not hold.
    """
    rng = random.Random(f"{fault.name}:{seed}:hosts")
    result = Result(fault.name, seed, rng.choice(fault.hosts), rng.choice(fault.node_timeouts))
    begin = time.monotonic()
    with Cluster(result.hosts, disk_mb=fault.disk_mb, agent=True, stub_torch=True) as cluster:
        case = Case(cluster, fault, seed, result, place)
        with contextlib.ExitStack() as ending:
            ending.enter_context(case.job)
            ending.callback(case.operator.end)
            try:
                case.run()
            except (AssertionError, OSError) as error:
                result.violations.append(Violation("case", f"{type(error).__name__}: {error}"))
            if keep is not None and result.violations:
                case.operator.end()
                _copy(case, keep / f"{fault.name.replace(' ', '-')}-{seed}")
    result.load = round(os.getloadavg()[0], 1)
    result.seconds = time.monotonic() - begin
    return result
