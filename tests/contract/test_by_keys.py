"""A whole session by keys: the program in tmux, a job on two real hosts, and nothing but what the screen says."""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.cluster.scripts import STEPS

POLL_S = 0.1
# So long a key may be without an effect before it is pressed again: what has just opened takes no consent.
AGAIN_S = 1.0
ENDS_WITH = "ended with"
ENDED = re.compile(f"^{ENDS_WITH} ([0-9]+)$", re.MULTILINE)
STEP = re.compile(r" step ([\d,]+)")

pair = hosts_of(2, scope="function", stub_torch=True)


class Screen:
    """A window of tmux: what is typed, and what stands there."""

    def __init__(self, server: str, work: Path) -> None:
        self._server = server
        self._work = work

    def tmux(self, *words: str) -> str:
        """Run one command of tmux; returns what it prints."""
        command = ["tmux", "-u", "-f", os.devnull, "-L", self._server, *words]
        known = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        own = {"XDG_CONFIG_HOME": str(self._work), "XDG_STATE_HOME": str(self._work), "LC_ALL": "C.UTF-8"}
        own["SUPERVISOR_HOME"] = str(self._work / "none")  # of this machine, which has no job
        own["TMUX_TMPDIR"] = tempfile.gettempdir()  # the run's own, and a short one: a socket lies below it
        done = subprocess.run(command, env={**known, **own}, capture_output=True, timeout=30, check=False)
        assert done.returncode == 0, (words, done.stderr.decode())
        return done.stdout.decode()

    def run(self, command: Sequence[str]) -> None:
        """Start a program in the window; the one before has ended."""
        # A window whose program has ended would close; tmux itself may miss the status.
        reported = ["sh", "-c", f'"$@"; echo "{ENDS_WITH} $?"; read -r _', "sh", *command]
        self.tmux("respawn-window", "-k", "-c", str(self._work), "--", *reported)

    def text(self) -> str:
        """What stands in the window."""
        return self.tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Type."""
        self.tmux("send-keys", *keys)

    def until(self, *wanted: str, fits: Callable[[str], bool] = bool, timeout_s: float = WAIT_S) -> str:
        """Wait until all of these stand there; returns the text."""
        end = time.monotonic() + timeout_s
        while True:
            text = self.text()
            if all(one in text for one in wanted) and fits(text):
                return text
            assert time.monotonic() < end, f"no {wanted} on the screen:\n{text}"
            time.sleep(POLL_S)

    def consent(self, title: str, key: str = "y") -> None:
        """Say yes to the question of that title."""
        self.until(title, "Effect")
        while title in self.text():
            self.press(key)
            end = time.monotonic() + AGAIN_S
            while title in self.text() and time.monotonic() < end:
                time.sleep(POLL_S)

    def runs(self, generation: int, world: int) -> None:
        """Wait until that group makes steps."""
        head = (" RUNNING ", f" gen {generation} ", f" world {world} ", " step ")
        before = step_of(self.until(*head))
        self.until(*head, fits=lambda text: step_of(text) > before)

    def ended(self) -> int:
        """Wait until the program has ended; returns its status."""
        found = ENDED.search(self.until(ENDS_WITH, fits=lambda text: ENDED.search(text) is not None))
        assert found is not None
        return int(found[1])


def has_step_of_walk(text: str) -> bool:
    """Whether home shows the job's step beside its two ranks."""
    return re.search(r"walk  hosts.toml +2 +[\d,]+ ", text) is not None


def step_of(text: str) -> int:
    """The step that the first line tells."""
    found = STEP.search(text.partition("\n")[0])
    return int(found[1].replace(",", "")) if found else -1


@contextmanager
def screen(work: Path) -> Iterator[Screen]:
    """A server of tmux of our own with one window of 80x24; both end with the test."""
    made = Screen(f"supervisor-{secrets.token_hex(4)}", work)
    size = ["-x", "80", "-y", "24"]
    made.tmux("start-server", ";", "set", "-g", "status", "off", ";", "new-session", "-d", *size, "cat")
    try:
        yield made
    finally:
        pid = int(made.tmux("display-message", "-p", "#{pane_pid}"))
        end_of_it = os.pidfd_open(pid) if Path(f"/proc/{pid}").exists() else -1
        made.tmux("kill-server")
        if end_of_it >= 0:
            select.select([end_of_it], [], [], 30)
            os.close(end_of_it)


def use_node(tty: Screen) -> None:
    """Open a shell on the selected node."""
    tty.press("B")
    tty.until("exit returns to the screen")
    tty.press("echo rank=$RANK in $PWD", "Enter")
    tty.until("rank=0 in ", "/trees/")
    tty.press("exit", "Enter")
    tty.runs(2, 2)


def use_mouse(tty: Screen) -> None:
    """Click on the name of another screen, as a terminal reports it, and go back by key."""
    tty.runs(2, 2)
    for action in "Mm":
        tty.tmux("send-keys", "-l", f"\x1b[<0;12;23{action}")
    tty.until("─ nodes (2), worst first")
    tty.press("1")
    tty.until("─ nodes ─")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_whole_session_by_keys(pair: Cluster, tmp_path: Path) -> None:
    work = tmp_path / "work"
    job = Job(pair, work, STEPS, nproc_per_node=1)
    with screen(work) as tty:
        up = job.command("up", "--job", "walk", "--rdzv-conf", f"last_call_timeout={WAIT_S:g}", "train.py")
        tty.run([word for word in up if word != "--headless"])
        tty.runs(0, 2)

        worker = next(pid for pid, line in pair.processes("n2").items() if line.endswith("train.py"))
        os.kill(worker, signal.SIGKILL)
        tty.runs(1, 2)
        tty.press("i")
        text = tty.until("incident 1, generation 0", "failed as a consequence (1)")
        assert re.search(r"culprit: rank 1 on n2\s+exit: killed by SIGKILL", text), text

        tty.press("Escape")
        tty.until("─ nodes ─")
        tty.press("x", "r")
        # The script says when it saves, so the plan knows what is done again.
        tty.until("Restart group?", "last snapshot: step")
        tty.consent("Restart group?")
        tty.runs(2, 2)

        use_node(tty)
        use_mouse(tty)

        tty.press("j", "x")
        tty.until("actions on n2")
        tty.press("m")
        tty.consent("Remove node?")
        tty.runs(3, 1)
        tty.press("x", "a")
        tty.consent("Add node?")
        tty.runs(4, 2)

        tty.press("q")
        tty.until("continues without this screen")
        tty.press("Enter")
        assert tty.ended() == 0
        tty.run([sys.executable, "-m", "supervisor"])
        tty.until("● RUNNING     walk  hosts.toml", "last incident", "rank 1 (n2): kill", fits=has_step_of_walk)
        tty.press("Enter")
        tty.runs(4, 2)
        tty.press("H")
        tty.until("● RUNNING     walk")
        tty.press("Escape")
        tty.runs(4, 2)
        tty.press("x", "S")
        tty.until("Type walk to confirm:")
        tty.press("walk")
        # From the word to the button, and on it.
        tty.consent("Stop job?", "Enter")
        tty.until(" STOPPED ", "stopped by an operator")
        tty.press("q")
        assert tty.ended() == 4
