"""An operator's shell on this node, as if a rank had started it: its directory, its environment.

In: a job, a rank of it and its pid, a terminal. Out: the user's login shell in place of this process. The variables are
read here and sent nowhere.
"""

from __future__ import annotations

import json
import os
import pty
import pwd
from pathlib import Path

from remote_agent.agent.context import working_directory
from remote_agent.base.paths import Home
from remote_agent.engine.boot_dir import remove_bootstrap
from remote_agent.wire.job_spec import JobSpec

# They name the rank's own files: what runs in the shell must neither write to these, nor be taken for the rank's child.
OF_THE_RANK = ("TORCHELASTIC_ERROR_FILE", "SUPERVISOR_METRICS")
OF_THE_TERMINAL = ("TERM", "COLORTERM")


def main(job: str, rank: int, pid: int) -> int:
    """Become the shell; returns only where none can be started. Raises OSError, ValueError, Problem."""
    files = Home.from_environment().job(job)
    env = rank_environment(pid, rank)
    if env is None:
        env = dict(os.environ)
        directory = working_directory(files, JobSpec.from_json(json.loads(files.spec.read_text())))
        notice = f"rank {rank} has ended: this is its work tree, with the environment of a login"
    else:
        directory = f"/proc/{pid}/cwd"
        env.update({name: os.environ[name] for name in OF_THE_TERMINAL if name in os.environ})
        notice = f"rank {rank} of {job}, process {pid}; exit returns to the screen"
    os.write(1, f"{notice}\n".encode())
    os.chdir(directory)
    env["PWD"] = os.getcwd()
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    os.environ.clear()
    os.environ.update(env)
    if os.isatty(0):
        os.execv(shell, [shell])
    # A server that has given no terminal.
    os.environ.setdefault("TERM", "xterm")
    return os.waitstatus_to_exitcode(pty.spawn([shell]))


def rank_environment(pid: int, rank: int, proc: Path = Path("/proc")) -> dict[str, str] | None:
    """Return the variables of a rank, without ours; None where this is not the rank's process any more."""
    try:
        entries = os.fsdecode((proc / str(pid) / "environ").read_bytes()).split("\0")
    except OSError:
        return None
    # A rank that was started warm has some twice, the right one last.
    env = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if env.get("RANK") != str(rank):
        return None
    for name in OF_THE_RANK:
        env.pop(name, None)
    remove_bootstrap(env)
    return env
