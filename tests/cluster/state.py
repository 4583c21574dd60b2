"""What clusters there are on this machine, and the removal of those whose owner is gone.

In: the state files of clusters.
Out: their directories; nothing left of abandoned ones.
"""

from __future__ import annotations

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
    found = [path.parent for path in outer().glob(f"{PREFIX}*/{STATE_FILE}")]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def by_hand() -> list[Path]:
    """The directories of the clusters that belong to no process: made by `python -m tests.cluster up`."""
    return [path for path in directories() if _state(path).get("owner") is None]


def abandoned() -> list[Path]:
    """The directories of the clusters whose owner ended without removing them."""
    found = []
    for path in directories():
        owner = _state(path).get("owner")
        if isinstance(owner, list) and process_stamp(int(owner[0])) != owner[1]:
            found.append(path)
    return found


def sweep() -> list[Path]:
    """Remove the abandoned clusters and return where they were; one process at a time does so."""
    if os.geteuid() != 0:
        return []
    # The directory itself is what is locked: a lock file would be left over.
    lock = os.open(outer(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gone = abandoned()
        for path in gone:
            Network(str(_state(path)["net_id"])).remove()
            remove(path)
    finally:
        os.close(lock)
    return gone


def remove(directory: Path) -> None:
    """Remove a cluster's directory, after the file systems that are mounted in it; raises ClusterError."""
    mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    for mount in [mount for mount in mounts if mount.startswith(f"{directory}/")]:
        command("umount", mount)
    shutil.rmtree(directory, ignore_errors=True)


def _state(directory: Path) -> dict[str, object]:
    state: dict[str, object] = json.loads((directory / STATE_FILE).read_text())
    return state
