"""Output on stdout: tables, JSON, and merged logs at full speed.

In: documents, bytes of lines. Out: bytes on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from remote_agent.text.controls import json_text
from supervisor.cli.colours import coloured_state
from supervisor.errors import SupervisorError
from supervisor.link.tasks import wait_event
from supervisor.standard_streams import (
    as_lines,
    coloured_console,
    is_terminal,
    lines_for,
    out_encoding,
    out_is_terminal,
    write_out,
)
from supervisor.wording.values import table

if TYPE_CHECKING:
    from remote_agent.wire.documents import RequestReply

# Bytes to buffer for a slow reader of stdout before reading from the nodes stops.
BUFFER_LIMIT = 4 * 1024 * 1024


def write_json(document: object) -> None:
    """Print one JSON document on one line; escapes non-ASCII characters if stdout's encoding lacks one."""
    text = json_text(document)
    try:
        text.encode(out_encoding())
    except UnicodeEncodeError:
        text = json.dumps(document)
    write_out(text + "\n")


def write_lines(lines: Sequence[str]) -> None:
    """Print lines."""
    write_out(as_lines(lines))


def write_ranks(job: str, request: str, reply: RequestReply, *, as_json: bool) -> int:
    """Print the outcome of a request by rank; returns the exit code: 1 if a rank refused it."""
    answers = reply["ranks"]
    if as_json:
        write_json({"job": job, "request": request, **reply})
    else:
        write_lines([f"rank {rank}: {one['message']}" for rank, one in answers.items()])
    return 0 if all(one["accepted"] for one in answers.values()) else 1


def is_rich(*, ascii_only: bool = False) -> bool:
    """Return whether stdout is a terminal that can show more than plain text."""
    return not ascii_only and os.environ.get("TERM") != "dumb" and out_is_terminal()


def write_table(rows: list[list[str]], *, rich: bool) -> None:
    """Print a table whose first row is its head."""
    if not rich:
        write_lines(table(rows))
        return
    from rich.table import Table
    from rich.text import Text

    rendered = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        rendered.add_column(name, overflow="fold")
    for row in rows[1:]:
        rendered.add_row(*(Text.from_ansi(coloured_state(cell)) for cell in row))
    coloured_console().print(rendered)


class Writer:
    """Writes workers' lines to a file in its own thread: a slow reader blocks neither the event loop nor Ctrl-C.

    `raw`: as bytes, also on a terminal.
    """

    def __init__(self, file: IO[bytes], *, raw: bool = False) -> None:
        self._file = file
        self.is_terminal = not raw and is_terminal(file)
        """The lines are shown on a terminal, where they keep their colours only."""
        self._filter: Callable[[bytes], bytes] = bytes if raw else lines_for(file)
        self._parts: list[bytes] = []
        self._waiting = 0
        self._change = threading.Condition()
        self._busy_since: float | None = None
        self._ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken = asyncio.Event()
        self.used = False
        """Something has been written."""
        self.broken = False
        """The file takes no more bytes."""
        self.failure = ""
        """The reason, empty if the reader has closed the other end."""
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Queue bytes; never waits."""
        if self.broken:
            return
        self.used = self.used or bool(data)
        if visible := self._filter(data):
            with self._change:
                self._parts.append(visible)
                self._waiting += len(visible)
                self._change.notify()

    def check(self) -> None:
        """Raise BrokenPipeError if the reader has closed, SupervisorError if writing failed."""
        if self.failure:
            raise SupervisorError(self.failure)
        if self.broken:
            raise BrokenPipeError

    @property
    def full(self) -> bool:
        """Whether the buffer is full."""
        return self._waiting > BUFFER_LIMIT

    @property
    def stalled_s(self) -> float:
        """Seconds since the reader last read."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def room(self) -> None:
        """Wait until the reader has read something, at most 0.1 s."""
        self._loop = asyncio.get_running_loop()
        self._taken = asyncio.Event()
        if self.full and not self.broken:
            await wait_event(self._taken, 0.1)

    def close(self, timeout_s: float | None = None) -> bool:
        """Write the queued bytes, then end; returns False if the reader did not read them in time."""
        with self._change:
            self._ending = True
            self._change.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._parts and not self._ending:
                    self._change.wait()
                data = b"".join(self._parts)
                self._parts.clear()
            if not data:
                return
            self._busy_since = time.monotonic()
            try:
                self._write(data)
            except (ConnectionError, ValueError):
                self.broken = True
            except OSError as error:
                self.broken, self.failure = True, f"stdout: {error.strerror}"
            self._busy_since = None
            with self._change:
                self._waiting -= len(data)
                if self.broken:
                    self._parts.clear()
                    self._waiting = 0
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop may be closed already
                    self._loop.call_soon_threadsafe(self._taken.set)
            if self.broken:
                return

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                # A raw file that would block returns None.
                written = self._file.write(rest) or 0
            except BlockingIOError as full:
                written = full.characters_written
            rest = rest[written:]
            if not written:
                self._await_room()
        while True:
            try:
                return self._file.flush()
            except BlockingIOError:
                self._await_room()

    def _await_room(self) -> None:
        """Wait for the reader of a pipe or terminal that is in non-blocking mode."""
        select.select([], [self._file], [])
