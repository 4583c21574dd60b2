"""`connect`: the node's end of one SSH connection.

In: frames on stdin. Out: answers on stdout; after `open`, a plain pipe to the job's agent, or a reader of its files.
The bridge ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import platform
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from remote_agent import __version__
from remote_agent.agent import jobs
from remote_agent.agent.tree_requests import TreeRequests
from remote_agent.base.files import disk_space, free_bytes, open_pipes, open_unix, read_json
from remote_agent.base.paths import Home, JobFiles, agent_alive
from remote_agent.bridge.probe import Probe
from remote_agent.wire import MAGIC, PROTOCOL, Answer, Channel, Frame, Handler, Problem, WireError, encode, read_frame

log = logging.getLogger(__name__)

CHUNK = 256 * 1024
AGENT_DEADLINE_S = 5.0
POLL_S = 0.05
# They may wait for torch for minutes, and change nothing: they end when the operator disconnects.
LONG = frozenset({"facts", "collective_start", "collective_end"})
FLUSH_DEADLINE_S = 10.0


class Bridge:
    """The requests that need no agent."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._trees = TreeRequests(home)
        self._probe = Probe(home)
        self._ops: dict[str, Callable[[dict[str, Any], bytes], Awaitable[dict[str, Any]]]] = {
            "hello": self._hello,
            "jobs": self._jobs,
            **self._trees.ops,
            "start": self._start,
            "await_agent": self._await_agent,
            "clean": self._clean,
            "facts": self._probe.facts,
            "listen": self._probe.listen,
            "reach": self._probe.reach,
            "collective_start": self._probe.collective_start,
            "collective_end": self._probe.collective_end,
        }

    def close(self) -> None:
        """Give back what a half-done sync holds, and end a preflight."""
        self._trees.close()
        self._probe.close()

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer:
        """Answer one request; raises Problem."""
        handler = self._ops.get(op)
        if handler is None:
            raise Problem("unknown_op", f"no such request before open: {op}")
        return Answer(await handler(args, body))

    async def _hello(self, args: dict[str, Any], body: bytes) -> dict[str, Any]:
        try:
            self.home.make()
            disk_free = free_bytes(self.home.root)
        except OSError as error:
            hint = "set SUPERVISOR_HOME through env to a directory you may write"
            raise Problem("home_not_writable", f"{error.filename}: {error.strerror}", hint) from error
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "hostname": socket.gethostname(),
            "user": _user(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "home": str(self.home.root),
            "cpu_count": len(os.sched_getaffinity(0)),
            "disk_free": disk_free,
            "shm_free": disk_space("/dev/shm").get("free"),
            "time_ns": time.time_ns(),
            "pid": os.getpid(),
        }

    async def _jobs(self, args: dict[str, Any], body: bytes) -> dict[str, Any]:
        described = []
        for name in self.home.job_names():
            # A job may be cleaned away while we look.
            with contextlib.suppress(OSError):
                described.append(jobs.describe(self.home.job(name)))
        return {"jobs": described}

    async def _start(self, args: dict[str, Any], body: bytes) -> dict[str, Any]:
        from remote_agent.bridge.starting import start

        try:
            return await start(self.home, args)
        finally:
            # Whoever waits for the tree sees the agent now. A step brings it later.
            if not args.get("step"):
                self._trees.close()

    async def _await_agent(self, args: dict[str, Any], body: bytes) -> dict[str, Any]:
        from remote_agent.bridge.starting import await_agent

        try:
            return await await_agent(self.home, args)
        finally:
            self._trees.close()

    async def _clean(self, args: dict[str, Any], body: bytes) -> dict[str, Any]:
        return await asyncio.to_thread(jobs.clean, self.home, args.get("job"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, home: Home) -> None:
    """Answer requests in order until `open` or the end of the stream."""
    bridge = Bridge(home)
    ahead: asyncio.Future[Frame | None] | None = None
    writer.write(MAGIC)
    try:
        await writer.drain()
        while True:
            frame = await (ahead or read_frame(reader))
            ahead = None
            if frame is None:
                return
            if frame.header.get("op") == "open":
                bridge.close()
                if await _open(frame, reader, writer, home):
                    return
            elif frame.header.get("op") in LONG:
                ahead = asyncio.ensure_future(read_frame(reader))
                await _while_connected(_answer(bridge, frame, writer), ahead)
            elif "op" in frame.header:
                await _answer(bridge, frame, writer)
    except (WireError, ConnectionError) as error:
        log.info("the connection ends: %s", error)
    finally:
        if ahead is not None:
            ahead.cancel()
        bridge.close()


async def _while_connected(answering: Coroutine[Any, Any, None], ahead: asyncio.Future[Frame | None]) -> None:
    """Give the answer up when the input ends (or turns to junk) before it is there."""
    task: asyncio.Future[None] = asyncio.ensure_future(answering)
    either: set[asyncio.Future[Any]] = {task, ahead}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and (ahead.exception() is not None or ahead.result() is None):
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
    finally:
        task.cancel()


async def _answer(bridge: Bridge, frame: Frame, writer: asyncio.StreamWriter) -> None:
    number = frame.header.get("id")
    op = str(frame.header["op"])
    try:
        answer = await bridge.handle(op, frame.header.get("args") or {}, frame.body)
        writer.write(encode({"re": number, "ok": answer.data}, answer.body))
    except Problem as problem:
        writer.write(_error(number, problem))
    except Exception as error:  # the border of one request: it must not end the connection
        log.exception("request %s failed", op)
        writer.write(_error(number, Problem("internal", f"{op}: {type(error).__name__}: {error}")))
    await writer.drain()


def _error(number: object, problem: Problem) -> bytes:
    return encode({"re": number, "error": {"kind": problem.kind, "message": problem.message, "hint": problem.hint}})


async def _open(frame: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, home: Home) -> bool:
    """Become a pipe to a job's agent, or a reader; return False when the request was refused."""
    number = frame.header.get("id")
    try:
        files = home.job((frame.header.get("args") or {}).get("job"))
        if not files.root.is_dir():
            raise Problem("no_such_job", f"no job named {files.name} here", "`supervisor jobs` lists the jobs")
        agent = await _reach(files) if agent_alive(files) is not None else None
        handler = None if agent is not None else _reader(files)
    except Problem as problem:
        writer.write(_error(number, problem))
        await writer.drain()
        return False
    node = read_json(files.node).get("node")
    writer.write(encode({"re": number, "ok": {"live": agent is not None, "node": node}}))
    await writer.drain()
    if agent is not None:
        await _splice(reader, writer, *agent)
    elif handler is not None:
        await Channel(reader, writer, handler).run()
    return True


def _reader(files: JobFiles) -> Handler:
    """Return what answers from the files of a job that has no agent; raises Problem."""
    from remote_agent.agent.file_requests import FileRequests

    try:
        return FileRequests(files).handle
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"the files of job {files.name} cannot be read: {error}"
        raise Problem("broken_job", message, f"supervisor clean removes it; its logs lie in {files.root}") from error


async def _reach(files: JobFiles) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Connect to a live agent, which may be just starting or just ending; None when it has ended meanwhile."""
    deadline = time.monotonic() + AGENT_DEADLINE_S
    while True:
        try:
            return await asyncio.wait_for(open_unix(files.sock), AGENT_DEADLINE_S)
        except (OSError, asyncio.TimeoutError):
            pid = agent_alive(files)
            if pid is None:
                return None
            if time.monotonic() > deadline:
                hint = f"look at {files.log}; kill {pid} ends it and its workers"
                raise Problem("agent_silent", f"the agent of {files.name} (pid {pid}) does not answer", hint) from None
        await asyncio.sleep(POLL_S)


async def _splice(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    agent_reader: asyncio.StreamReader,
    agent_writer: asyncio.StreamWriter,
) -> None:
    """Copy bytes both ways until either side ends."""
    pumps = [
        asyncio.ensure_future(_pump(reader, agent_writer)),
        asyncio.ensure_future(_pump(agent_reader, writer)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        agent_writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(agent_writer.wait_closed(), 1.0)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()


async def _run() -> None:
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    # stdout itself is given to stderr, so that no print can spoil frames.
    os.dup2(2, 1)
    reader, writer = await open_pipes(sys.stdin.buffer, output)
    await serve(reader, writer, Home.from_environment())
    writer.close()
    with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), FLUSH_DEADLINE_S)


def main() -> int:
    """Run the bridge on stdin and stdout; returns the exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s")
    # stdout is a terminal's raw end where srun gives it without delay.
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        log.error("connect speaks frames on pipes: it is started by supervisor, over SSH or srun")
        return 2
    # The end of stdin is what ends a bridge: also while Slurm ends the allocation, and what it starts must hear that.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    asyncio.run(_run())
    return 0
