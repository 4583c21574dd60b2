"""torchruns that are forked from a process in which torch is loaded, which takes two seconds of a processor each time.

In: the words of a command line and its surroundings. Out: a process as subprocess has them. Nothing else differs
from `python -m torch.distributed.run`: its own session, environment, directory and output; the import alone is shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A line asks for a process, or whether one has ended. An answer is a line: its pid; its status, or null.
_SERVER = """
import json, os, sys, traceback
from torch.distributed import run

def become(words, directory, environment, out):
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(out, os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((nothing, written, written)):
        os.dup2(file, number)
    sys.argv = ["torchrun", *words]
    status = 1
    try:
        run.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

ended = {}
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        if asked not in ended:
            pid, status = os.waitpid(asked, os.WNOHANG)
            if pid:
                ended[pid] = os.waitstatus_to_exitcode(status)
        answer = ended.get(asked)
    else:
        answer = os.fork() or become(*asked)
    print(json.dumps(answer), flush=True)
"""
POLL_S = 0.02


class Preloaded:
    """The process that forks them."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def start(self, words: list[str], directory: Path, environment: Mapping[str, str], out: Path) -> Torchrun:
        """Start `torchrun WORDS …`; what it prints is appended to that file, which is there at once."""
        out.touch()
        return Torchrun(self, self._ask([words, str(directory), dict(environment), str(out)]))

    def status(self, pid: int) -> int | None:
        """Return a process' exit code, negative for a signal; None while it runs."""
        found: int | None = self._ask(pid)
        return found

    def _ask(self, question: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


class Torchrun:
    """One of them: as much of subprocess.Popen as is used."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        return self._server.status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextlib.contextmanager
def preloaded() -> Iterator[Preloaded]:
    """Load torch once; who started a torchrun ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield Preloaded(server)
        finally:
            server.terminate()
