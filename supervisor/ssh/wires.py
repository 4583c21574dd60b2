"""The streams of the command on a node: of an SSH session, or of a process on this machine.

In: an SSH connection, or the arguments of a command. Out: reader and writer for Channel, the end of stderr, the exit
status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Protocol, cast

from supervisor.ssh.dial import hang_up
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STDERR_KEPT = 8 * 1024
STDERR_CHUNK = 4096
STREAM_LIMIT = 1024 * 1024
CLOSE_DEADLINE_S = 2.0
OPEN_DEADLINE_S = 20.0


class Wire(Protocol):
    """One command on a node."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stderr: bytearray
    """The end of its stderr."""

    async def wait_exit(self) -> int | None:
        """Return the exit code, None when there is none, negative for a signal."""

    async def close(self) -> None:
        """End the command and free its connection."""


async def _collect(read: Callable[[int], Any], kept: bytearray) -> None:
    """Read a stream to its end and keep the last bytes."""
    with contextlib.suppress(ConnectionError, asyncssh.Error, OSError):
        while chunk := await read(STDERR_CHUNK):
            kept.extend(chunk)
            del kept[:-STDERR_KEPT]


async def end_process(
    process: asyncio.subprocess.Process, force: Sequence[signal.Signals], patience_s: float = CLOSE_DEADLINE_S
) -> None:
    """Wait until a process has ended; send its group one signal after the other until it has.

    `patience_s`: the time until the first signal.
    """
    for number in force:
        try:
            await asyncio.wait_for(process.wait(), patience_s)
            return
        except asyncio.TimeoutError:
            patience_s = CLOSE_DEADLINE_S
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    await process.wait()


def end_at_once(process: asyncio.subprocess.Process) -> None:
    """Kill a process and close its pipes; they would close in a later turn of the loop, which may not happen."""
    # There is no public way.
    process._transport.close()  # type: ignore[attr-defined]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _SshReader:
    """asyncssh's reader, raising asyncio's exceptions."""

    def __init__(self, reader: asyncssh.SSHReader[bytes]) -> None:
        self._reader = reader

    async def read(self, count: int = -1) -> bytes:
        """Return up to that many bytes; raises ConnectionError."""
        try:
            return await self._reader.read(count)
        except asyncssh.Error as error:
            raise ConnectionResetError(str(error)) from error

    async def readexactly(self, count: int) -> bytes:
        """Return that many bytes; raises IncompleteReadError, ConnectionError."""
        if count == 0:
            return b""
        try:
            return await self._reader.readexactly(count)
        except asyncssh.Error as error:
            raise ConnectionResetError(str(error)) from error


class _SshWriter:
    """asyncssh's writer, raising asyncio's exceptions."""

    def __init__(self, writer: asyncssh.SSHWriter[bytes]) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        """Queue bytes; raises OSError."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the queue is short; raises ConnectionError."""
        try:
            await self._writer.drain()
        except asyncssh.Error as error:
            raise ConnectionResetError(str(error)) from error

    def close(self) -> None:
        """End the session."""
        self._writer.close()

    async def wait_closed(self) -> None:
        """Wait until the session has ended."""
        with contextlib.suppress(asyncssh.Error):
            await self._writer.wait_closed()


class SshWire:
    """The command in an SSH session of asyncssh."""

    def __init__(
        self,
        connection: asyncssh.SSHClientConnection,
        passing: asyncio.subprocess.Process | None,
        process: asyncssh.SSHClientProcess[bytes],
    ) -> None:
        self._connection = connection
        self._passing = passing
        self._process = process
        self.reader = cast("asyncio.StreamReader", _SshReader(process.stdout))
        self.writer = cast("asyncio.StreamWriter", _SshWriter(process.stdin))
        self.stderr = bytearray()
        self._collecting = asyncio.ensure_future(_collect(process.stderr.read, self.stderr))

    @classmethod
    async def open(
        cls, connection: asyncssh.SSHClientConnection, passing: asyncio.subprocess.Process | None, command: str
    ) -> SshWire:
        """Run a command; raises asyncssh.Error, OSError, asyncio.TimeoutError.

        `passing`: the process that passes the connection on through a jump host, ended with it.
        """
        opening = connection.create_process(command, encoding=None, request_pty=False)
        return cls(connection, passing, await asyncio.wait_for(opening, OPEN_DEADLINE_S))

    async def run_on(self, terminal: Terminal, command: str) -> None:
        """Run a command on a terminal until it ends, over this connection; raises asyncssh.Error, OSError."""
        opening = self._connection.create_process(
            command, encoding=None, request_pty="force", term_type=terminal.kind, term_size=terminal.size
        )
        program = RemoteProgram(await asyncio.wait_for(opening, OPEN_DEADLINE_S))
        try:
            await terminal.connect(program)
        finally:
            program.close()

    async def open_port(self, port: int) -> tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
        """Connect to a port of the node, over this connection; raises asyncssh.Error, OSError, asyncio.TimeoutError."""
        opening = self._connection.open_connection("localhost", port)
        return await asyncio.wait_for(opening, OPEN_DEADLINE_S)

    async def wait_exit(self) -> int | None:
        await self._process.wait_closed()
        # Its last output may still be on its way.
        await asyncio.wait([self._collecting], timeout=CLOSE_DEADLINE_S)
        return self._process.returncode

    async def close(self) -> None:
        """End the session and the connection."""
        self._process.close()
        await hang_up(self._connection)
        if self._passing is not None:
            await end_process(self._passing, (signal.SIGKILL,))
        await _end(self._collecting)


class Terminal(Protocol):
    """The operator's terminal, while a program has it instead of the screen."""

    kind: str
    """The type of the terminal, as in TERM."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""

    async def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run a program of this machine on it until it ends; raises OSError."""

    async def connect(self, program: RemoteProgram) -> None:
        """Pass bytes between it and a program on a node until that ends."""


class RemoteProgram:
    """A program on a terminal of a node, in an SSH session of its own."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self._process = process

    async def read(self) -> bytes:
        """Return what it prints; empty at its end, or when the connection is lost."""
        try:
            return await self._process.stdout.read(STREAM_LIMIT)
        except (asyncssh.Error, OSError):
            return b""

    def write(self, data: bytes) -> None:
        """Send what is typed."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)

    def resize(self, columns: int, lines: int) -> None:
        """Report another size of the operator's terminal."""
        with contextlib.suppress(OSError):
            self._process.change_terminal_size(columns, lines)

    def close(self) -> None:
        """End it, as a terminal that is closed does."""
        self._process.close()


class LocalWire:
    """The command as a process on this machine."""

    force: tuple[signal.Signals, ...] = (signal.SIGKILL,)
    """The signals that end it if the end of its input does not, in order."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process needs pipes")
        self._process = process
        self.reader = process.stdout
        self.writer = process.stdin
        self.stderr = bytearray()
        self._collecting = asyncio.ensure_future(_collect(process.stderr.read, self.stderr))

    @staticmethod
    async def run(words: Sequence[str], env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        """Start a command with pipes; raises OSError."""
        # The command has a session of its own: the supervisor handles Ctrl-C in the terminal.
        return await asyncio.create_subprocess_exec(
            *words,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=STREAM_LIMIT,
            start_new_session=True,
        )

    async def wait_exit(self) -> int | None:
        """Return the exit code, negative for a signal."""
        status = await self._process.wait()
        await asyncio.wait([self._collecting], timeout=CLOSE_DEADLINE_S)
        return status

    async def close(self) -> None:
        """Close stdin, which ends the bridge; kill the process if it does not end."""
        # asyncio reports the end of a process only once its pipes have been read to their end.
        reading = asyncio.ensure_future(_collect(self.reader.read, bytearray()))
        try:
            self.writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self.writer.wait_closed(), CLOSE_DEADLINE_S)
            await end_process(self._process, self.force)
            await asyncio.wait([reading, self._collecting], timeout=CLOSE_DEADLINE_S)
            await _end(reading)
            await _end(self._collecting)
        except asyncio.CancelledError:
            # The wait was cancelled again, so the process is killed at once.
            await end_process(self._process, self.force, patience_s=0.0)
            raise
        finally:
            end_at_once(self._process)
