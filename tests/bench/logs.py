"""Large logs from afar: ten million lines over a slow link, a search on four nodes.

In: Clusters on this machine. Out: a Report each. What is measured is what the screen does: its feeds and its finder
on a session, from the request until the rows are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

from supervisor.inventory import load
from supervisor.link.tasks import cancel_all
from supervisor.logs.selection import LogQuery, Selection
from supervisor.session import Session
from supervisor.tui.logs.feed import LATEST_NS, Jump, LogFeed
from supervisor.tui.logs.finder import Finder
from tests.bench.fleet import wait_quiet
from tests.bench.report import Report, Table, median, ratio, seconds, spread
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job, until

# Writes so many lines of 100 bytes, an error now and then, and stays until it is stopped.
SCRIPT = """
import os, sys, time
lines, out = int(sys.argv[1]), os.fdopen(1, "wb", 1 << 20)
for number in range(lines):
    word = b"ERROR" if number % 1_000_000 == 999_999 else b"INFO "
    out.write(b"%s step %08d loss 2.3041 lr 3.0e-04 tokens/s 96021 mem 71.2G norm 0.8812 seq 4096 batch 1024\\n"
              % (word, number))
out.flush()
open(sys.argv[2] + "/over-" + os.environ["RANK"], "w").close()
time.sleep(3600)
"""
WAIT_S = 300.0
ROWS = 46


@contextlib.contextmanager
def _written(nodes: int, name: str, lines: int) -> Iterator[tuple[Cluster, Job]]:
    """Hosts, and a job whose ranks, one a node, have written their lines and go on."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="supervisor-bench-")))
        cluster = stack.enter_context(Cluster(nodes))
        job = Job(cluster, work / name, SCRIPT, str(lines), str(work), nproc_per_node=1)
        stack.enter_context(job.start("--job", name, "--detach"))
        job.wait()
        until(lambda: len(list(work.glob("over-*"))) == len(cluster.hosts), f"{name}: the lines are written", WAIT_S)
        yield cluster, job
        job.run("stop")
        wait_quiet(cluster)


@contextlib.asynccontextmanager
async def _session(job: Job) -> AsyncIterator[Session]:
    async with Session(load(job.inventory), job.name[0], follow=True) as session:
        await session.ready()
        await session.settle()
        await session.until_current()
        yield session


async def _timed(work: Awaitable[object]) -> float:
    begun = time.monotonic()
    await work
    return time.monotonic() - begun


# --- browse

LINES = 10_000_000
DELAY_MS = 80
PLACES = (0.5, 0.03, 0.91, 0.27, 0.66)
GOAL_S = 0.150


async def _browse(job: Job) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"open at the end": [], "to line N": [], "to a time": [], "first error": []}
    found["next error"] = []
    async with _session(job) as session:
        node = next(iter(session.links))
        one = Selection(0, [0], ("stdout",), [node])
        rank = LogFeed(session, one)
        # Until the agent has read it all.
        while rank.last_line < LINES:
            await rank.refresh(ROWS, lambda: True)
        times = [line.t_ns for line in (rank.line(rank.count - 1),) if line is not None]
        await rank.show_begin(ROWS)
        times += [line.t_ns for line in (rank.line(0),) if line is not None]
        for place in PLACES:
            fresh = LogFeed(session, one)
            found["open at the end"].append(await _timed(fresh.refresh(ROWS, lambda: True)))
            key = (0, 0, "stdout", int(LINES * place))
            found["to line N"].append(await _timed(fresh.seek(Jump(LATEST_NS, key), ROWS)))
            if fresh.index_of(key) is None:
                raise ClusterError(f"line {key[3]} did not appear")
            merged = LogFeed(session, Selection(generation=0))
            t_ns = int(times[1] + (times[0] - times[1]) * place)
            found["to a time"].append(await _timed(merged.show_around(t_ns, ROWS)))
            found["first error"].append(await _timed(_first_error(session)))
            # Its hits are here: what is left is to show one.
            error_ns = int(times[1] + (times[0] - times[1]) * 0.1 * (1 + len(found["next error"])))
            found["next error"].append(await _timed(merged.show_around(error_ns, ROWS)))
    return found


async def _first_error(session: Session) -> None:
    """Until all errors are known, and the rows around the first one."""
    selection = Selection(generation=0)
    finder = Finder(session, selection, "", "error")
    found = asyncio.Event()
    searching = asyncio.ensure_future(finder.run(lambda: None, found.set))
    await asyncio.wait_for(found.wait(), WAIT_S)
    await cancel_all([searching])
    t_ns, _ = finder.hits[0]
    await LogFeed(session, selection).show_around(t_ns, ROWS)


def browse() -> Report:
    """Ten million lines through a link of 80 ms; raises ClusterError, AssertionError, OSError."""
    with _written(1, "browse", LINES) as (cluster, job):
        cluster.delay("operator", DELAY_MS / 2)
        found = asyncio.run(_browse(job))
        cluster.delay("operator", 0)
    rows = tuple((what, seconds(median(times)), spread(times)) for what, times in found.items())
    notes = (
        f"One rank, {LINES:,} lines of 100 bytes; each way {DELAY_MS / 2:g} ms: one answer takes {DELAY_MS} ms.",
        f"Until the rows of a screen are there; the goal is {GOAL_S * 1000:g} ms. The first error:",
        "until all of them are found, and the first one is shown.",
    )
    table = Table("Ten million lines over a slow link", ("", "median", "least .. most"), rows, notes)
    return Report("browse", (table,), {"lines": LINES, "delay_ms": DELAY_MS, "seconds": found})


# --- grep

NODES = 4
NODE_LINES = 2_500_000
PATTERNS = {"a word that is rare": "ERROR", "a word in any case": "(?i)error", "an expression": r"step \d*77777 loss"}


async def _search(job: Job, pattern: str) -> tuple[float, int]:
    ignore_case = pattern.startswith("(?i)")
    async with _session(job) as session:
        begun = time.monotonic()
        text = pattern.removeprefix("(?i)")
        query, hits = LogQuery(Selection(generation=0), text, ignore_case), 0
        async with contextlib.aclosing(session.rows(query).live()) as batches:
            async for batch in batches:
                hits += len(batch.lines)
                if batch.is_caught_up:
                    break
        return time.monotonic() - begun, hits


def _grep(cluster: Cluster, job: Job, pattern: str) -> tuple[float, int]:
    """Let grep count on all nodes at once."""
    words = ["grep", "-c", "-P" if "\\" in pattern else "-F"]
    words += ["-i"] if pattern.startswith("(?i)") else []
    begun = time.monotonic()
    running = []
    for rank, host in enumerate(cluster.hosts):
        folder = host.home / ".supervisor/jobs" / job.name[0] / "generation_0"
        path = next(path for path in folder.glob("rank_*/stdout.log"))
        command = [*words, pattern.removeprefix("(?i)"), str(path)]
        running.append(cluster.popen(rank, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
    counts = [int(process.communicate(timeout=WAIT_S)[0]) for process in running]
    return time.monotonic() - begun, sum(counts)


def grep() -> Report:
    """A search of 1 GB on four nodes beside grep on the same files; raises ClusterError, AssertionError, OSError."""
    rows, data = [], {}
    with _written(NODES, "grep", NODE_LINES) as (cluster, job):
        # Until the agents have read it all.
        asyncio.run(_search(job, "no such text"))
        for what, pattern in PATTERNS.items():
            mine, theirs = asyncio.run(_search(job, pattern)), _grep(cluster, job, pattern)
            if mine[1] != theirs[1]:
                raise ClusterError(f"{pattern}: {mine[1]} hits, grep counts {theirs[1]}")
            rows.append((what, f"{mine[1]:,}", seconds(mine[0]), seconds(theirs[0]), ratio(mine[0], theirs[0])))
            data[pattern] = {"hits": mine[1], "search_s": mine[0], "grep_s": theirs[0]}
    notes = (
        f"{NODES} nodes of this one machine, {NODE_LINES:,} lines of 100 bytes each: 1 GB.",
        "grep -c runs on all of them at once.",
        "Our search brings the lines with number and time, the operator's side included.",
    )
    table = Table("Search of 1 GB on four nodes", ("", "hits", "search", "grep -c", ""), tuple(rows), notes)
    return Report("grep", (table,), data)
