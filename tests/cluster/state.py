"""What clusters there are on this machine, and the removal of those whose owner is gone.

In: the state files of clusters.
Out: their directories; nothing left of abandoned ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from tests.cluster.network import Network, command
from tests.scratch import outer

PREFIX = "supervisor-cluster-"
STATE_FILE = "state.json"


def process_stamp(pid: int) -> str:
    """The start time of a process in clock ticks: with the pid it names a process for good. Empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def directories() -> list[Path]:
    """The directories of all clusters that have a state file, oldest first."""
    return [path for path, _ in _found()]


def by_hand() -> list[Path]:
    """The directories of the clusters that belong to no process: made by `python -m tests.cluster up`."""
    return [path for path, state in _found() if state.get("owner") is None]


def _is_owned(state: dict[str, object]) -> bool:
    owner = state.get("owner")
    return not isinstance(owner, list) or process_stamp(int(owner[0])) == owner[1]


def sweep() -> None:
    """Remove the clusters whose owner ended without removing them; one process at a time does so."""
    if os.geteuid() != 0:
        return
    # The directory itself is what is locked: a lock file would be left over.
    lock = os.open(outer(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path, state in _found():
            if not _is_owned(state):
                Network(str(state["net_id"])).remove()
                remove(path)
    finally:
        os.close(lock)


def remove(directory: Path) -> None:
    """Remove a cluster's directory, after the file systems that are mounted in it; raises ClusterError."""
    mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    for mount in [mount for mount in mounts if mount.startswith(f"{directory}/")]:
        command("umount", mount)
    shutil.rmtree(directory, ignore_errors=True)


def _found() -> list[tuple[Path, dict[str, object]]]:
    found = []
    for path in outer().glob(f"{PREFIX}*/{STATE_FILE}"):
        # Its owner may remove it at this moment.
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path.parent, json.loads(path.read_text())))
    return [(path, state) for _, path, state in sorted(found, key=lambda one: one[0])]
