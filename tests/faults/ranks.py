"""Light ranks that note what they do in a place that the program under test does not know, and the notes' reader.

In: a directory that all hosts share, in the ranks' environment as STAMPS. Out: one `Rank` for each process.

Times are CLOCK_MONOTONIC in nanoseconds. All hosts are namespaces of one kernel, so that they compare exactly, whatever
a fault does to the clocks of the day.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

STAMPS = "STAMPS"
PERIOD_S = 0.025
"""Between two stamps of a rank."""
PRINT_EVERY = 16
LINES = 4
"""What is printed at once: an agent reads a log once for each write, and many agents share this machine."""

# What is counted is what the kernel took: on a full disk a rank goes on, and its log has a gap that the notes show.
SCRIPT = f"""
import json, os, subprocess, time

subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
node, pid = os.uname().nodename, os.getpid()
generation, rank, world = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
group = [generation, os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]]
path = os.path.join(os.environ["{STAMPS}"], f"{{generation}}.{{rank}}.{{node}}.{{pid}}")
notes = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
head = {{"group": group, "rank": rank, "world": world, "node": node, "pid": pid}}
os.write(notes, json.dumps(head).encode() + b"\\n")
step = 0
while True:
    written = -1
    if step % {PRINT_EVERY} == 0:
        try:
            text = f"step={{step}} loss={{1 / (step + 1):.6f}} pid={{pid}} line="
            written = os.write(1, "".join(f"{{text}}{{line}}\\n" for line in range({LINES})).encode())
        except OSError:
            written = 0
    os.write(notes, f"{{time.monotonic_ns()}} {{written}}\\n".encode())
    step += 1
    time.sleep({PERIOD_S})
"""


def printed(step: int, pid: int) -> bytes:
    """Return what a rank prints in that step."""
    return "".join(f"step={step} loss={1 / (step + 1):.6f} pid={pid} line={line}\n" for line in range(LINES)).encode()


@dataclass
class Rank:
    """One process of the script, as it noted itself."""

    group: tuple[int, str]
    """The generation, and the address of its store, which no other group has."""
    rank: int
    world: int
    node: str
    pid: int
    times_ns: list[int] = field(default_factory=list)
    """When it made each step."""
    written: list[int] = field(default_factory=list)
    """How many bytes of what that step prints the kernel took; -1: nothing to print in this step."""

    def log(self) -> bytes:
        """Return what its stdout must hold."""
        return b"".join(printed(step, self.pid)[:count] for step, count in enumerate(self.written) if count > 0)


class Stamps:
    """The notes of one job; `read` looks at what is new."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._ranks: dict[str, Rank] = {}
        self._read: dict[str, int] = {}

    def read(self) -> list[Rank]:
        """Return all processes that have noted something."""
        with os.scandir(self.directory) as entries:
            # Most of the processes of a long job are over.
            grown = [entry.path for entry in entries if entry.stat().st_size > self._read.get(entry.path, 0)]
        for path in grown:
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                # The last line may still be under way.
                new = file.read().rpartition(b"\n")[0]
            if not new:
                continue
            self._read[path] = self._read.get(path, 0) + len(new) + 1
            self._take(path, new.splitlines())
        return list(self._ranks.values())

    def _take(self, path: str, lines: list[bytes]) -> None:
        if path not in self._ranks:
            head = json.loads(lines.pop(0))
            self._ranks[path] = Rank(tuple(head["group"]), head["rank"], head["world"], head["node"], head["pid"])
        rank = self._ranks[path]
        for text in lines:
            when, written = text.split()
            rank.times_ns.append(int(when))
            rank.written.append(int(written))

    def stepping(self, since_ns: int) -> list[Rank]:
        """Return the processes that have made a step since then."""
        return [rank for rank in self.read() if rank.times_ns and rank.times_ns[-1] >= since_ns]
