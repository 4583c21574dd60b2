"""Eight ranks that print as fast as a flood: what it costs the ranks, the agents and whoever looks on.

In: a Cluster of two hosts on this machine. Out: a Report, ours beside plain files. The ranks
tell themselves how many lines they got rid of and what that took; the rest is read from /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.fleet import ended, wait_quiet
from tests.bench.report import Report, Table
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job, until

NODES, NPROC = 2, 4
RANKS = NODES * NPROC
LINES_A_SECOND = 200_000
SECONDS = 20.0
WAIT_S = 90.0
POLL_S = 0.1
# The end of each line.
MARK = b" " + b"x" * 70 + b"\n"
TICKS = os.sysconf("SC_CLK_TCK")
# Prints at its pace, tells how it went, and stays until all it said has been read.
SCRIPT = """
import json, os, sys, time
place, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
rank = os.environ["RANK"]
text = "x" * 70
open(f"{place}/begun-{rank}", "w").close()
while not os.path.exists(f"{place}/go"):
    time.sleep(0.01)
number, begun = 0, time.monotonic()
while (now := time.monotonic() - begun) < seconds:
    due = min(int(now * rate), number + 500)
    for number in range(number, due):
        print(f"{rank} {number:08d} {text}")
    number = due
    if due == int(now * rate):
        time.sleep(0.005)
sys.stdout.flush()
told = {"lines": number, "wall_s": time.monotonic() - begun, "cpu_s": time.process_time()}
with open(f"{place}/told-{rank}.part", "w") as file:
    json.dump(told, file)
os.rename(f"{place}/told-{rank}.part", f"{place}/told-{rank}")
while not os.path.exists(f"{place}/leave"):
    time.sleep(0.05)
"""


@dataclass
class Flood:
    """How one flood went."""

    name: str
    reported: list[dict[str, float]]
    """What the ranks say: lines, wall_s, cpu_s."""
    lost: int = 0
    """Lines that the ranks printed and nobody can read."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By process: processor time from the first line until the last one had been read."""
    rss_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By process: memory at the begin and at the end."""

    @property
    def lines(self) -> int:
        """All that the ranks printed."""
        return int(sum(one["lines"] for one in self.reported))


class Watched:
    """Processes by name, whose processor time and memory are looked at."""

    def __init__(self) -> None:
        self.pids: dict[str, list[int]] = {}
        self._begun: dict[str, tuple[float, float]] = {}

    def begin(self) -> None:
        """Take what they have used so far as nothing."""
        self._begun = {name: self._used(name) for name in self.pids}

    def end(self, flood: Flood) -> None:
        """Note what they have used since."""
        for name, (cpu_s, rss_mb) in self._begun.items():
            now_s, now_mb = self._used(name)
            flood.cpu_s[name] = now_s - cpu_s
            flood.rss_mb[name] = (rss_mb, now_mb)

    def _used(self, name: str) -> tuple[float, float]:
        cpu_s = rss_mb = 0.0
        for pid in self.pids[name]:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s += (int(fields[11]) + int(fields[12])) / TICKS
            rss_mb += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        return cpu_s, rss_mb


def _pour(name: str, place: Path, watched: Watched) -> Flood:
    """Let the ranks go, and wait until they have printed all of it; they may leave then."""
    watched.begin()
    (place / "go").touch()
    until(lambda: len(list(place.glob("told-*[0-9]"))) == RANKS, f"{name}: the ranks' last word")
    flood = Flood(name, [json.loads(path.read_text()) for path in sorted(place.glob("told-*"))])
    watched.end(flood)
    (place / "leave").touch()
    return flood


def _begun(place: Path) -> bool:
    return len(list(place.glob("begun-*"))) == RANKS


def _words(place: Path) -> list[str]:
    place.mkdir()
    return [str(place), str(LINES_A_SECOND / RANKS), str(SECONDS)]


def plain(work: Path) -> Flood:
    """The same processes with their output in files and nobody else."""
    place = work / "plain"
    words = _words(place)
    (work / "flood.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:
        for rank in range(RANKS):
            out = stack.enter_context((work / f"plain-{rank}.log").open("wb"))
            command = [sys.executable, "-u", str(work / "flood.py"), *words]
            process = subprocess.Popen(command, stdout=out, env={**os.environ, "RANK": str(rank)})
            stack.enter_context(ended(process))
        until(lambda: _begun(place), "plain: the ranks")
        flood = _pour("plain files", place, Watched())
    for path in work.glob("plain-*.log"):
        path.unlink()
    return flood


def _count(path: Path) -> int:
    """Return how many lines of the flood are in a file."""
    lines = 0
    with path.open("rb") as file:
        while block := b"".join(file.readlines(1 << 20)):
            lines += block.count(MARK)
    return lines


@contextlib.contextmanager
def _screen(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The log screen on a terminal of 160x48, at the other end of which everything is read."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 48, 160, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        job.command("attach"), cwd=job.work, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    seen = threading.Event()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 1 << 16):
                if b"running" in data:
                    seen.set()

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        if not seen.wait(WAIT_S):
            raise ClusterError("the screen did not appear")
        os.write(master, b"4")
        yield process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def ours(cluster: Cluster, work: Path) -> Flood:
    """Under our agents, with a screen that follows."""
    place = work / "ours"
    keys: dict[str, Any] = {"nproc_per_node": NPROC}
    with Job(cluster, work / "tree", SCRIPT, *_words(place), **keys).start("--job", "flood", "--detach") as job:
        job.wait()
        until(lambda: _begun(place), "ours: the ranks")
        logs = [host.home / ".supervisor/jobs/flood/generation_0" for host in cluster.hosts]
        watched = Watched()
        watched.pids["agents"] = [node["agent_pid"] for node in job.ask("status")["nodes"]]
        with _screen(job) as screen:
            watched.pids["screen"] = [screen.pid]
            flood = _pour("ours", place, watched)
        job.run("stop")
        wait_quiet(cluster)
        flood.lost = flood.lines - sum(_count(path) for log in logs for path in log.glob("rank_*/stdout.log"))
        # What a reader gets is the same.
        text = job.run("logs", timeout_s=WAIT_S * 4).stdout
        flood.lost += flood.lines - text.count(MARK)
    return flood


def run() -> Report:
    """Measure; raises ClusterError, AssertionError, OSError."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name:
        work = Path(name)
        with Cluster(NODES) as cluster:
            floods = [plain(work), ours(cluster, work)]
    rows = tuple(_row(flood) for flood in floods)
    head = ("", "lines/s", "lines lost", "CPU a line", "agents, CPU", "screen, CPU", "screen, MB", "agents, MB")
    notes = (
        f"{RANKS} ranks on {NODES} nodes print {LINES_A_SECOND:,} lines/s of 82 bytes for {SECONDS:g} s, as far as the",
        "machine lets them, each line with a write of its own.",
        "CPU a line: of the rank itself. Agents, screen: share of one core; MB: at the begin and at the end.",
    )
    data = {flood.name: {"lines": flood.lines, "lost": flood.lost, "reported": flood.reported, "cpu_s": flood.cpu_s,
                         "rss_mb": flood.rss_mb} for flood in floods}  # fmt: skip
    return Report("flood", (Table("Flood: what is printed, what it costs", head, rows, notes),), data)


def _row(flood: Flood) -> tuple[str, ...]:
    wall_s = max(one["wall_s"] for one in flood.reported)
    each_us = sum(one["cpu_s"] for one in flood.reported) / max(1, flood.lines) * 1e6

    def share(name: str) -> str:
        return f"{flood.cpu_s[name] / wall_s:.0%}" if name in flood.cpu_s else "-"

    def memory(name: str) -> str:
        return "{:.0f} .. {:.0f}".format(*flood.rss_mb[name]) if name in flood.rss_mb else "-"

    return (
        flood.name, f"{flood.lines / wall_s:,.0f}", f"{flood.lost:,}", f"{each_us:.2f} us", share("agents"),
        share("screen"), memory("screen"), memory("agents"),
    )  # fmt: skip
