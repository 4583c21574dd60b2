"""Scripts that note when they run, and the reading of these notes: both launchers are measured by the same hand.

In: a directory that all hosts share (they are namespaces of one machine, with one clock). Out: times in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02

# One short write in append mode, so that a reader sees whole lines.
STAMP = """
import os, sys, time

def stamp(what):
    rank = os.environ.get("RANK") or os.uname().nodename
    with open(os.path.join(sys.argv[1], rank), "a") as file:
        file.write(f"{what} {time.time_ns()} {os.getpid()}\\n")

stamp("main")
"""
# Comes, and is done.
ONCE = STAMP
# The same for a script that imports torch, as every training script does.
ONCE_TORCH = f"{STAMP}\nimport torch\nstamp('imported')\n"
# Stays until it is ended.
LIGHT = f"{STAMP}\nwhile True:\n    time.sleep(1.0)\n"
# DDP over gloo: "group" is noted when the first step is done, the last collective of which all ranks have to join.
GLOO = f"""{STAMP}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
first = True
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    if first:
        dist.barrier()
        stamp("group")
    first = False
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Stamp:
    """One note of one rank."""

    rank: str
    what: str
    t_ns: int
    pid: int


class Stamps:
    """The notes of one run."""

    def __init__(self, directory: Path, ranks: int) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self._ranks = ranks

    def read(self) -> list[Stamp]:
        """Return all notes, the oldest first."""
        found = []
        for path in self.directory.iterdir():
            for line in path.read_text().splitlines():
                what, t_ns, pid = line.split()
                found.append(Stamp(path.name, what, int(t_ns), int(pid)))
        return sorted(found, key=lambda stamp: stamp.t_ns)

    def all_after(self, what: str, since_ns: int, ranks: int | None = None) -> int | None:
        """Return when the last rank noted it for the first time since then, ns; None while some have not.

        `ranks`: how many have to (default: all of the run).
        """
        firsts: dict[str, int] = {}
        for stamp in self.read():
            if stamp.what == what and stamp.t_ns > since_ns:
                firsts.setdefault(stamp.rank, stamp.t_ns)
        return max(firsts.values()) if len(firsts) == (ranks or self._ranks) else None

    def attempts_after(self, since_ns: int) -> int:
        """Return how often the rank that began most often has begun since then."""
        begun = [stamp.rank for stamp in self.read() if stamp.what == "main" and stamp.t_ns > since_ns]
        return max((begun.count(rank) for rank in set(begun)), default=0)

    def wait(
        self, what: str, since_ns: int, timeout_s: float, goes_on: Callable[[], bool], ranks: int | None = None
    ) -> int | None:
        """Wait for `all_after`; None when it did not happen in time, or `goes_on` says that it never will."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            # Asked first: what was noted before the launcher ended still counts.
            alive = goes_on()
            found = self.all_after(what, since_ns, ranks)
            if found is not None or not alive:
                return found
            time.sleep(POLL_S)  # the times are in the notes: how often we look changes nothing
        return None

    def pid(self, rank: int) -> int:
        """Return the pid of a rank's newest process."""
        return next(stamp.pid for stamp in reversed(self.read()) if stamp.rank == str(rank))
