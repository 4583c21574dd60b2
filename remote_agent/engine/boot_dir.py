"""The directory that connects a generation's workers to their engine, and the command that starts a worker.

In: a generation's log directory. Out: the bootstrap as a file, a pipe for the workers' messages, paths of their
sockets.
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
from typing import TYPE_CHECKING

from remote_agent.engine.sampler import WAKE
from remote_agent.engine.waiting import ORDER as WAIT_ORDER
from remote_agent.engine.worker import HIDDEN_NAME, IMPORTS, PIPE, SAMPLER, WAITING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remote_agent.engine.order import Order

__all__ = ["IMPORTS", "WAIT_ORDER", "BootDirectory", "add_bootstrap", "command", "waiting_directory"]

# torchrun runs the same code (run_script_path).
RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

# Names of directories begin like this: of a generation, of a waiting process, of either in the system's directory.
_PREFIXES = (".run-", ".wait-", "supervisor-run-")


class BootDirectory:
    """A private directory for one generation; call close() to remove it."""

    def __init__(self, log_dir: Path, sampling: bool = False) -> None:
        """`sampling`: the ranks can be sampled (inspect/phases.py)."""
        self.path = _make(log_dir, _PREFIXES[0], sampling)
        self._rest = b""
        self.requests: dict[tuple[int, str], asyncio.Future[bytes]] = {}
        """The newest request of each kind to each rank's worker server."""
        self.handlers: dict[int, frozenset[str]] = {}
        """The requests that the worker server of a rank can answer."""
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # The pipe is open for writing too, so that it never ends, and workers can see that the engine is alive.
        self.pipe = os.open(self.path / PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def messages(self) -> list[tuple[str, int, int]]:
        """Return the workers' new messages, without waiting: what, rank, ns.

        "main": about to run the script; "init", "group": it called init_process_group, which returned; "over".
        """
        if self.pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                self._rest += os.read(self.pipe, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                what, rank, t_ns = line.split()
                messages.append((what.decode(), int(rank), int(t_ns)))
        return messages

    def socket(self, rank: int) -> str:
        """Return the path of a rank's worker server, short enough for a socket."""
        return f"/proc/self/fd/{self._directory}/{rank}.sock"

    def has_socket(self, rank: int) -> bool:
        """Return whether that rank has a worker server."""
        return (self.path / f"{rank}.sock").exists()

    def note_imports(self) -> None:
        """Have the node's first rank note which modules it runs."""
        (self.path / IMPORTS).touch(mode=0o600)

    def close(self) -> None:
        """Remove the directory; it may be called again."""
        if self.pipe < 0:
            return
        for request in self.requests.values():
            request.cancel()
        os.close(self.pipe)
        os.close(self._directory)
        self.pipe = self._directory = -1
        shutil.rmtree(self.path, ignore_errors=True)


@functools.lru_cache(maxsize=4)
def _compiled(file: str, name: str) -> tuple[bytes, bytes]:
    """Return a file of the engine as source and as this Python's .pyc, which saves each worker 4 ms."""
    source = pkgutil.get_data("remote_agent.engine", file)
    if source is None:
        raise FileNotFoundError(f"remote_agent/engine/{file} is missing from the agent")
    code = marshal.dumps(compile(source, f"{name}.py", "exec", dont_inherit=True))
    # Flag 1 means that the hash of the source makes it valid, and that the source is not checked.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return source, head + code


def waiting_directory(folder: Path) -> Path:
    """Make the private directory of a waiting process below `folder`; the caller removes it. Raises OSError."""
    path = _make(folder, _PREFIXES[1], sampling=False)
    _put(path, "waiting.py", WAITING)
    return path


def _make(folder: Path, prefix: str, sampling: bool) -> Path:
    # Next to the logs, which last as long as the job. The system's directory is for file systems without pipes, and for
    # paths that PYTHONPATH would split.
    if os.pathsep not in str(folder):
        with contextlib.suppress(OSError):
            return _fill(Path(tempfile.mkdtemp(prefix=prefix, dir=folder)), sampling)
    return _fill(Path(tempfile.mkdtemp(prefix=_PREFIXES[2])), sampling)


def _fill(path: Path, sampling: bool) -> Path:
    try:
        os.mkfifo(path / PIPE, 0o600)
        (path / "__pycache__").mkdir()
        _put(path, "worker.py", HIDDEN_NAME)
        if sampling:
            os.mkfifo(path / WAKE, 0o600)
            _put(path, "sampler.py", SAMPLER)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def _put(path: Path, file: str, name: str) -> None:
    source, compiled = _compiled(file, name)
    (path / f"{name}.py").write_bytes(source)
    (path / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc").write_bytes(compiled)


def command(order: Order, boot: Path, env: Mapping[str, str]) -> list[str]:
    """Return the command that starts one worker."""
    if order.kind == "binary":
        return [
            *(sys.executable, "-I", "-S", str(boot / f"{HIDDEN_NAME}.py")),
            *(order.run_id, order.script, *order.args),
        ]
    python = env.get("PYTHON_EXEC") or os.environ.get("PYTHON_EXEC") or sys.executable
    # Python ignores this option; ps shows the job by it.
    module = {"module": ["-m"], "run_path": ["-c", RUN_PATH]}.get(order.kind, [])
    return [python, "-X", f"supervisor={order.run_id}", "-u", *module, order.script, *order.args]


def add_bootstrap(env: dict[str, str], boot: Path) -> None:
    """Put the bootstrap first on a worker's PYTHONPATH; the bootstrap's `hide` removes it again."""
    inherited = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    here = str(boot)
    env["PYTHONPATH"] = here if inherited is None else here + os.pathsep + (inherited or here)


def remove_bootstrap(env: dict[str, str]) -> None:
    """Undo `add_bootstrap`, also where the directory is gone."""
    here, separator, rest = env.get("PYTHONPATH", "").partition(os.pathsep)
    if not os.path.basename(here).startswith(_PREFIXES):
        return
    if separator:
        env["PYTHONPATH"] = "" if rest == here else rest
    else:
        del env["PYTHONPATH"]
