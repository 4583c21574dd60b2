"""The directory through which a generation's workers reach their engine, and the command that starts one.

In: a generation's log directory. Out: the bootstrap as a file, a pipe for the workers' word, paths of their sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import marshal
import os
import pkgutil
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from remote_agent.worker import HIDDEN_NAME, WORD

# What torchrun's run_script_path does.
RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


class Word(NamedTuple):
    """One worker is about to run the script (main), or has run it (over)."""

    what: str
    rank: int
    t_ns: int


class BootDirectory:
    """A private directory, made for one generation and removed after it; close() when done."""

    def __init__(self, log_dir: Path) -> None:
        self.path = _make(log_dir)
        self._rest = b""
        self.requests: dict[tuple[int, str], asyncio.Future[bytes]] = {}
        """The newest request of a kind to each rank's worker server."""
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Open for writing too: so it never ends, and a worker can tell that its engine lives.
        self.pipe = os.open(self.path / WORD, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def words(self) -> list[Word]:
        """Return what workers said since the last time, without waiting."""
        if self.pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                self._rest += os.read(self.pipe, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        words = []
        for line in lines:
            with contextlib.suppress(ValueError):
                what, rank, t_ns = line.split()
                words.append(Word(what.decode(), int(rank), int(t_ns)))
        return words

    def socket(self, rank: int) -> str:
        """Return a path, short enough for a socket, of that rank's worker server."""
        return f"/proc/self/fd/{self._directory}/{rank}.sock"

    def has_socket(self, rank: int) -> bool:
        """Tell whether that rank has a worker server."""
        return (self.path / f"{rank}.sock").exists()

    def close(self) -> None:
        """Remove the directory; calling it again does nothing."""
        if self.pipe < 0:
            return
        for request in self.requests.values():
            request.cancel()
        os.close(self.pipe)
        os.close(self._directory)
        self.pipe = self._directory = -1
        shutil.rmtree(self.path, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _bootstrap() -> tuple[bytes, bytes]:
    """Return the bootstrap as source, and as the .pyc of this Python: compiling it would take every worker 4 ms."""
    source = pkgutil.get_data("remote_agent", "worker.py")
    if source is None:
        raise FileNotFoundError("remote_agent/worker.py is missing from the agent")
    code = marshal.dumps(compile(source, f"{HIDDEN_NAME}.py", "exec", dont_inherit=True))
    # Flag 1: found by the hash of the source, which is not checked again.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return source, head + code


def _make(log_dir: Path) -> Path:
    # Beside the logs, which last as long as the job; a file system without pipes leaves the system's own place, and so
    # does a path that PYTHONPATH would take for two.
    if os.pathsep not in str(log_dir):
        with contextlib.suppress(OSError):
            return _fill(Path(tempfile.mkdtemp(prefix=".run-", dir=log_dir)))
    return _fill(Path(tempfile.mkdtemp(prefix="supervisor-run-")))


def _fill(path: Path) -> Path:
    source, compiled = _bootstrap()
    try:
        os.mkfifo(path / WORD, 0o600)
        (path / f"{HIDDEN_NAME}.py").write_bytes(source)
        (path / "__pycache__").mkdir()
        (path / "__pycache__" / f"{HIDDEN_NAME}.{sys.implementation.cache_tag}.pyc").write_bytes(compiled)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def command(job: str, kind: str, boot: Path, env: dict[str, str], words: list[str]) -> list[str]:
    """Return the command that starts one worker: words are the script (module, program) and its arguments."""
    if kind == "binary":
        return [sys.executable, "-I", "-S", str(boot / f"{HIDDEN_NAME}.py"), job, *words]
    python = env.get("PYTHON_EXEC") or os.environ.get("PYTHON_EXEC") or sys.executable
    # The option means nothing to Python: it shows the job to ps.
    module = {"module": ["-m"], "run_path": ["-c", RUN_PATH]}.get(kind, [])
    return [python, "-X", f"supervisor={job}", "-u", *module, *words]


def add_bootstrap(env: dict[str, str], boot: Path) -> None:
    """Put the bootstrap first on the PYTHONPATH of a worker; its `hide` takes it off again."""
    given = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    here = str(boot)
    env["PYTHONPATH"] = here if given is None else here + os.pathsep + (given or here)
