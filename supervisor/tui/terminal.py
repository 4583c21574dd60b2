"""The terminal that a screen is drawn on: which file it is, and what happens when it goes away.

In: what leaves the screen. Out: that called where a signal asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import locale
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence


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
    with _drawn_on_stdout():
        yield


def _hang_up(leave: Callable[[], None], closed: Sequence[int]) -> None:
    """Leave without the terminal: what is still written to it would fail, and the driver would wait for its writer."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in closed:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    leave()


@contextlib.contextmanager
def _drawn_on_stdout() -> Iterator[None]:
    """Textual draws on stderr, which may be a file; stdout is the terminal that the screen was opened for."""
    before = sys.__stderr__
    if before is None or not before.isatty():
        sys.__stderr__ = sys.__stdout__  # type: ignore[misc]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]
