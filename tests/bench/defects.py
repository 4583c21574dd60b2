"""What stock torchrun promises and does not keep, side by side with ours: the same script, hosts and fault for both.

In: a Cluster of three hosts. Out: a Report; for tests, the scenarios by name. Times are the ranks' own notes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import contest, torchrun
from tests.bench.contest import Run, Setting
from tests.bench.report import Report, Table, seconds
from tests.bench.stamps import GLOO, POLL_S, STAMP
from tests.cluster import Cluster, ClusterError

HOSTS = 3
Launch = Callable[[Cluster, Path, Setting], AbstractContextManager[Run]]

_READY = f'{STAMP}\nstamp("ready")\nstamp("world" + os.environ["WORLD_SIZE"])\n'
_STAY = "while True:\n    time.sleep(1.0)\n"
LIGHT = f"{_READY}{_STAY}"
# "group" is noted when the first step is done.
TRAIN = GLOO.replace('stamp("group")', 'stamp("group"); stamp("ready")')
DEAF = f"""{STAMP}
import signal
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
stamp("ready")
{_STAY}"""
PRINTS = f"""{STAMP}
print("printed by", os.getpid(), flush=True)
stamp("ready")
stamp("world" + os.environ["WORLD_SIZE"])
{_STAY}"""
# Rank 0 fails because its connection to rank 1 closes, and says so as PyTorch's documentation tells it to; rank 1 is
# killed just before a second is full.
BLAME = f"""{STAMP}
import signal, socket
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    place = os.path.join(sys.argv[1], "..", "socket" + os.environ["TORCHELASTIC_RUN_ID"])
    if os.environ["RANK"] == "0":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place)
            server.listen()
            stamp("ready")
            peer, _ = server.accept()
            if not peer.recv(1):
                raise ConnectionError("Connection closed by peer")
    with socket.socket(socket.AF_UNIX) as peer:
        while True:
            try:
                peer.connect(place)
                break
            except OSError:
                time.sleep(0.05)
        stamp("ready")
        time.sleep(2.0 - time.time() % 1.0 - 0.04)
        os.kill(os.getpid(), signal.SIGKILL)

main()
"""
STUCK = f"""{STAMP}
import torch.distributed

def wait_for_peer():
    time.sleep(3600)

def read_a_file_that_never_comes():
    time.sleep(3600)

stamp("ready")
read_a_file_that_never_comes() if os.environ["RANK"] == "1" else wait_for_peer()
"""


@dataclass(frozen=True)
class Outcome:
    """What was seen: seconds until the promise was kept, or None, and a word about it."""

    kept_s: float | None
    remark: str = ""


@dataclass(frozen=True)
class Scenario:
    """A promise, a fault, and how to see whether it is kept."""

    name: str
    fact: int
    """Of design/elastic.md, section 0."""
    setting: Setting
    play: Callable[[Run, float], Outcome]
    """Does the fault and watches for so many seconds; raises ClusterError."""
    promise_s: float
    """Later than this the promise is not kept."""
    watch_s: float
    """How long both are watched in the benchmark."""
    tries: int = 1
    """How often stock torchrun is tried: what it does depends on the moment."""

    def kept(self, outcome: Outcome) -> bool:
        """Return whether the promise was kept."""
        return outcome.kept_s is not None and outcome.kept_s <= self.promise_s


def _back(run: Run, since_ns: int, watch_s: float, what: str, ranks: int) -> Outcome:
    """Wait until that many ranks have noted it since then."""
    begun = time.monotonic()
    at_ns = run.notes.wait(what, since_ns, watch_s, run.goes_on, ranks)
    if at_ns is not None:
        return Outcome((at_ns - since_ns) / 1e9)
    over = run.said()
    passed = time.monotonic() - begun
    return Outcome(None, f"{over} after {passed:.0f} s" if over else f"not within {watch_s:g} s")


def _kill_worker(rank: int, what: str) -> Callable[[Run, float], Outcome]:
    def play(run: Run, watch_s: float) -> Outcome:
        since_ns = time.time_ns()
        os.kill(run.notes.pid(rank), signal.SIGKILL)
        return _back(run, since_ns, watch_s, what, run.setting.ranks)

    return play


def _host_gone(host: str) -> Callable[[Run, float], Outcome]:
    def play(run: Run, watch_s: float) -> Outcome:
        left = run.setting.ranks - run.setting.nproc
        since_ns = time.time_ns()
        run.cluster.crash(host)
        try:
            return _back(run, since_ns, watch_s, f"world{left}", left)
        finally:
            run.cluster.boot(host)

    return play


def _agent_killed_orphans(run: Run, watch_s: float) -> Outcome:
    workers = [run.notes.pid(rank) for rank in range(run.setting.ranks - run.setting.nproc, run.setting.ranks)]
    begun = time.monotonic()
    for pid in run.agent_pids(run.setting.hosts[-1]):
        os.kill(pid, signal.SIGKILL)
    while time.monotonic() < begun + watch_s:
        # A zombie has no executable.
        if not any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
            return Outcome(time.monotonic() - begun)
        time.sleep(POLL_S)
    return Outcome(None, f"a worker without agent still runs after {watch_s:g} s")


def _agent_killed_rest(run: Run, watch_s: float) -> Outcome:
    left = run.setting.ranks - run.setting.nproc
    since_ns = time.time_ns()
    for pid in run.agent_pids(run.setting.hosts[-1]):
        os.kill(pid, signal.SIGKILL)
    return _back(run, since_ns, watch_s, f"world{left}", left)


def _grow(run: Run, watch_s: float) -> Outcome:
    ranks = run.setting.ranks + len(run.setting.later) * run.setting.nproc
    since_ns = time.time_ns()
    for host in run.setting.later:
        run.add(host)
    return _back(run, since_ns, watch_s, f"world{ranks}", ranks)


def _keeps_logs(run: Run, watch_s: float) -> Outcome:
    wanted = f"printed by {run.notes.pid(0)}\n"
    if wanted not in run.first_log(0):
        raise ClusterError("the first group's log is not there before the restart")
    grown = _grow(run, watch_s)
    if grown.kept_s is None or wanted in run.first_log(0):
        return grown
    return Outcome(None, "the first group's logs are gone")


def _blames(run: Run, _watch_s: float) -> Outcome:
    since_ns = time.time_ns()
    rank = run.culprit()
    if rank == 1:
        return Outcome((time.time_ns() - since_ns) / 1e9, "rank 1 named")
    return Outcome(None, "no rank named" if rank is None else f"rank {rank} named, which failed as a consequence")


def _shows_where(run: Run, watch_s: float) -> Outcome:
    begun = time.monotonic()
    while True:
        if "read_a_file_that_never_comes" in run.where(1):
            return Outcome(time.monotonic() - begun)
        if time.monotonic() > begun + watch_s:
            return Outcome(None, f"no report within {watch_s:g} s")
        time.sleep(POLL_S)


def _restarts(run: Run, watch_s: float) -> Outcome:
    since_ns = time.time_ns()
    how = run.restart()
    found = _back(run, since_ns, watch_s, f"world{run.setting.ranks}", run.setting.ranks)
    return Outcome(found.kept_s, found.remark or how)


_PAIR = ("n1", "n2")
_ALL = ("n1", "n2", "n3")
# Where the wait for more hosts is not what is measured; the default is 30 s.
_SOON = ("--rdzv-conf", "last_call_timeout=1")
_LOST = {"node_timeout": 5.0}
SCENARIOS = (
    Scenario(
        "worker killed, gloo: first step done again", 1,
        Setting(TRAIN, _PAIR, "2", nproc=2), _kill_worker(3, "group"), 20.0, 30.0,
    ),
    Scenario(
        "worker killed, room for one more host (2:3)", 3,
        Setting(LIGHT, _PAIR, "2:3", later=("n3",)), _kill_worker(1, "world2"), 5.0, 60.0,
    ),
    Scenario(
        "host gone (2:3): the others continue", 2,
        Setting(LIGHT, _ALL, "2:3", keys=_LOST), _host_gone("n3"), 10.0, 60.0,
    ),
    Scenario(
        "rank 0's host gone (2:3): the others continue", 1,
        Setting(LIGHT, _ALL, "2:3", keys=_LOST), _host_gone("n1"), 10.0, 90.0,
    ),
    Scenario(
        "agent killed: its workers end", 9,
        Setting(LIGHT, _PAIR, "2"), _agent_killed_orphans, 5.0, 15.0,
    ),
    Scenario(
        "agent killed (2:3): the others continue", 2,
        Setting(LIGHT, _ALL, "2:3", keys=_LOST), _agent_killed_rest, 10.0, 60.0,
    ),
    Scenario(
        "a third host comes (2:3)", 1,
        Setting(LIGHT, _PAIR, "2:3", later=("n3",), stock_options=_SOON), _grow, 20.0, 90.0,
    ),
    Scenario(
        "worker killed, the other ignores SIGTERM, --shutdown-timeout 3", 6,
        Setting(DEAF, ("n1",), "1", nproc=2, options=("--shutdown-timeout", "3")),
        _kill_worker(1, "ready"), 8.0, 45.0,
    ),
    Scenario(
        "worker killed, no restarts: it is named, not a rank that failed as a consequence", 7,
        Setting(BLAME, ("n1",), "1", nproc=2, max_restarts=0),
        _blames, 30.0, 30.0, tries=12,
    ),
    Scenario(
        "membership restart: the first group's logs are kept", 8,
        Setting(
            PRINTS, ("n1",), "1:2", later=("n2",),
            stock_options=("--redirects", "3", *_SOON), stock_env=torchrun.OWN_STORE,
        ),
        _keeps_logs, 20.0, 30.0,
    ),
    Scenario(
        "a rank hangs: where it is can be seen", 10,
        Setting(STUCK, ("n1",), "1", nproc=2), _shows_where, 10.0, 30.0,
    ),
    Scenario(
        "restart on command", 4,
        Setting(LIGHT, _PAIR, "2"), _restarts, 3.0, 30.0,
    ),
)  # fmt: skip


def play(scenario: Scenario, launch: Launch, cluster: Cluster, work: Path, watch_s: float) -> Outcome:
    """Run a scenario once; raises ClusterError, AssertionError, OSError."""
    work.mkdir(parents=True)
    with launch(cluster, work, scenario.setting) as run:
        return scenario.play(run, watch_s)


def play_stock(scenario: Scenario, cluster: Cluster, work: Path, watch_s: float) -> Outcome:
    """Run a scenario with stock torchrun until the promise is broken, as often as the scenario allows."""
    number = 0
    while True:
        found = play(scenario, contest.stock, cluster, work / str(number), watch_s)
        number += 1
        if number == scenario.tries or not scenario.kept(found):
            return found


def run() -> Report:
    """Play all scenarios with both; raises ClusterError, AssertionError, OSError."""
    rows = []
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name, Cluster(HOSTS) as cluster:
        for number, scenario in enumerate(SCENARIOS):
            work = Path(name) / str(number)
            theirs = play_stock(scenario, cluster, work / "stock", scenario.watch_s)
            mine = play(scenario, contest.ours, cluster, work / "ours", scenario.watch_s)
            rows.append((scenario.name, str(scenario.fact), _cell(theirs), _cell(mine)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            data[scenario.name] = {"torchrun": vars(theirs), "supervisor": vars(mine)}
    notes = (
        "fact: of design/elastic.md, section 0; seconds from the fault to the promise kept, by the ranks' own notes",
        "torchrun: c10d on the first host, defaults; last_call_timeout=1 where a host comes, since the wait of 30 s is",
        "another scenario; own store where logs are looked at",
        "supervisor: node_timeout = 5 where a host goes (default 15)",
    )
    head = ("scenario", "fact", "torchrun", "supervisor")
    return Report("defects", (Table("defects of stock torchrun", head, tuple(rows), notes, (0, 2, 3)),), data)


def _cell(outcome: Outcome) -> str:
    if outcome.kept_s is None:
        return f"never: {outcome.remark}"
    return seconds(outcome.kept_s) + (f" ({outcome.remark})" if outcome.remark else "")
