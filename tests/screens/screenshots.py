"""Makes the README's pictures from a real job: `python -m tests.screens.screenshots DIRECTORY`, or `make screenshots`.

In: embedded hosts, the DDP example, a worker that is killed, a script with a slow rank. Out: supervisor.svg, which is
animated, and the stills running.svg, incident.svg, logs.svg and slow.svg.
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
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual.pilot import Pilot

from supervisor.inventory import load
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.session import Session
from supervisor.tui.app import SupervisorApp
from tests.cluster.loopback import LoopbackHosts
from tests.screens.animation import Frame, animate, pieces

SIZE = (120, 30)
HOSTS = 4
WAIT_S = 120.0
VICTIM = 5
FRAME_S = 0.25
UP = "$ supervisor up hosts.toml train.py"
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


def picture(app: SupervisorApp, title: str = "supervisor") -> str:
    """Return the screen as it is now."""
    return _TEXT.sub(_placed, app.export_screenshot(title=title))


async def take(pilot: Pilot[int], app: SupervisorApp, path: Path) -> None:
    """Let the screen draw what it knows, and keep it."""
    await pilot.pause(1.0)
    path.write_text(picture(app), encoding="utf-8")
    print(path, file=sys.stderr)


class Film:
    """The frames of an animation; its time is that of the scenes alone."""

    def __init__(self, app: SupervisorApp) -> None:
        self.frames: list[Frame] = []
        self.length_s = 0.0
        self._app = app

    async def scene(
        self, title: str, shortest_s: float, longest_s: float = WAIT_S, fits: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep each state of the screen until the session shows what is expected; after `longest_s` nothing is kept."""
        start_s = time.monotonic()
        scene_s = 0.0
        while scene_s < shortest_s or not fits():
            if scene_s > WAIT_S:
                raise TimeoutError(f"{title}: the expected state did not appear in time")
            if scene_s < longest_s:
                shown = picture(self._app, title)
                if not self.frames or pieces(shown) != pieces(self.frames[-1].svg):
                    self.frames.append(Frame(self.length_s + scene_s, shown))
            await asyncio.sleep(FRAME_S)
            scene_s = time.monotonic() - start_s
        self.length_s += min(scene_s, longest_s)


async def tour(inventory: Path, target: Path) -> None:
    """Launch the job, kill a worker, look at the verdict and at the logs."""
    plan = make_plan(load(inventory), UpOptions("train.py", ("--epochs", "60")), inventory.parent)
    async with Session(load(inventory), attach="control", plan=plan) as session:
        app = SupervisorApp(session)

        def runs(generation: int, step: int) -> bool:
            found = steps(session)
            is_newest = session.status.get("generation") == generation
            return is_newest and len(found) == 2 * HOSTS and min(found.values()) > step

        async with app.run_test(size=SIZE) as pilot:
            film = Film(app)
            await film.scene(UP, 0.0, 7.0, lambda: not session.launching)
            await film.scene(UP, 0.0, 3.0, lambda: runs(0, 0))
            await film.scene(UP, 6.0)
            await until(session, lambda: runs(0, 150))
            await take(pilot, app, target / "running.svg")
            ranks: Any = [rank for node in session.status["nodes"] for rank in node["ranks"]]
            victim = next(rank["pid"] for rank in ranks if rank["rank"] == VICTIM)
            await film.scene(f"n3 $ kill -9 {victim}", 1.5)
            os.kill(victim, signal.SIGKILL)
            await film.scene(f"n3 $ kill -9 {victim}", 0.0, 6.0, lambda: runs(1, 0))
            await pilot.press("i")
            still = len(film.frames)
            await film.scene("i: which rank failed first, and why?", 6.0)
            await take(pilot, app, target / "incident.svg")
            await pilot.press("1")
            await film.scene("1: the job trains again", 5.0)
            await pilot.press("4")
            await take(pilot, app, target / "logs.svg")
    path = target / "supervisor.svg"
    path.write_text(animate(film.frames, film.length_s, still), encoding="utf-8")
    size = f"{len(film.frames)} frames, {film.length_s:.0f} s, {path.stat().st_size / 1e6:.2f} MB"
    print(f"{path}: {size}", file=sys.stderr)


async def limp(inventory: Path, target: Path) -> None:
    """Launch a job in which one rank is slow, and wait until it is named."""
    plan = make_plan(load(inventory), UpOptions("train.py", ("tokenize",)), inventory.parent)
    async with Session(load(inventory), attach="control", plan=plan) as session:
        app = SupervisorApp(session)
        async with app.run_test(size=SIZE) as pilot:
            await until(session, lambda: bool(session.status.get("slow")))
            await take(pilot, app, target / "slow.svg")


def show(count: int, script: Path, tell: Callable[[Path, Path], Coroutine[Any, Any, None]], target: Path) -> None:
    """Make the pictures of one script on so many hosts; everything started is ended."""
    with LoopbackHosts(count) as hosts:
        work = hosts.directory / "work"
        work.mkdir()
        shutil.copy(script, work / "train.py")
        keys: Any = {
            "nproc_per_node": 2 if count == HOSTS else 1,
            "min_nodes": 2,
            "stop_grace": 3.0,
            "snapshots": ["snapshot.pt"],
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        }
        inventory = hosts.inventory(work / "hosts.toml", **keys)
        try:
            asyncio.run(tell(inventory, target))
        finally:
            stop = [sys.executable, "-m", "supervisor", "stop", "--kill", str(inventory)]
            subprocess.run(stop, check=False, timeout=WAIT_S)


def main(target: Path) -> None:
    """Make the pictures."""
    target.mkdir(parents=True, exist_ok=True)
    tests = Path(__file__).parents[1]
    show(HOSTS, tests.parent / "examples" / "ddp" / "train.py", tour, target)
    show(2, tests / "agents" / "scripts" / "limps.py", limp, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
