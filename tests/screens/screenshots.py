"""Makes the README's pictures from a real job: `python -m tests.screens.screenshots DIRECTORY`, or `make screenshots`.

In: embedded hosts, the DDP example, a worker that is killed. Out: running.svg, incident.svg, logs.svg.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual.pilot import Pilot

from supervisor.inventory import load
from supervisor.session import Session
from supervisor.tui.app import SupervisorApp
from tests.cluster.loopback import LoopbackHosts

SIZE = (120, 30)
HOSTS = 4
WAIT_S = 120.0
VICTIM = 5
_TEXT = re.compile(r'(<text [^>]*)x="([\d.]+)"([^>]*)textLength="([\d.]+)"([^>]*>)([^<]*)</text>')
_PIECE = re.compile(r"[!-~]+|[^\s\u2800!-~]")


def steps(session: Session) -> dict[int, int]:
    """Return the ranks' steps, of those that have one."""
    ranks = [rank for node in session.status.get("nodes", ()) for rank in node["ranks"]]
    return {rank["rank"]: rank["step"] for rank in ranks if rank["step"] is not None}


async def until(session: Session, fits: Callable[[], bool]) -> None:
    """Wait until the session shows it."""
    seen = session.version
    end = asyncio.get_running_loop().time() + WAIT_S
    while not fits():
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError("the expected state did not appear in time")
        seen = await session.wait_change(1.0, seen)


def _placed(text: re.Match[str]) -> str:
    """Place each word, and each character beyond ASCII, by itself: viewers drop spaces, and other fonts are wider."""
    begin, x, between, width, end, content = text.groups()
    cells = html.unescape(content)
    cell = float(width) / max(1, cell_len(cells))
    pieces = []
    for piece in _PIECE.finditer(cells):
        left, length = float(x) + cell * cell_len(cells[: piece.start()]), cell * cell_len(piece[0])
        shown = html.escape(piece[0])
        pieces.append(f'{begin}x="{left:.1f}"{between}textLength="{length:.1f}"{end}{shown}</text>')
    return "".join(pieces)


async def take(pilot: Pilot[int], app: SupervisorApp, path: Path) -> None:
    """Let the screen draw what it knows, and keep it."""
    await pilot.pause(1.0)
    path.write_text(_TEXT.sub(_placed, app.export_screenshot(title="supervisor")), encoding="utf-8")
    print(path, file=sys.stderr)


async def tour(inventory: Path, target: Path) -> None:
    """Look at the running job, kill a worker, look at the verdict and at the logs."""
    async with Session(load(inventory), None, attach="control") as session:
        app = SupervisorApp(session)
        async with app.run_test(size=SIZE) as pilot:
            await until(session, lambda: len(steps(session)) == 2 * HOSTS and min(steps(session).values()) > 150)
            await take(pilot, app, target / "running.svg")
            ranks = [rank for node in session.status["nodes"] for rank in node["ranks"]]
            os.kill(next(rank["pid"] for rank in ranks if rank["rank"] == VICTIM), signal.SIGKILL)
            await until(session, lambda: session.status["generation"] == 1 and len(steps(session)) == 2 * HOSTS)
            await pilot.press("i")
            await take(pilot, app, target / "incident.svg")
            await pilot.press("4")
            await take(pilot, app, target / "logs.svg")


def main(target: Path) -> None:
    """Make the pictures; everything started is ended."""
    target.mkdir(parents=True, exist_ok=True)
    with LoopbackHosts(HOSTS) as hosts:
        work = hosts.directory / "work"
        work.mkdir()
        shutil.copy(Path(__file__).parents[2] / "examples" / "ddp" / "train.py", work)
        keys: dict[str, Any] = {
            "nproc_per_node": 2,
            "min_nodes": 2,
            "stop_grace": 3.0,
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        }
        inventory = hosts.inventory(work / "hosts.toml", **keys)
        up = [sys.executable, "-m", "supervisor", "up", str(inventory), "--detach", "train.py", "--epochs", "500"]
        subprocess.run(up, cwd=work, check=True, timeout=WAIT_S, stdin=subprocess.DEVNULL)
        try:
            asyncio.run(tour(inventory, target))
        finally:
            stop = [sys.executable, "-m", "supervisor", "stop", "--kill", str(inventory)]
            subprocess.run(stop, check=False, timeout=WAIT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
