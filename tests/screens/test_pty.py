"""The application on a real terminal: headless tests miss what a driver does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hostile import check_harmless

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.screens import recorded
from supervisor.tui.app import run_tui
raise SystemExit(run_tui(lambda: recorded.load("running_2x2"), theme=None, read_only=False, ascii_only=False))
"""
CRASHING = """
from supervisor.standard_streams import safe_streams
from supervisor.tui import app
from tests.hostile import HOSTILE
from tests.screens import recorded

def tick(self):
    raise ValueError(f"owned {HOSTILE}")

app.SupervisorApp.tick = tick
with safe_streams():
    status = app.run_tui(lambda: recorded.load("running_2x2"), theme=None, read_only=False, ascii_only=False)
raise SystemExit(status)
"""
DEADLINE_S = 30.0


class Terminal:
    """One process on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.master = master
        self.seen = b""

    def wait_for(self, text: bytes) -> None:
        """Read until the text has come."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(deadline)

    def ask(self, keys: bytes, text: bytes) -> None:
        """Type, and read until the text has come after that."""
        self.seen = b""
        self.send(keys)
        self.wait_for(text)

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    def drain(self, seconds: float) -> None:
        """Read what comes for so long, and forget it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            self._read(deadline)
        self.seen = b""

    def wait_for_end(self) -> int:
        """Read until the process has ended; returns its status."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(time.monotonic() + 0.1)
        # What it wrote last may still lie in the terminal.
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                break
        return self.process.returncode

    def _read(self, deadline: float) -> None:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                # The other end is closed: what is left to wait for is the end of the process.
                self.process.wait(DEADLINE_S)

    def send(self, keys: bytes) -> None:
        """Type."""
        os.write(self.master, keys)

    def leave(self, key: bytes = b"q") -> None:
        """Ask to leave, and say yes."""
        self.send(key)
        self.wait_for(b"continues without this screen")
        self.send(b"\r")
        assert self.wait_for_end() == 0

    def close(self) -> None:
        """Close the window: no signal comes to a process that is not the leader of the terminal's session."""
        os.close(self.master)
        self.master = -1

    def hang_up(self) -> None:
        """Close the window, with the signal that the session's leader gets."""
        self.close()
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def terminal(
    width: int, height: int, command: Sequence[str] = (sys.executable, "-c", PROGRAM), **environment: str
) -> Iterator[Terminal]:
    """The application on a recorded job, or another command, on a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    known = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment = {**known, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "TZ": "UTC", **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONIOENCODING": "utf-8"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    tty = Terminal(process, master)
    try:
        yield tty
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if tty.master >= 0:
            os.close(master)


def colours(text: str) -> set[str]:
    """Colour parameters of all SGR sequences, but for the default ones."""
    found: set[str] = set()
    for sequence in re.findall(r"\x1b\[([0-9;]*)m", text):
        numbers = [int(part or 0) for part in sequence.split(";")]
        found |= {str(n) for n in numbers if 30 <= n <= 38 or 40 <= n <= 48 or n >= 90}
    return found


def test_the_terminal_is_given_back_as_it_was() -> None:
    with terminal(100, 30, NO_COLOR="1") as tty:
        tty.wait_for(b"train-k3f9")
        tty.wait_for(b"running")
        tty.resize(80, 24)
        # Ctrl-C asks like q.
        tty.leave(b"\x03")
        # The terminal is given back: alternate screen left, cursor shown.
        assert b"\x1b[?1049l" in tty.seen
        assert b"\x1b[?25h" in tty.seen
        assert colours(tty.seen.decode("utf-8", "replace")) == set()


def test_sigterm_gives_the_terminal_back() -> None:
    quiet = ("sh", "-c", 'exec "$0" -c "$1" 2>/dev/null', sys.executable, PROGRAM)
    with terminal(80, 24, quiet) as tty:
        tty.wait_for(b"train-k3f9")
        tty.process.terminate()
        assert tty.wait_for_end() == 0
        assert b"\x1b[?1049l" in tty.seen


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ('run_tui(lambda: recorded.load("running_2x2"), theme=None, read_only=False, ascii_only=False)', 0),
        # Written at once: the window is closed as soon as the words are there, and a newline after that is an error.
        ("os.write(1, b'train-k3f9 continues without this screen'), signal.pause()", -signal.SIGHUP),
    ],
    ids=["screen", "plain follow"],
)
def test_a_closed_window_ends_every_command(command: str, status: int) -> None:
    program = f"""
import os, signal
import supervisor.cli
from supervisor.__main__ import main
from supervisor.tui.app import run_tui
from tests.screens import recorded
supervisor.cli.main = lambda: ({command})
raise SystemExit(main())
"""
    with terminal(80, 24, (sys.executable, "-c", program)) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"q")
        tty.wait_for(b"continues without this screen")
        tty.close()
        assert tty.process.wait(DEADLINE_S) == status


def test_a_shell_has_the_terminal_and_ends_with_its_window() -> None:
    line = "echo begun: here; read line; echo got: $line as $$; read line"
    program = (
        f"from tests.screens import recorded\nrecorded.RecordedSession.program = ['sh', '-c', '{line}']\n{PROGRAM}"
    )
    with terminal(80, 24, (sys.executable, "-c", program)) as tty:
        tty.wait_for(b"train-k3f9")
        tty.ask(b"B", b"begun: ")
        # The job goes on meanwhile, and nothing is drawn over it; Ctrl-C is not ours.
        at = tty.seen.index(b"begun: ")
        os.kill(tty.process.pid, signal.SIGINT)
        tty.send(b"typed there\n")
        tty.wait_for(b"got: typed there as ")
        assert b"\x1b[" not in tty.seen[at : tty.seen.index(b"got: ")]
        tty.ask(b"\n", b"train-k3f9")
        tty.ask(b"B", b"begun: ")
        tty.ask(b"again\n", b"got: again as ")
        tty.wait_for(b"\n")
        command_pid = int(tty.seen.partition(b" as ")[2].split()[0])
        tty.hang_up()
        assert tty.process.wait(DEADLINE_S) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(command_pid, 0)


ATTACH = """
import supervisor.session
from supervisor.cli import main
from tests.screens import recorded
supervisor.session.Session = lambda *_, **__: recorded.load("{}")
raise SystemExit(main(["attach", "--hosts", "n1,n2"]))
"""


@pytest.mark.parametrize(
    ("recording", "status", "text"),
    [
        ("running_2x2", 0, b"job train-k3f9 continues; watch it with: supervisor attach --hosts n1,n2 train-k3f9"),
        ("launch_failed", 3, b"2 of 6 hosts came up"),
        ("failed_4x2", 1, b"hint: supervisor incidents --hosts n1,n2 train-k3f9"),
    ],
)
def test_what_the_user_needs_next_stays_on_the_terminal(recording: str, status: int, text: bytes) -> None:
    with terminal(100, 30, (sys.executable, "-c", ATTACH.format(recording))) as tty:
        tty.wait_for(b"\x1b[?1049h")
        tty.send(b"q")
        if recording == "running_2x2":
            tty.wait_for(b"continues without this screen")
            tty.send(b"\r")
        tty.wait_for(b"\x1b[?1049l")
        tty.seen = tty.seen.rpartition(b"\x1b[?1049l")[2]
        tty.wait_for(text)
        assert tty.wait_for_end() == status


def test_an_error_of_the_program_is_plain_text_on_the_terminal() -> None:
    with terminal(120, 40, (sys.executable, "-c", CRASHING)) as tty:
        tty.wait_for(b"ValueError: owned")
        tty.wait_for(b"\\udc9b")
        assert tty.wait_for_end() == 1
        _, _, shown = tty.seen.decode().rpartition("\x1b[?1006l")
        check_harmless(shown.replace("\r\n", "\n"))
        assert "\\x1b[3" not in shown, "the colours of the traceback"
