"""An operator's shell on this node, as if a rank had started it: its directory, its environment.

In: a job, a rank of it and its pid, a terminal. Out: the user's login shell in place of this process. The rank's
variables are read here and sent nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import pwd
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.agent.context import working_directory
from remote_agent.base.paths import Home
from remote_agent.engine.boot_dir import remove_bootstrap
from remote_agent.runtime.runtime import Place, entering
from remote_agent.wire.job_spec import JobSpec

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles

# They name the rank's files. A program in the shell must not write to these, nor be taken for the rank's child.
OF_THE_RANK = ("TORCHELASTIC_ERROR_FILE", "SUPERVISOR_METRICS")
OF_THE_TERMINAL = ("TERM", "COLORTERM")


def main(job: str, rank: int, pid: int, inside: bool) -> int:
    """Become the shell; returns only where none can be started. Raises OSError, ValueError, Problem.

    `inside`: this process has been started where the ranks run.
    """
    files = Home.from_environment().job(job)
    env = rank_environment(pid, rank)
    if env is not None and not inside:
        _enter(files)
    if env is None:
        env = dict(os.environ)
        directory = working_directory(files, JobSpec.from_json(json.loads(files.spec.read_text())))
        notice = f"rank {rank} has ended: this is its work tree, with the environment of a login\n"
    else:
        directory = f"/proc/{pid}/cwd"
        env.update({name: os.environ[name] for name in OF_THE_TERMINAL if name in os.environ})
        notice = f"rank {rank} of {job}, process {pid}; exit returns to the screen\n"
    os.write(1, notice.encode())
    os.chdir(directory)
    env["PWD"] = os.getcwd()
    shell = _login_shell()
    os.environ.clear()
    os.environ.update(env)
    if os.isatty(0):
        os.execv(shell, [shell])
    # The SSH server has given no terminal.
    os.environ.setdefault("TERM", "xterm")
    return os.waitstatus_to_exitcode(pty.spawn([shell]))


def _enter(files: JobFiles) -> None:
    """Run this mode where the ranks run, in place of this process; returns where that is here. Raises OSError."""
    spec = JobSpec.from_json(json.loads(files.spec.read_text()))
    node = str(json.loads(files.node.read_text())["node"])
    place = Place.of(spec, node, working_directory(files, spec))
    command = entering(files, place, [*sys.argv[1:], "--inside"])
    if command:
        os.execvp(command[0], command)


def _login_shell() -> str:
    """Return the user's shell; an image may know neither the user nor that shell."""
    with contextlib.suppress(KeyError):
        named = pwd.getpwuid(os.getuid()).pw_shell
        if named and os.access(named, os.X_OK):
            return named
    return "/bin/sh"


def rank_environment(pid: int, rank: int, proc: Path = Path("/proc")) -> dict[str, str] | None:
    """Return the variables of a rank, without ours; None where this is not the rank's process any more."""
    try:
        entries = os.fsdecode((proc / str(pid) / "environ").read_bytes()).split("\0")
    except OSError:
        return None
    env = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if env.get("RANK") != str(rank):
        return None
    for name in OF_THE_RANK:
        env.pop(name, None)
    remove_bootstrap(env)
    return env
