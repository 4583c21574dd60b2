"""Commands that are forked from a process in which their modules are loaded: that takes half a second of a processor
each time, two with torch.

In: a module with a `main`; the words of a command line and its surroundings. Out: a process as subprocess has them.
Nothing else differs from `python -m MODULE`: its own session, environment, directory, input and output, and the
interpreter's own end; the import alone is shared. Not for a terminal, nor for another PYTHONPATH of the command itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

# A message asks for a process, with its three streams, or for the status of one that has ended; the answer is a number.
# What is forked leaves the loop and ends as Python itself ends.
_SERVER = """
import gc, importlib, io, json, os, socket, sys, threading, time

control = socket.socket(fileno=int(sys.argv[1]))
main, *_ = map(importlib.import_module, sys.argv[2:])
called = main.__name__
if hasattr(main, "__path__"):
    main = importlib.import_module(f"{called}.__main__")
assert threading.active_count() == 1, "a process with threads cannot be forked"
# No collection of a child touches, and so copies, what it shares with the others.
gc.freeze()
while True:
    message, streams, _, _ = socket.recv_fds(control, 1 << 20, 3)
    if not message:
        sys.exit()
    asked = json.loads(message)
    if isinstance(asked, int):
        answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
    else:
        answer = os.fork()
        if not answer:
            break
        for stream in streams:
            os.close(stream)
    control.send(json.dumps(answer).encode())

control.close()
os.setsid()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
# As at Python's start: a stream that is not made anew takes a pipe for the file that was there.
for number, name in enumerate(("stdin", "stdout", "stderr")):
    like = getattr(sys, name)
    raw = open(number, f"{like.mode}b", 0 if number and like.write_through else -1, closefd=False)
    stream = io.TextIOWrapper(raw, like.encoding, like.errors, "\\n", like.line_buffering, like.write_through)
    stream.mode = like.mode
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
words, directory, environment = asked
os.chdir(directory)
os.environ.clear()
os.environ.update(environment)
time.tzset()
sys.argv = [main.__file__, *words]
sys.orig_argv = [sys.executable, "-m", called, *words]
sys.path[0] = directory
sys.exit(main.main())
"""


class Process(Protocol):
    """As much of subprocess.Popen as is used."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Program:
    """`python -m MODULE`: each process a new interpreter."""

    def __init__(self, module: str) -> None:
        self.module = module

    def start(
        self,
        words: Sequence[str],
        directory: Path,
        *,
        out: IO[bytes],
        err: IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start one in a session of its own, with an empty input; `environment` is all that it has, else ours."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *words],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def run(
        self,
        words: Sequence[str],
        directory: Path,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one to its end, and to that of its output; raises subprocess.TimeoutExpired after that many seconds."""
        with self.piped(words, directory, environment=environment) as (process, *streams):
            written = dict.fromkeys(streams, b"")
            end, open_ones = time.monotonic() + timeout, set(streams)
            while open_ones:
                ready = select.select(open_ones, [], [], max(0.0, end - time.monotonic()))[0]
                if not ready:
                    raise subprocess.TimeoutExpired(list(words), timeout, *written.values())
                for stream in ready:
                    some = os.read(stream.fileno(), 1 << 16)
                    written[stream] += some
                    open_ones -= set() if some else {stream}
            status = process.wait(max(0.0, end - time.monotonic()))
        return subprocess.CompletedProcess(list(words), status, *written.values())

    @contextlib.contextmanager
    def piped(
        self, words: Sequence[str], directory: Path, *, environment: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Process, IO[bytes], IO[bytes]]]:
        """A process and the pipes of its output and its errors; it is killed at the end, unless it has ended."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with os.fdopen(out, "rb") as output, os.fdopen(err, "rb") as errors:
            with os.fdopen(out_end, "wb") as written, os.fdopen(err_end, "wb") as complained:
                process = self.start(words, directory, out=written, err=complained, environment=environment)
            try:
                yield process, output, errors
            finally:
                process.kill()
                process.wait()


def decoded(done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[str]:
    """Return it with its output as text."""
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Preloaded(Program):
    """The same, forked from a process that is started by the first of them."""

    def __init__(self, module: str, *more: str) -> None:
        super().__init__(module)
        self._loaded = (module, *more)
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(
        self,
        words: Sequence[str],
        directory: Path,
        *,
        out: IO[bytes],
        err: IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Start one as `Program` does."""
        question = (list(words), str(directory), dict(os.environ if environment is None else environment))
        with open(os.devnull, "rb") as nothing:
            return Forked(self, self._ask(question, nothing.fileno(), out.fileno(), err.fileno()))

    def status(self, pid: int) -> int:
        """Return the exit code of one, negative for a signal; once, and waits for it."""
        return self._ask(pid)

    def close(self) -> None:
        """End the process that forks; who started a command ends it."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.wait()

    def _ask(self, question: Any, *streams: int) -> int:
        control = self._control or self._begin()
        socket.send_fds(control, [json.dumps(question).encode()], streams)
        answer: int = json.loads(control.recv(64))
        return answer

    def _begin(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(descriptor), *self._loaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        return self._control


class Forked:
    """One of them. Until its exit code has been asked for it stays a zombie, so its pid is nobody else's."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self._server = server
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._look(0.0) is None:
            os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        """Return the exit code, if it ends within that many seconds."""
        if self._status is None:
            end = os.pidfd_open(self.pid)
            try:
                if select.select([end], [], [], timeout)[0]:
                    self._status = self._server.status(self.pid)
            finally:
                os.close(end)
        return self._status
