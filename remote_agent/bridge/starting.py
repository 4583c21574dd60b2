"""Start the agent of a job, detached from the connection that asked for it.

In: the `start` request. Out: the job's directory with its description and keys, and a running agent that accepts;
with `step` the directory alone: then srun brings the agent in a step of its own, which `await_agent` waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from remote_agent.base.files import atomic_write, disk_full, read_json, try_lock
from remote_agent.base.paths import Home, JobFiles, agent_alive
from remote_agent.base.streams import open_unix
from remote_agent.election import authorities
from remote_agent.wire import Args, JobSpec, Problem, SpecError

if TYPE_CHECKING:
    from remote_agent.wire.answers import StartedAgent

# Many agents on one machine, or a machine that swaps: one that has ended is known at once.
START_DEADLINE_S = 45.0
# This is the zipapp or the source tree that contains the package.
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
REAP_S = 2.0
# The agent offers its socket some 100 ms after it starts; nothing announces that moment to another process.
POLL_S = 0.02
LOG_TAIL = 4000
# A script is text; a larger file is compared by its beginning.
SCRIPT_MAX = 4 * 1024 * 1024
_Answer = TypeVar("_Answer", bool, int)


async def start(home: Home, args: Args) -> StartedAgent:
    """Write the job's directory and start its agent; raises Problem."""
    files, node = _check(home, args)
    script = _script_hash(JobSpec.from_json(args["spec"]))
    try:
        files.make()
        lock = await _lock(files)
    except OSError as error:
        raise _refusal(files, error) from error
    try:
        # The last holder of the lock may have started an agent.
        _refuse_second(files, node)
        pid = await _start(files, node, args)
    finally:
        os.close(lock)
    return {"script": script} if pid is None else {"agent_pid": pid, "script": script}


def make_home(files: JobFiles) -> None:
    """Make the root of all files on this node; raises Problem."""
    try:
        files.home.make()
    except OSError as error:
        raise _refusal(files, error) from error


async def _lock(files: JobFiles) -> int:
    """Take the right to start an agent of this job here: keys of two launches must not mix. Raises Problem, OSError."""
    fd = os.open(files.root / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    async def free() -> bool:
        return try_lock(fd)

    try:
        if not await _in_time(free):
            raise Problem("already_running", f"another launch starts job {files.name} here", "choose another --job")
        return fd
    except BaseException:
        os.close(fd)
        raise


async def _start(files: JobFiles, node: str, args: Args) -> int | None:
    """Write the job's directory and start its agent; returns its pid, None where a step is to bring it."""
    try:
        _write(files, node, args)
        if args.get("step"):
            return None
        pid = await _take_kept(files) or await _start_agent(files)
    except OSError as error:
        raise _refusal(files, error) from error
    await _until_accepting(files, pid)
    return pid


async def _take_kept(files: JobFiles) -> int | None:
    """Have the agent of a job that is over take this one over, with what it has loaded; returns its pid, or None."""
    if files.events.exists() or not any(files.home.jobs.glob("*/warm.sock")):
        return None
    # No other launch loads this module.
    from remote_agent.bridge import kept

    return await kept.take(files.home, files, _environment(files))


async def _start_agent(files: JobFiles) -> int:
    process = _spawn(files, "--detach")
    pid = await asyncio.to_thread(_read_pid, process)
    if pid is None:
        raise Problem("start", f"the agent did not start (status {process.returncode}): {_tail(files)}")
    return pid


async def await_agent(home: Home, args: Args) -> StartedAgent:
    """Wait until the agent that a step brings accepts; raises Problem."""
    files = home.job(args.get("job"))
    pid = await _until_begun(files)
    await _until_accepting(files, pid)
    return {"agent_pid": pid}


def start_for_torchrun(files: JobFiles, args: Args, wire: int) -> subprocess.Popen[bytes]:
    """Write the job's directory and start its agent as a child that has the other end of a wire; raises Problem."""
    node = str(args["node"])
    _refuse_second(files, node)
    try:
        _write(files, node, args)
        return _spawn(files, "--handler", str(wire), wire=wire)
    except OSError as error:
        raise _refusal(files, error) from error


def _script_hash(spec: JobSpec) -> str | None:
    if spec.tree is not None:
        return None
    try:
        with open(os.path.join(spec.workdir, spec.script), "rb") as file:
            return hashlib.sha256(file.read(SCRIPT_MAX)).hexdigest()[:12]
    except OSError:
        # It is a module's name, or the file is missing; the workers report that.
        return None


def command() -> list[str]:
    """Return how this very agent is run again: from the zipapp, or from a source tree."""
    return [sys.executable, _ROOT] if os.path.isfile(_ROOT) else [sys.executable, "-m", "remote_agent"]


def _check(home: Home, args: Args) -> tuple[JobFiles, str]:
    spec = args.get("spec")
    node = args.get("node")
    if not isinstance(spec, dict) or not isinstance(node, str):
        raise Problem("bad_request", "start needs spec and node")
    try:
        parsed = JobSpec.from_json(spec)
    except SpecError as error:
        raise Problem("bad_request", str(error)) from error
    files = home.job(parsed.job)
    if parsed.tree is not None:
        home.tree(parsed.tree)
    _refuse_second(files, node)
    return files, node


def _refuse_second(files: JobFiles, node: str) -> None:
    there = read_json(files.node)
    here = socket.gethostname()
    other = there.get("node", node) != node
    # Host names can be equal, so on a shared home a second node is recognised by its name in the inventory.
    if there and (other or there.get("hostname", here) != here):
        message = f"{files.root} belongs to node {there.get('node')} on {there.get('hostname')}: the nodes share a home"
        hint = 'give each node a root of its own: env = { SUPERVISOR_HOME = "/local/disk/supervisor" }'
        raise Problem("shared_home", message, hint)
    pid = agent_alive(files)
    if pid is not None:
        raise Problem("already_running", f"job {files.name} already has an agent here (pid {pid})", "attach to it")


def _write(files: JobFiles, node: str, args: Args) -> None:
    files.make()
    if args.get("cert"):
        for name, path in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
            atomic_write(path, str(args[name]).encode())
    elif files.cert.exists() and files.key.exists():
        # A lost agent is started again: it keeps its identity.
        authorities.add(files.ca, str(args.get("ca", "")))
    else:
        raise Problem("no_certificate", f"{files.tls} has no certificate of this node", "remove it and add it again")
    atomic_write(files.spec, json.dumps(args["spec"]).encode())
    atomic_write(files.node, json.dumps({"node": node, "hostname": socket.gethostname()}).encode())


def _environment(files: JobFiles) -> dict[str, str]:
    """Return an agent's variables."""
    # SUPERVISOR_HOME may be relative to this directory, and the agent runs elsewhere.
    env = {**os.environ, "SUPERVISOR_HOME": str(files.home.root)}
    if command()[1] == "-m":
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, env.get("PYTHONPATH"))))
    return env


def _spawn(files: JobFiles, *options: str, wire: int | None = None) -> subprocess.Popen[bytes]:
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [*command(), "serve", "--job", files.name, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if wire is None else log,
            stderr=log,
            cwd=files.home.root,
            env=_environment(files),
            start_new_session=True,
            pass_fds=() if wire is None else (wire,),
        )
    finally:
        os.close(log)


def _read_pid(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for the first child, which prints the agent's pid and is gone; raises Problem."""
    try:
        out, _ = process.communicate(timeout=START_DEADLINE_S)
    except subprocess.TimeoutExpired as late:
        # The process leads a session of its own, so the processes that it forked are killed too.
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=REAP_S)
        message = f"{sys.executable} did not start the agent within {START_DEADLINE_S:.0f} s"
        hint = "is a file system of this node slow, or hanging?"
        raise Problem("start", message, hint) from late
    text = out.split()
    # Output of Python's own start files may precede it.
    return int(text[-1]) if process.returncode == 0 and text else None


async def _until_begun(files: JobFiles) -> int:
    """Wait until an agent holds the job's lock; returns its pid. Raises Problem."""

    async def begun() -> int:
        return agent_alive(files) or 0

    pid = await _in_time(begun)
    if not pid:
        message = f"Slurm did not start the agent's step within {START_DEADLINE_S:.0f} s"
        raise Problem("start", message, "does the step wait for resources? see squeue --steps")
    return pid


async def _until_accepting(files: JobFiles, pid: int) -> None:
    """Wait until an agent accepts; kill it if it does not. Raises Problem."""

    async def accepts() -> bool:
        with contextlib.suppress(OSError):
            _reader, writer = await open_unix(files.sock)
            writer.close()
            return True
        if not os.path.exists(f"/proc/{pid}"):
            raise Problem("start", f"the agent ended while it started: {_tail(files)}")
        return False

    if not await _in_time(accepts):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        message = f"the agent (pid {pid}) accepted no connection within {START_DEADLINE_S:.0f} s: {_tail(files)}"
        raise Problem("start", message)


async def _in_time(look: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Look until the answer is true, or the time to start is over; returns the last answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + START_DEADLINE_S
    while True:
        # The time is taken before the check: a machine that was suspended has had no time to check.
        late = loop.time() >= end
        answer = await look()
        if answer or late:
            return answer
        await asyncio.sleep(POLL_S)


def _tail(files: JobFiles) -> str:
    try:
        with open(files.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or f"{files.log} is empty"


def _refusal(files: JobFiles, error: OSError) -> Problem:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(files.root, 1024 * 1024)
    return Problem(
        "home_not_writable",
        f"{error.filename or files.root}: {error.strerror}",
        "set SUPERVISOR_HOME through env to a directory you may write",
    )
