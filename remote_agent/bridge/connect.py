"""`connect`: the node's end of one SSH connection.

In: frames on stdin. Out: answers on stdout; after `open`, a plain pipe to the job's agent, or a reader of its files.
The bridge ends when stdin does.

Each command of an operator starts one on every node, most of them for a greeting and a pipe: what other requests need,
asyncio first of all, is imported with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time

from remote_agent.base.files import connect_unix, read_json
from remote_agent.base.paths import Home, JobFiles, agent_alive
from remote_agent.bridge.operator import Operator, hello
from remote_agent.wire import Frame, Problem, WireError

CHUNK = 256 * 1024
AGENT_DEADLINE_S = 5.0
POLL_S = 0.05


def serve(operator: Operator, home: Home) -> None:
    """Answer requests in order until a job was open or the operator has left; raises WireError, OSError."""
    operator.greet()
    frame = operator.next()
    while frame is not None:
        op = frame.header.get("op")
        if op == "open" and _open(operator, frame, home):
            return
        if op == "hello":
            _greet(operator, frame, home)
        elif op not in (None, "open"):
            frame = _prepare(operator, frame, home)
            continue
        frame = operator.next()


def _greet(operator: Operator, frame: Frame, home: Home) -> None:
    try:
        operator.answer(frame, hello(home))
    except Problem as problem:
        operator.refuse(frame, problem)


def _prepare(operator: Operator, frame: Frame, home: Home) -> Frame | None:
    """Answer what comes before a job is open; returns the request that opens one, None at the end."""
    import asyncio

    from remote_agent.bridge import requests

    return asyncio.run(requests.serve(operator, frame, home))


def _open(operator: Operator, frame: Frame, home: Home) -> bool:
    """Be a pipe to a job's agent, or a reader, to the end; return False when the request was refused."""
    try:
        files = home.job((frame.header.get("args") or {}).get("job"))
        if not files.root.is_dir():
            raise Problem("no_such_job", f"no job named {files.name} here", "`supervisor jobs` lists the jobs")
        agent = _reach(files) if agent_alive(files) is not None else None
    except Problem as problem:
        operator.refuse(frame, problem)
        return False
    if agent is None:
        return _read(operator, frame, files)
    operator.answer(frame, {"live": True, "node": read_json(files.node).get("node")})
    _pipe(operator, agent)
    return True


def _read(operator: Operator, frame: Frame, files: JobFiles) -> bool:
    """Answer from the files of a job that has no agent; return False when they cannot be read."""
    import asyncio

    from remote_agent.agent.file_requests import FileRequests
    from remote_agent.base.streams import open_pipes
    from remote_agent.wire import Channel

    async def serve_files() -> bool:
        try:
            requests = FileRequests(files)
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"the files of job {files.name} cannot be read: {error}"
            hint = f"supervisor clean removes it; its logs are in {files.root}"
            operator.refuse(frame, Problem("broken_job", message, hint))
            return False
        operator.answer(frame, {"live": False, "node": read_json(files.node).get("node")})
        source, sink = (os.fdopen(fd, mode, 0) for fd, mode in ((operator.source, "rb"), (operator.sink, "wb")))
        await Channel(*await open_pipes(source, sink), requests.handle).run()
        return True

    return asyncio.run(serve_files())


def _reach(files: JobFiles) -> socket.socket | None:
    """Connect to a live agent, which may be just starting or just ending; None when it has ended meanwhile."""
    deadline = time.monotonic() + AGENT_DEADLINE_S
    while True:
        try:
            return connect_unix(files.sock, AGENT_DEADLINE_S)
        except OSError:
            pid = agent_alive(files)
            if pid is None:
                return None
            if time.monotonic() > deadline:
                hint = f"look at {files.log}; kill {pid} ends it and its workers"
                raise Problem("agent_silent", f"the agent of {files.name} (pid {pid}) does not answer", hint) from None
        time.sleep(POLL_S)


def _pipe(operator: Operator, agent: socket.socket) -> None:
    """Copy bytes both ways until either side ends."""
    threading.Thread(target=_copy_to, args=(operator, agent), daemon=True).start()
    with contextlib.suppress(OSError):
        while data := os.read(operator.source, CHUNK):
            agent.sendall(data)


def _copy_to(operator: Operator, agent: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := agent.recv(CHUNK):
            operator.write(data)
    # The other thread still waits for the operator, whose agent is gone.
    os._exit(0)


def main() -> int:
    """Run the bridge on stdin and stdout; returns the exit code."""
    # Only stdin is checked: where srun passes output on without delay, stdout is the raw end of a terminal.
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        sys.stderr.write("connect speaks frames on pipes: it is started by supervisor, over SSH or srun\n")
        return 2
    # Only the end of stdin ends a bridge. Its children need Slurm's SIGTERM, and would inherit SIG_IGN, but no handler.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    operator = Operator(0, os.dup(1))
    # stdout itself is given to stderr, so that no print can spoil frames.
    os.dup2(2, 1)
    with contextlib.suppress(WireError, ConnectionError):
        serve(operator, Home.from_environment())
    return 0
