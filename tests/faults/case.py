"""One case: something is done to a job, all of it is healed, and the job must be well again.

In: a job that is well, a fault and a seed, from which everything else is drawn. Out: a `Result`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.cluster.job import POLL_S
from tests.cluster.network import OPERATOR
from tests.faults import invariants
from tests.faults.commands import Verb
from tests.faults.invariants import BACK_S, Awake, StatusJudge, Violation
from tests.faults.site import Site

DISK_MB = 256
SMALL_DISK_MB = 32
_ALONE_S = 5.0
"""How long a job may take to recover before somebody attaches."""
_LEFT_OUT_S = 1.0
"""How often one looks for nodes that the job has left out."""


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
    """Whether an operator is attached meanwhile; None: by chance. After the healing one is where agents are missing."""
    hosts: tuple[int, ...] = (3, 4, 5)
    node_timeouts: tuple[float, ...] = (4.0, 6.0)
    disk_mb: int = DISK_MB
    clocks: bool = False
    """Whether the hosts' clocks of the day can be set."""
    over: bool = False
    """Whether the fault itself ends the job."""


@dataclass
class Result:
    """What was measured in a case, and what did not hold."""

    fault: str
    seed: int
    hosts: int
    node_timeout: float
    after: list[str] = field(default_factory=list)
    """The faults that the same job has had before."""
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

    def wrong(self, invariant: str, text: str) -> None:
        """Note that something did not hold."""
        self.violations.append(Violation(invariant, text))


class Case:
    """What a fault works on: hosts, the job, chance."""

    def __init__(self, site: Site, fault: Fault, seed: int, after: Sequence[str] = ()) -> None:
        self.site = site
        self.fault = fault
        self.result = Result(fault.name, seed, len(site.nodes), site.node_timeout, [*after])
        self.rng = random.Random(f"{fault.name}:{seed}")
        self.cluster, self.operator = site.cluster, site.operator
        self.nodes, self.world, self.node_timeout = site.nodes, site.world, site.node_timeout
        self.clock, self.coordinator, self.unseen = site.clock, site.coordinator, site.hide
        self.agents, self.engines, self.workers = site.agents, site.engines, site.workers
        self.healing: list[Callable[[], object]] = []
        """What to do when the fault is over, the newest first."""
        self.stopped: set[int] = set()
        """Processes that it has stopped: nobody can expect steps of them."""
        self.begun_ns = time.monotonic_ns()
        self._records = 0
        self._added: set[str] = set()

    # --- what faults are made of

    def members(self, count: int = 1) -> list[str]:
        """Return that many nodes that do not coordinate, by chance."""
        return self.rng.sample([node for node in self.nodes if node != self.coordinator()], count)

    def some(self, least: int = 1, most: int | None = None) -> list[str]:
        """Return nodes by chance, with or without the coordinator."""
        return self.rng.sample(self.nodes, self.rng.randint(least, most or len(self.nodes)))

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
        self.cluster.freeze(node)
        # Also a rank that has not made a step yet.
        frozen = self.cluster.pids(node)
        self.stopped |= set(frozen)

        def thaw() -> None:
            self.site.awake += [Awake(pid, time.monotonic_ns()) for pid in frozen]
            self.cluster.thaw(node)

        self.heal_by(thaw)

    def crash(self, node: str, *, lose_disk: bool = False) -> None:
        """End a machine until the healing."""
        self.cluster.crash(node)
        self.site.power_failures[node] = time.monotonic_ns()
        if lose_disk:
            self.site.lost_disks[node] = time.monotonic_ns()
            for path in self.cluster.host(node).home.iterdir():
                shutil.rmtree(path)
        self.heal_by(lambda: self.cluster.boot(node))

    def hide(self) -> None:
        """Cut the operator's machine off until the healing."""
        self.cluster.cut(OPERATOR)
        self.unseen()
        self.heal_by(lambda: self.cluster.heal(OPERATOR))

    def verb(self, verb: str, *options: str) -> Verb:
        """Start a command beside what goes on."""
        self.note(f"`{' '.join((verb, *options))}`")
        return self.operator.begin(verb, *options)

    # --- the course of a case

    def run(self) -> None:
        """Break the job, heal it, and wait until it is well again; a fault that ends the job is healed only."""
        wanted = self.fault.attended if self.fault.attended is not None else self.rng.random() < 0.5
        if wanted and not self.operator.attached:
            self.operator.attach()
        elif not wanted:
            self.operator.detach()
        self._records = len(self.site.records())
        time.sleep(self.rng.uniform(0.0, 1.5))
        broken_ns = time.monotonic_ns()
        self.fault.apply(self)
        self.sleep(*self.fault.hold)
        self.heal()
        if self.fault.over:
            self._attend()
        else:
            self._come_back()
        watch = self.operator.watch
        ended = watch.ended() if watch is not None else None
        if ended is not None and not self.fault.over:
            self.result.wrong("status", f"`status --watch` ended by itself: {ended}")
        self.result.pause_s = invariants.pause_s(self.site.stamps.read(), broken_ns, time.monotonic_ns())
        self.result.seconds = (time.monotonic_ns() - self.begun_ns) / 1e9

    def settle(self) -> None:
        """Wait for the answers of all commands, and until the job is well after what they asked for."""
        self._take_answers()
        if not self.result.violations:
            self._come_back()

    def judge(self, status: StatusJudge, end_ns: int) -> None:
        """Judge what there was of this case; `end_ns`: until when the status has to be true."""
        found = self.site.stamps.read()
        self.result.overlap_ms, text = invariants.overlap_ms(found, self.site.awake, self.begun_ns)
        if text:
            self.result.wrong("one group", text)
        watch = self.operator.watch
        documents = watch.documents if watch is not None else []
        self.result.false_s, text = status.until(
            documents, found, end_ns, unseen=self.site.unseen_until(end_ns), stopped=self.stopped
        )
        if self.result.false_s > invariants.FALSE_S:
            self.result.wrong("status", f"false for {self.result.false_s:.1f} s: {text}")
        self._take_answers()
        self.result.load = round(os.getloadavg()[0], 1)

    def _take_answers(self) -> None:
        for answer in self.operator.answers():
            self.result.answer_s = max(self.result.answer_s, answer.seconds)
            self.result.violations += answer.violations()

    def _come_back(self) -> None:
        begin = looked = time.monotonic()
        # The job recovers by itself, but for agents that have to be started.
        if not all(self.agents(node) for node in self.nodes):
            self._attend()
        while not self.site.well():
            self.site.look_for_agents()
            if time.monotonic() - begin > _ALONE_S:
                self._attend()
            if time.monotonic() - looked > _LEFT_OUT_S:
                self._add_left_out()
                looked = time.monotonic()
            if time.monotonic() - begin > BACK_S:
                self.result.wrong("back", f"{BACK_S:g} s after healing {self.site.state()}")
                return
            time.sleep(POLL_S)
        if self.result.back_s is None:
            self.result.back_s = time.monotonic() - begin
        self.site.look_for_agents()

    def _attend(self) -> None:
        if not self.operator.attached:
            self.operator.attach()

    def _add_left_out(self) -> None:
        """Add the nodes that the job has left out because of earlier faults too; alone, this one must not do that."""
        for node in invariants.left_out(self.site.records(), self._records, self.node_timeout) - self._added:
            self._added.add(node)
            self.verb("add", "--node", node)
