"""What the screen costs: first paint of `attach`, key to frame, frames and processor time at 512 ranks, memory.

In: two hosts for `attach`; a made job of 512 ranks for the rest, on a real terminal of 160x48. Out: a Report.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from supervisor.tui.app import SupervisorApp
from tests.bench.report import Report, Table, ratio, seconds
from tests.bench.stamps import LIGHT, Stamps
from tests.cluster import Cluster
from tests.cluster.job import Job
from tests.screens import recorded
from tests.screens.screens import settle
from tests.screens.test_perf import frames, moved
from tests.screens.test_pty import ROOT, terminal
from tests.screens.test_robust import Painted

WIDTH, HEIGHT = 160, 48
TRIES = 5
KEYS = 20
WATCH_S = 20.0
RATE_HZ = 10.0
# An hour's worth of news: so many frames with so many events each.
HOUR, EVENTS = 600, 6
FRAMES = 300
# 512 ranks of which every one moves with every update.
BUSY = f"""
import copy, threading, time
from tests.screens import recorded
from supervisor.tui.app import run_tui

session = recorded.trained(recorded.measured(recorded.many(64, 8)), time.time(), 120)
made = []
for number in range(20):
    status = copy.deepcopy(session.status)
    for node in status["nodes"]:
        for rank in node["ranks"]:
            rank["step"] += number
            rank["last_output_age_s"] = (number + rank["rank"]) % 40 / 10
    made.append(status)

def update():
    number = 0
    while True:
        time.sleep(1 / {RATE_HZ})
        session.touch(status=made[number % len(made)])
        number += 1

threading.Thread(target=update, daemon=True).start()
raise SystemExit(run_tui(lambda: session, theme=None, read_only=False, ascii_only=False))
"""

# `supervisor` with its arguments, which tells in the end when the first of its links was up.
LINKED = """
import os, sys
from pathlib import Path
from supervisor.__main__ import main
from supervisor.session import Session

begin, sessions = Session.begin, []

def begun(session):
    sessions.append(session)
    begin(session)

Session.begin = begun
status = main()
Path(os.environ["OPENED"]).write_text(repr(min(link.opened_at for link in sessions[0].links.values())))
sys.exit(status)
"""


def run() -> Report:
    """Measure all; raises ClusterError, AssertionError, OSError."""
    attach, painted, links, ssh = _attach()
    keys, share, rss = _busy()
    wide, begun_mib, hour_mib = asyncio.run(_frames())
    quantiles = statistics.quantiles(wide, n=100)
    rows = (
        ("attach, from the command to its first screen", seconds(attach), ratio(attach, links)),
        ("  from its first link to its first screen", seconds(painted), "0.5 s"),
        ("  the same links for `status --json`", seconds(links), ""),
        ("  one `ssh HOST true`", seconds(ssh), ratio(attach, ssh)),
        ("key to its screen, 512 ranks: median", seconds(statistics.median(keys)), ""),
        ("key to its screen, 512 ranks: the worst", seconds(max(keys)), ""),
        ("frame, 512 ranks all changed: median", seconds(statistics.median(wide)), ""),
        ("frame, 512 ranks all changed: p99", seconds(quantiles[98]), "30 ms"),
        (f"processor, 512 ranks, {RATE_HZ:g} updates a second", f"{share:.1%} of a core", "15 %"),
        ("memory of that process", f"{rss:.0f} MiB", "150 MiB"),
        ("memory, a fresh screen in this process", f"{begun_mib:.0f} MiB", ""),
        ("memory, after an hour's events and updates", f"{hour_mib:.0f} MiB", f"+{hour_mib - begun_mib:.1f} MiB"),
    )
    notes = (
        f"terminal of {WIDTH}x{HEIGHT}; frames: processor time from the change to the last byte for the terminal",
        f"an hour: {HOUR * EVENTS:,} events, with {HOUR} statuses of 512 ranks among them",
    )
    data = {"attach_s": attach, "painted_s": painted, "status_s": links, "ssh_s": ssh, "keys_s": keys}
    data |= {"frames_s": wide, "cpu": share, "rss_mib": rss}
    head = ("what", "measured", "target, or ratio")
    return Report("screen", (Table("the screen", head, rows, notes, (0, 2)),), data)


def _attach() -> tuple[float, float, float, float]:
    """Return seconds of `attach`, of it from its first link on, of `status` and of ssh."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name, Cluster(2) as cluster:
        notes = Stamps(Path(name) / "notes", 2)
        job = Job(cluster, Path(name) / "tree", LIGHT, str(notes.directory), nproc_per_node=1)
        with job.start("--job", "bench"):
            if notes.wait("main", 0, 60.0, lambda: True) is None:
                raise AssertionError(f"the job did not start: {job.errors()}")
            words = [sys.executable, "-c", LINKED, "attach", str(job.inventory), "bench"]
            found = [_first_paint(words, Path(name) / "opened") for _ in range(TRIES)]
            attach, painted = (min(each) for each in zip(*found, strict=True))
            links = min(_timed(job.command("status", "--json")) for _ in range(TRIES))
            ssh = min(_timed([*cluster.ssh_command("n1"), "true"]) for _ in range(TRIES))
            job.run("stop")
            job.wait()
    return attach, painted, links, ssh


def _first_paint(words: list[str], opened: Path) -> tuple[float, float]:
    """Return seconds to the first screen: from the command, and from its first link: the state comes from there."""
    begun = time.monotonic()
    with terminal(WIDTH, HEIGHT, command=words, OPENED=str(opened)) as tty:
        tty.wait_for(b"world 2")
        seen = time.monotonic()
        tty.leave()
    return seen - begun, seen - float(opened.read_text())


def _timed(words: list[str]) -> float:
    begun = time.monotonic()
    subprocess.run(words, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    return time.monotonic() - begun


def _busy() -> tuple[list[float], float, float]:
    """Return key to screen, the share of a core while nobody types, and MiB."""
    with terminal(WIDTH, HEIGHT, command=[sys.executable, "-c", BUSY]) as tty:
        tty.wait_for(b"n012")
        keys = []
        for _ in range(KEYS):
            tty.drain(0.2)
            tty.seen = b""
            begun = time.monotonic()
            tty.send(b"?")
            tty.wait_for(b"help: ")
            keys.append(time.monotonic() - begun)
            tty.send(b"\x1b")
        before = _cpu_s(tty.process.pid)
        begun = time.monotonic()
        while time.monotonic() < begun + WATCH_S:
            tty.drain(0.1)
        share = (_cpu_s(tty.process.pid) - before) / (time.monotonic() - begun)
        rss = _rss_mib(tty.process.pid)
        tty.leave()
    return keys, share, rss


async def _frames() -> tuple[list[float], float, float]:
    """Return processor seconds of each frame, and MiB before and after an hour's worth of news."""
    session = recorded.trained(recorded.measured(recorded.many(64, 8)), time.time(), 120)
    app = SupervisorApp(session)
    painted = Painted(app)

    def change(number: int) -> None:
        painted.text = ""
        session.touch(status=moved(session, number))

    def hour(number: int) -> None:
        event: Any = {"time": "2026-11-20T10:00:00.000Z", "type": "operator_attached", "generation": 0}
        for _ in range(EVENTS):
            seq = len(session.events) + 1
            detail = {"operator": f"ann {seq}"}
            session.events.append({**event, "seq": seq, "node": None, "rank": None, "detail": detail})
        change(number)

    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        await settle(app, pilot)
        gc.collect()
        times = await frames(app, pilot, change, FRAMES)
        begun = _rss_mib("self")
        await frames(app, pilot, hour, HOUR)
        gc.collect()
        return times, begun, _rss_mib("self")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int | str) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
