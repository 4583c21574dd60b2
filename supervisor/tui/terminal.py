"""The terminal that a screen is drawn on: which file it is, who else gets it, and what happens when it goes away.

In: what leaves the screen, a command. Out: that called where a signal asks for it; the command's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import locale
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from textual.app import App


def pager(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command of the user's pager; raises LookupError that says what to do where there is none."""
    try:
        command = shlex.split(environment.get("PAGER", "")) or ["less", "-R"]
    except ValueError as error:
        raise LookupError(f"PAGER: {error}") from error
    if shutil.which(command[0]) is None:
        raise LookupError(f"no program {command[0]!r}: set PAGER to one that shows a file")
    return command


async def lend(app: App[Any], command: Sequence[str]) -> None:
    """Let another program have the terminal until it ends; raises OSError, SuspendNotSupported."""
    problem: OSError | asyncio.CancelledError | None = None
    # Work goes on meanwhile, and would be drawn over the program.
    with app.batch_update(), app.suspend():
        # Ctrl-C is the program's, which has it in its default way.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            await _run(command)
        except (OSError, asyncio.CancelledError) as error:
            # The screen comes back first.
            problem = error
        finally:
            signal.signal(signal.SIGINT, before)
    if problem is not None:
        raise problem


async def _run(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def is_utf8() -> bool:
    """Whether it takes more than ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)).lower()
    return encoding.replace("-", "").replace("_", "") == "utf8"


@contextlib.contextmanager
def held(leave: Callable[[], None]) -> Iterator[None]:
    """Draw on it, and leave in order on SIGTERM and when it is closed: the job goes on without a screen."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, leave)
        loop.add_signal_handler(signal.SIGHUP, _hang_up, leave, [fd for fd in (0, 1, 2) if os.isatty(fd)])
    with _drawn_on_terminal():
        yield


def _hang_up(leave: Callable[[], None], closed: Sequence[int]) -> None:
    """Leave without the terminal: reading from it and setting its modes would fail from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in closed:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    leave()


@contextlib.contextmanager
def _drawn_on_terminal() -> Iterator[None]:
    """Textual draws on stderr, which may be a file; stdout is the terminal that the screen was opened for."""
    before = sys.__stderr__
    drawn_on = before if before is not None and before.isatty() else sys.__stdout__
    if drawn_on is not None:
        sys.__stderr__ = _Fragile(drawn_on)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]


class _Fragile:
    """A terminal that may be closed while it is written to: what is drawn on it then is lost.

    Textual's writer thread ends at the first error, and its full queue then blocks all that draws, for ever; that
    may come ahead of the SIGHUP by which we leave.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Draw."""
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Let it be seen."""
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
