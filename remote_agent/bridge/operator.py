"""The operator at the other end of a connection, as this node greets and answers it.

In: two descriptors. Out: its requests as frames; our answers.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from remote_agent import __version__
from remote_agent.base.files import disk_free, free_bytes
from remote_agent.wire import MAGIC, PROTOCOL, Frame, Problem, encode, receive

if TYPE_CHECKING:
    from remote_agent.base.paths import Home
    from remote_agent.wire.answers import HostFacts


class Operator:
    """Requests and answers, one after the other; nothing is read before it is asked for."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink

    def greet(self) -> None:
        """Say that frames follow; raises OSError."""
        self.write(MAGIC)

    def next(self) -> Frame | None:
        """Wait for the next request; None: the operator has left. Raises WireError, OSError."""
        return receive(self.source)

    def answer(self, request: Frame, data: Mapping[str, object]) -> None:
        """Send the answer to a request; raises OSError."""
        self.write(encode({"re": request.header.get("id"), "ok": data}))

    def refuse(self, request: Frame, problem: Problem) -> None:
        """Send the reason why a request has no answer; raises OSError."""
        error = {"kind": problem.kind, "message": problem.message, "hint": problem.hint}
        self.write(encode({"re": request.header.get("id"), "error": error}))

    def write(self, data: bytes) -> None:
        """Write all of it; raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.sink, rest) :]


def hello(home: Home) -> HostFacts:
    """Return what this node says about itself; raises Problem."""
    try:
        home.make()
        free = free_bytes(home.root)
    except OSError as error:
        hint = "set SUPERVISOR_HOME through env to a directory you may write"
        raise Problem("home_not_writable", f"{error.filename}: {error.strerror}", hint) from error
    here = os.uname()
    return {
        "protocol": PROTOCOL,
        "version": __version__,
        "hostname": socket.gethostname(),
        "user": _user(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "home": str(home.root),
        "cpu_count": len(os.sched_getaffinity(0)),
        "disk_free": free,
        "shm_free": disk_free("/dev/shm"),
        "time_ns": time.time_ns(),
        "pid": os.getpid(),
        "platform": f"{here.sysname} {here.machine}",
        "uv": any(os.access(os.path.join(folder, "uv"), os.X_OK) for folder in os.get_exec_path()),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
