"""512 ranks on a few real agents, one of which prints something else: how soon does a screen of 80x24 show it?

In: a directory. Out: seconds from each odd line's write until it stands alone, below one line for all others.

One rank a node is a process; the files of all are written by one more, as 512 ranks would at each step.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from supervisor.tui.app import SupervisorApp
from tests.agents.test_session import has, planned, until
from tests.agents.test_session_hosts import Hosts, hosts
from tests.bench.report import Report, Table, median, seconds, spread
from tests.screens.screens import press, running_app, text_of
from tests.screens.screens import until as shown

RANKS = 512
NODES = 4
ODD = 137
EVERY_S = 0.25
SIZE = (80, 24)
GOAL_S = 1.0
DEADLINE_S = 60.0
QUIET = "import time\nwhile True:\n    time.sleep(60)\n"
# A line of its input is a step, of which the odd rank has no loss where it begins with `odd`.
WRITER = f"""
import os, sys
files = [os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in sys.argv[1:]]
for line in sys.stdin:
    how, step = line.split()
    for rank, file in enumerate(files):
        loss = "nan" if how == "odd" and rank == {ODD} else f"2.{{rank % 10}}{{rank % 7}}"
        os.write(file, f"step {{step}} loss={{loss}} lr=3.0e-04 tokens/s 96021\\n".encode())
"""
ALIKE = f"[0-{ODD - 1},{ODD + 1}-{RANKS - 1}]~"


def _paths(made: Hosts) -> list[str]:
    paths = []
    for rank in range(RANKS):
        folder = made.home(f"n{rank % len(made.hosts) + 1}") / f"jobs/job-t/generation_0/rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(str(folder / "stdout.log"))
    return paths


async def _watch(app: SupervisorApp, writer: subprocess.Popen[str], odd: int, as_one: bool) -> list[float]:
    """Write steps, of which every fourth has an odd one; return how long each of these took to be seen."""
    assert writer.stdin is not None
    times = []
    for step in range(4 * odd):
        is_odd = step % 4 == 3
        begun = time.monotonic()
        writer.stdin.write(f"{'odd' if is_odd else 'all'} {step}\n")
        writer.stdin.flush()
        wanted = re.compile(rf"r{ODD} .*step {step} loss=nan")
        while is_odd and wanted.search(text_of(app)) is None:
            if time.monotonic() > begun + DEADLINE_S:
                raise AssertionError(f"step {step} of rank {ODD} is not seen:\n{text_of(app)}")
            await asyncio.sleep(0.01)  # as often as a screen is looked at
        if is_odd:
            times.append(time.monotonic() - begun)
            while as_one and re.search(rf"{re.escape(ALIKE)} .*step {step} ", text_of(app)) is None:
                if time.monotonic() > begun + DEADLINE_S:
                    raise AssertionError(f"the others of step {step} are not one line:\n{text_of(app)}")
                await asyncio.sleep(0.01)
        await asyncio.sleep(max(0.0, begun + EVERY_S - time.monotonic()))
    return times


async def _scenario(made: Hosts, odd: int, size: tuple[int, int], as_one: bool) -> list[float]:
    async with planned(made.inventory(), made) as session:
        await session.ready()
        await until(session, lambda: has(session, "generation_running"))
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, *_paths(made)], stdin=subprocess.PIPE, text=True
        ) as writer:
            app = SupervisorApp(session)
            async with running_app(app, size) as pilot:
                await press(app, pilot, "4")
                await shown(app, pilot, lambda: "log of all ranks" in text_of(app))
                if "folded" not in text_of(app):
                    await press(app, pilot, "z")
                times = await _watch(app, writer, odd, as_one)
            assert writer.stdin is not None
            writer.stdin.close()
        await session.request("stop")
        await until(session, lambda: session.ended)
    return times


def measure(
    root: Path, odd: int, nodes: int = NODES, *, size: tuple[int, int] = SIZE, as_one: bool = True
) -> list[float]:
    """Return how long each of so many odd lines took to be seen; raises AssertionError.

    `as_one`: all others must be one line. Where their lines are read seconds apart they are more: give `size` room.
    """
    with hosts(root, nodes) as made:
        (made.work / "talk.py").write_text(QUIET)
        return asyncio.run(_scenario(made, odd, size, as_one))


def run() -> Report:
    """The odd one of 512 ranks on a screen; raises AssertionError, OSError."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as folder:
        times = measure(Path(folder), 12)
    row = (seconds(median(times)), spread(times))
    notes = (
        f"{RANKS} ranks on {NODES} agents, a line each every {EVERY_S:g} s; the goal is {GOAL_S:g} s.",
        "From the write of the odd rank's line until it stands alone on a screen of 80x24; the other",
        f"{RANKS - 1} are one line.",
    )
    table = Table("The odd one of 512 ranks", ("median", "least .. most"), (row,), notes, ())
    return Report("odd", (table,), {"seconds": times})
