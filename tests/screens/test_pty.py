"""The application on a real terminal: headless tests miss what a driver does."""

from __future__ import annotations

import fcntl
import os
import pty
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
from tests.screens.test_robust import colours

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

    def flood(self, keys: bytes) -> None:
        """Type these keys, and read nothing, until what is drawn comes no further."""
        held, since = -1, time.monotonic()
        while time.monotonic() < since + 1.0:
            self.send(keys)
            time.sleep(0.02)
            (drawn,) = struct.unpack("i", fcntl.ioctl(self.master, termios.FIONREAD, bytes(4)))
            if drawn != held:
                held, since = drawn, time.monotonic()

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


def test_start_resize_detach() -> None:
    with terminal(100, 30) as tty:
        tty.wait_for(b"train-k3f9")
        tty.wait_for(b"running")
        fcntl.ioctl(tty.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.kill(tty.process.pid, signal.SIGWINCH)
        tty.leave()
        # The terminal is given back: alternate screen left, cursor shown.
        assert b"\x1b[?1049l" in tty.seen
        assert b"\x1b[?25h" in tty.seen


def test_stderr_may_be_a_file() -> None:
    quiet = ("sh", "-c", 'exec "$0" -c "$1" 2>/dev/null', sys.executable, PROGRAM)
    with terminal(80, 24, quiet) as tty:
        tty.wait_for(b"train-k3f9")
        tty.process.terminate()
        assert tty.wait_for_end() == 0


def test_control_c_asks_as_well() -> None:
    with terminal(80, 24) as tty:
        tty.wait_for(b"train-k3f9")
        tty.leave(b"\x03")


def test_sigterm_gives_the_terminal_back() -> None:
    with terminal(80, 24) as tty:
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
def test_a_window_that_is_closed_ends_every_command_without_a_signal_too(command: str, status: int) -> None:
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


def test_a_window_that_is_closed_in_the_midst_of_a_flood_ends_the_screen() -> None:
    with terminal(160, 48) as tty:
        tty.wait_for(b"train-k3f9")
        # Nobody reads any more: the writer waits in the kernel, its queue fills, and all that draws waits for it.
        tty.flood(b"?\x1b")
        tty.hang_up()
        tty.process.wait(DEADLINE_S)


def test_a_pager_has_the_terminal_and_gives_it_back() -> None:
    pager = "sh -c 'echo paged: $(grep -c . $0) $(wc -l <$0); read line; echo got: $line'"
    with terminal(80, 24, PAGER=pager) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"4")
        tty.wait_for(b"log of all ranks")
        tty.seen = b""
        tty.send(b"o")
        tty.wait_for(b"paged: ")
        # The job goes on meanwhile, and nothing is drawn over it; Ctrl-C is not ours.
        at = tty.seen.index(b"paged: ")
        os.kill(tty.process.pid, signal.SIGINT)
        tty.send(b"typed there\n")
        tty.wait_for(b"got: typed there")
        end = tty.seen.index(b"got: ")
        assert b"\x1b[" not in tty.seen[at:end]
        tty.wait_for(b"\x1b[?1049h")
        tty.wait_for(b"log of all ranks")
        tty.leave()


COMMANDS = """
[commands.here]
key = "h"
command = "echo it is $JOB on $NODE; read answer; echo got $answer"
scope = "node"
"""


def test_a_command_of_the_user_has_the_terminal_and_its_output_stays_until_enter(tmp_path: Path) -> None:
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor" / "config.toml").write_text(COMMANDS)
    with terminal(80, 24, (sys.executable, "-c", PROGRAM), XDG_CONFIG_HOME=str(tmp_path)) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"2")
        tty.wait_for(b"node n1")
        tty.send(b"h")
        tty.wait_for(b"it is train-k3f9 on n1")
        tty.send(b"hello\r")
        tty.wait_for(b"got hello")
        tty.wait_for(b"[enter returns to the screen]")
        tty.seen = b""
        tty.send(b"\r")
        tty.wait_for(b"train-k3f9")
        tty.leave()


def test_a_window_that_is_closed_ends_the_screen_and_the_pager_on_it() -> None:
    with terminal(80, 24, PAGER="sh -c 'echo pager $$ is there; exec sleep 600'") as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"4")
        tty.wait_for(b"log of all ranks")
        tty.seen = b""
        tty.send(b"o")
        tty.wait_for(b" is there")
        pager = int(tty.seen.rpartition(b"pager ")[2].split()[0])
        tty.hang_up()
        assert tty.process.wait(DEADLINE_S) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pager, 0)


def test_no_color_on_a_real_terminal() -> None:
    with terminal(80, 24, NO_COLOR="1") as tty:
        tty.wait_for(b"running")
        tty.leave()
        assert colours(tty.seen.decode("utf-8", "replace")) == set()


def test_keys_typed_at_once_with_the_first_opening_of_a_screen_are_its_own() -> None:
    with terminal(100, 30) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"4&lossy\rz")
        tty.wait_for(b"+lossy")
        tty.wait_for(b", folded")
        tty.leave()


def test_keys_typed_before_there_is_a_screen_are_its_own() -> None:
    with terminal(100, 30) as tty:
        # The line discipline, which is not off yet, makes a line feed of the enter.
        tty.send(b"4&lossy\r")
        tty.wait_for(b"+lossy")
        tty.leave()


ATTACH = """
import supervisor.session
from supervisor.cli import main
from tests.screens import recorded
supervisor.session.Session = lambda *_, **__: recorded.load("{}")
raise SystemExit(main(["attach", "--hosts", "n1,n2"]))
"""


@pytest.mark.parametrize(
    ("recording", "keys", "status", "text"),
    [
        (
            "running_2x2",
            b"q\r",
            0,
            b"job train-k3f9 continues; watch it with: supervisor attach --hosts n1,n2 train-k3f9",
        ),
        ("launch_failed", b"q", 3, b"2 of 6 hosts came up"),
        ("failed_4x2", b"q", 1, b"hint: supervisor incidents --hosts n1,n2 train-k3f9"),
    ],
)
def test_what_the_user_needs_next_stays_on_the_terminal(recording: str, keys: bytes, status: int, text: bytes) -> None:
    with terminal(100, 30, (sys.executable, "-c", ATTACH.format(recording))) as tty:
        tty.wait_for(b"\x1b[?1049h")
        for key in keys:
            if key == ord("\r"):
                tty.wait_for(b"continues without this screen")
            tty.send(bytes([key]))
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


SHELL = """
import asyncio
from tests.screens import recorded
from supervisor.tui.app import run_tui

class Program:
    def __init__(self, columns, lines):
        self.printed = asyncio.Queue()
        self.printed.put_nowait(f"there are {columns} columns".encode())

    async def read(self):
        return await self.printed.get()

    def write(self, data):
        self.printed.put_nowait(f"typed: {data.hex()}".encode() if data != b"\\x04" else b"")

    def resize(self, columns, lines):
        self.printed.put_nowait(f"now {columns} columns".encode())

    def close(self):
        self.printed.put_nowait(b"")

class Session(recorded.RecordedSession):
    async def shell(self, terminal, node, rank):
        await terminal.connect(Program(*terminal.size))

def load():
    session = recorded.load("running_2x2")
    session.__class__ = Session
    return session

raise SystemExit(run_tui(load, theme=None, read_only=False, ascii_only=False))
"""


def test_a_shell_on_a_node_has_the_terminal_with_every_key_and_gives_it_back() -> None:
    with terminal(80, 24, (sys.executable, "-c", SHELL)) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"3")
        tty.wait_for(b"output")
        tty.seen = b""
        tty.send(b"B")
        tty.wait_for(b"there are 80 columns")
        # Ctrl-C, an escape and an enter are the node's.
        for key in (b"\x03", b"\x1b", b"\r"):
            tty.send(key)
            tty.wait_for(b"typed: " + key.hex().encode())
        fcntl.ioctl(tty.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
        os.kill(tty.process.pid, signal.SIGWINCH)
        tty.wait_for(b"now 90 columns")
        assert b"\x1b[" not in tty.seen[tty.seen.index(b"there are 80 columns") :], "nothing is drawn over it"
        tty.seen = b""
        tty.send(b"\x04")
        tty.wait_for(b"train-k3f9")
        tty.leave()


def test_a_window_that_is_closed_ends_the_screen_and_the_shell_on_it() -> None:
    with terminal(80, 24, (sys.executable, "-c", SHELL)) as tty:
        tty.wait_for(b"train-k3f9")
        tty.send(b"3")
        tty.wait_for(b"output")
        tty.send(b"B")
        tty.wait_for(b"there are 80 columns")
        tty.hang_up()
        assert tty.process.wait(DEADLINE_S) == 0
