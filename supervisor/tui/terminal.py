"""The terminal: its file and encoding, its clipboard, another program on it, and what happens when it is closed.

In: a function that leaves the screen, a command, a text; the segments of every widget. Out: that function called on a
signal; the command run; segments that hold nothing but text.
"""

from __future__ import annotations

import asyncio
import contextlib
import locale
import os
import signal
import sys
import termios
import threading
import tty
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

from rich.segment import Segment
from textual.filter import LineFilter

from supervisor.paths import state_dir
from supervisor.tui.rows.spans import clean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from textual.app import App
    from textual.color import Color

READ_BYTES: Final = 65_536
_ESC: Final = "\x1b"


class Remote(Protocol):
    """A program on a terminal of another machine: `supervisor.ssh.wires.RemoteProgram`."""

    async def read(self) -> bytes:
        """Return what it prints; empty at its end."""

    def write(self, data: bytes) -> None:
        """Send what is typed."""

    def resize(self, columns: int, lines: int) -> None:
        """Report another size of this terminal."""

    def close(self) -> None:
        """End it."""


async def lend(app: App[Any], use: Callable[[Lent], Awaitable[None]]) -> None:
    """Take the screen off the terminal while it is used; raises what `use` raises, SuspendNotSupported."""
    problem: BaseException | None = None
    # Without this, updates would be drawn over the program.
    with app.batch_update(), app.suspend():
        # Ctrl-C goes to the program, which starts with the default handler.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            await use(Lent())
        except BaseException as error:  # noqa: BLE001  raised below
            # The screen is restored before the error is raised.
            problem = error
        finally:
            signal.signal(signal.SIGINT, before)
        if app.return_value is not None:
            # The application leaves, and may have stopped reading the terminal already: nothing would end it again.
            raise problem or asyncio.CancelledError
    if problem is not None:
        raise problem


class Lent:
    """The terminal while something else than the screen has it: `supervisor.ssh.wires.Terminal`."""

    def __init__(self) -> None:
        self.kind = os.environ.get("TERM", "xterm")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        columns, lines = os.get_terminal_size(0)
        return columns, lines

    async def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run a program until it ends; raises OSError."""
        process = await asyncio.create_subprocess_exec(*words, env=env)
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def connect(self, program: Remote) -> None:
        """Pass bytes between the terminal and a program on another machine until that ends."""
        loop = asyncio.get_running_loop()
        screen = 1 if os.isatty(1) else 2

        def typed() -> None:
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(0, READ_BYTES)
            if data:
                program.write(data)
            else:
                # The terminal is closed.
                loop.remove_reader(0)
                program.close()

        before = termios.tcgetattr(0)
        resized = signal.signal(
            signal.SIGWINCH, lambda *_: loop.call_soon_threadsafe(lambda: program.resize(*self.size))
        )
        tty.setraw(0)
        loop.add_reader(0, typed)
        try:
            while data := await program.read():
                # The terminal may be slow, and links must be answered meanwhile.
                await asyncio.to_thread(_write_all, screen, data)
        finally:
            loop.remove_reader(0)
            signal.signal(signal.SIGWINCH, resized)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, before)


def _write_all(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def is_utf8() -> bool:
    """Return whether the terminal accepts more than ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)).lower()
    return encoding.replace("-", "").replace("_", "") == "utf8"


@contextlib.contextmanager
def held(leave: Callable[[], None]) -> Iterator[None]:
    """Draw on the terminal, and leave cleanly on SIGTERM and when it is closed; the job continues."""
    terminal = [fd for fd in (0, 1, 2) if os.isatty(fd)]
    with _handled(signal.SIGTERM, leave), _handled(signal.SIGHUP, _hang_up, leave, terminal), _drawn_on_terminal():
        yield


@contextlib.contextmanager
def _handled(number: signal.Signals, call: Callable[..., None], *args: object) -> Iterator[None]:
    """Call a function on a signal, and restore the previous handler afterwards: the demo's handler cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(number)
    loop.add_signal_handler(number, call, *args)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, before)


def _hang_up(leave: Callable[[], None], closed: Sequence[int]) -> None:
    """Leave without the terminal: reading it and setting its modes would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in closed:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    leave()


@contextlib.contextmanager
def _drawn_on_terminal() -> Iterator[None]:
    """Draw on stdout if stderr, which Textual uses, is not a terminal."""
    before = sys.__stderr__
    drawn_on = before if before is not None and before.isatty() else sys.__stdout__
    if drawn_on is not None:
        sys.__stderr__ = _Fragile(drawn_on)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]


class _Fragile:
    """A terminal that may be closed while it is written to: errors are ignored.

    Textual's writer thread exits at the first error, and then its full queue blocks the application forever. This
    can happen before the SIGHUP on which we leave.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Draw."""
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush."""
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class OnlyText(LineFilter):
    """Every line of every widget passes through it: control characters are escaped, and lines keep their width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments with escapes for control characters and invisible marks."""
        if all(segment.text.isprintable() for segment in segments):
            return segments
        safe = [segment._replace(text=clean(segment.text)) for segment in segments]
        return Segment.adjust_line_length(safe, Segment.get_line_length(segments))


LONGEST_NOTICE: Final = 200
# These terminals print an unknown title sequence as text.
_WITHOUT_TITLE: Final = ("linux", "vt", "dumb")


def title_sequence(title: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the sequence that sets the terminal's title, "" where there is none."""
    return "" if env.get("TERM", "").startswith(_WITHOUT_TITLE) else f"{_ESC}]2;{clean(title)}\a"


def keep_title_sequence(*, back: bool = False) -> str:
    """Return the sequence that keeps the terminal's title for later, or brings the kept one back."""
    return "" if os.environ.get("TERM", "").startswith(_WITHOUT_TITLE) else f"{_ESC}[{23 if back else 22};2t"


def notice_sequence(title: str, text: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the sequence that shows a desktop notification, OSC 9; "" where the terminal, or tmux, has none."""
    if env.get("TERM", "").startswith(_WITHOUT_TITLE) or env.get("TMUX"):
        return ""
    return f"{_ESC}]9;{clean(title)}: {clean(text)[:LONGEST_NOTICE]}\a"


def save_copy(text: str) -> Path:
    """Write a text to a file, for terminals without OSC 52; raises OSError."""
    path = state_dir() / "copied.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return path
