"""stdout and stderr: the one place that writes to them, whatever a node, a file or a library puts into a text.

In: texts; the bytes of lines that workers printed. Out: both on the streams, so that a terminal acts on nothing in
them: texts without control characters; workers' lines unchanged in a pipe, on a terminal with their colours only.

`safe_streams` puts this in place of `sys.stdout` and `sys.stderr`, so that the help of argparse, log records,
tracebacks and warnings pass through it as well. Only Textual draws past it, on its own screen.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from remote_agent.text.controls import escape_all_but_colours, escape_controls
from supervisor.errors import SupervisorError

if TYPE_CHECKING:
    from rich.console import Console

CLEAR = "\x1b[H\x1b[2J"


class _SafeText:
    """A text stream that changes each text before it is written; everything else is the stream's own."""

    def __init__(self, file: TextIO, change: Callable[[str], str] = escape_controls) -> None:
        self.file = file
        self._change = change

    def write(self, text: str) -> int:
        """Write a text."""
        self.file.write(self._change(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Make every text that is written to stdout and stderr safe for a terminal until the end of the block."""
    _open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are escaped, as on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", _SafeText(_own(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _own(stream: TextIO) -> TextIO:
    """Return the stream itself, without what `safe_streams` put around it."""
    return stream.file if isinstance(stream, _SafeText) else stream


def _open_standard_files() -> None:
    """Open stdin, stdout and stderr if the caller closed them: no other file may get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  it lasts as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


# --- texts


def write_out(text: str) -> None:
    """Write to stdout; raises ConnectionError if nobody reads it, SupervisorError if it cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except ConnectionError:
        raise
    except OSError as error:
        raise SupervisorError(f"stdout: {error.strerror}") from error


def write_err(text: str) -> None:
    """Write to stderr; a closed stderr is not an error."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, UnicodeError):
        pass


def as_lines(lines: Iterable[str]) -> str:
    """Return each text as exactly one line: what a node puts into one must not look like a line of ours."""
    return "".join([line.replace("\n", "\\n") + "\n" for line in lines])


def flush_out() -> None:
    """Flush stdout."""
    sys.stdout.flush()


def out_encoding() -> str:
    """Return the encoding of stdout."""
    return sys.stdout.encoding or "utf-8"


def out_is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return is_terminal(sys.stdout)


def err_is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return is_terminal(sys.stderr)


def is_terminal(file: TextIO | IO[bytes]) -> bool:
    """Return whether a file is a terminal."""
    try:
        return file.isatty()
    except (AttributeError, ValueError):
        return False


# --- what we ourselves draw on a terminal


def clear_screen() -> None:
    """Clear the terminal."""
    _own(sys.stdout).write(CLEAR)


def write_coloured(text: str) -> None:
    """Write our own text to stdout; codes for colours are all that a terminal acts on. Raises as `write_out`."""
    stream = sys.stdout
    sys.stdout = cast("TextIO", _SafeText(_own(stream), escape_all_but_colours))
    try:
        write_out(text)
    finally:
        sys.stdout = stream


def coloured_console() -> Console:
    """Return a console of rich for stdout; the codes for its colours are all that a terminal acts on."""
    from rich.console import Console

    return Console(file=cast("TextIO", _SafeText(_own(sys.stdout), escape_all_but_colours)), markup=False, emoji=False)


def plain_error_console() -> Console:
    """Return a console of rich for stderr, without colours."""
    from rich.console import Console

    return Console(stderr=True, color_system=None, markup=False, highlight=False, emoji=False)


@contextlib.contextmanager
def progress_bar(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr, if it is a terminal, how many of these bytes are done; yields a function for further ones."""
    if not err_is_terminal():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(escape_controls(what), markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=_own(sys.stderr)), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda count: bar.advance(task, count)


# --- questions


def _open_terminal() -> int | None:
    """Return the terminal of this process, None if it has none or is in the background.

    The streams come first: the event loop of macOS cannot wait for /dev/tty, only for the terminal's own name.
    """
    for number in (2, 0, 1, None):
        with contextlib.suppress(OSError):
            path = "/dev/tty" if number is None else os.ttyname(number)
            terminal = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                if os.tcgetpgrp(terminal) == os.getpgrp():
                    return terminal
            except OSError:
                pass
            os.close(terminal)
    return None


def has_terminal() -> bool:
    """Return whether a user can be asked on the terminal of this process."""
    terminal = _open_terminal()
    if terminal is None:
        return False
    os.close(terminal)
    return True


async def ask_on_terminal(text: str, *, visible: bool, answered: bool = True) -> str | None:
    """Print a question on the terminal, and return the line that is typed; None at its end, and without a terminal.

    `visible`: show what is typed. `answered`: False for a text that stays until this is cancelled.
    """
    terminal = _open_terminal()
    if terminal is None:
        return None
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[bytes] = loop.create_future()
    before = termios.tcgetattr(terminal)

    def show() -> None:
        if not visible:
            silent = [*before]
            silent[3] &= ~termios.ECHO
            termios.tcsetattr(terminal, termios.TCSAFLUSH, silent)
        os.write(terminal, escape_controls(text).encode(errors="backslashreplace"))

    def take() -> None:
        if not typed.done():
            typed.set_result(os.read(terminal, io.DEFAULT_BUFFER_SIZE))

    def end(number: int) -> None:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        loop.remove_signal_handler(number)
        os.kill(os.getpid(), number)

    # A shell has changed the terminal when this process continues after Ctrl-Z.
    handled = {signal.SIGCONT: show}
    handled |= {number: partial(end, number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    handled = {number: act for number, act in handled.items() if signal.getsignal(number) is signal.SIG_DFL}
    try:
        for number, act in handled.items():
            loop.add_signal_handler(number, act)
        show()
        if answered:
            loop.add_reader(terminal, take)
        line = await typed
        return line.decode(errors="surrogateescape").rstrip("\r\n") if line else None
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        with contextlib.suppress(OSError):
            os.write(terminal, b"" if visible else b"\n")
        os.close(terminal)


# --- workers' lines


def binary_out() -> IO[bytes]:
    """Return stdout for bytes."""
    return sys.stdout.buffer


def lines_for(file: IO[bytes]) -> Callable[[bytes], bytes]:
    """Return the function through which workers' lines go to a file: on a terminal they keep their colours only."""
    return LinesForTerminal(out_encoding()).feed if is_terminal(file) else bytes


class LinesForTerminal:
    """Bytes of lines as a terminal may print them, in pieces that may end anywhere.

    Colours stay and end with their line, so that no worker colours the lines of another one.
    """

    _UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        """A code that may continue in the next piece."""
        self._is_coloured = False

    def feed(self, data: bytes) -> bytes:
        """Return the next piece, without a code at its end that is not complete."""
        text = self._held + self._decoder.decode(data)
        unfinished = self._UNFINISHED.search(text)
        self._held = unfinished.group() if unfinished is not None else ""
        *lines, rest = escape_all_but_colours(text[: len(text) - len(self._held)]).split("\n")
        visible = "".join([self._ended(line) for line in lines]) + rest
        self._is_coloured = self._is_coloured or "\x1b" in rest
        return visible.encode(self._encoding, "backslashreplace")

    def _ended(self, line: str) -> str:
        is_coloured = self._is_coloured or "\x1b" in line
        self._is_coloured = False
        return f"{line}\x1b[m\n" if is_coloured else f"{line}\n"
