"""Hosts for the tests of sessions and verbs: this machine several times, one home each, with real agents.

In: a directory. Out: an inventory; the agents are ended with the block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from supervisor.inventory import Host, Inventory, JobDefaults
from tests import watch
from tests.cluster.prepared import prepared

WAIT_S = 60.0
# Prints lines of its own length and content, then what the test asks for.
TALK = """
import os, sys, time
rank = os.environ["RANK"]
count = int(sys.argv[1])
pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
if "NCCL_DEBUG_FILE" in os.environ:
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        print("h:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.8", file=file)
        print(f"h:1:1 [0] NCCL INFO comm 0 rank {rank} nRanks 2", file=file)
for number in range(count):
    print(f"rank {rank} line {number} " + "x" * (number % 50), flush=pause > 0)
    if pause:
        time.sleep(pause)
print(f"rank {rank} error line", file=sys.stderr)
sys.stdout.write(f"rank {rank} half line")
sys.stdout.flush()
if len(sys.argv) > 3 and sys.argv[3] == rank:
    raise ValueError(f"rank {rank} gives up")
"""


class Hosts:
    """`count` hosts n1, n2 … on this machine, which have the agent already."""

    def __init__(self, root: Path, count: int, **job: Any) -> None:
        self.root = root
        self.work = root / "work"
        self.work.mkdir()
        (self.work / "talk.py").write_text(TALK)
        for number in range(1, count + 1):
            shutil.copytree(prepared(), self.root / f"n{number}")
        self.hosts = tuple(
            Host(
                name=f"n{number}",
                ssh="localhost",
                address="127.0.0.1",
                python=sys.executable,
                nproc_per_node="1",
                local=True,
                env={"SUPERVISOR_HOME": str(root / f"n{number}"), **watch.variables(os.environ.get("PYTHONPATH", ""))},
            )
            for number in range(1, count + 1)
        )
        defaults = {"min_nodes": count, "max_nodes": count, "max_restarts": 2, "stop_grace": 2.0, "node_timeout": 5.0}
        self.job = JobDefaults(workdir=self.work, **{**defaults, **job})

    def inventory(self, **changes: Any) -> Inventory:
        """Return the inventory; `changes`: by host name, fields of that host to be replaced."""
        hosts = tuple(dataclasses.replace(host, **changes.get(host.name, {})) for host in self.hosts)
        return Inventory(self.root / "hosts.toml", hosts, self.job)

    def copy_work(self, name: str) -> Inventory:
        """Return the inventory with a copy of the work tree, in a directory of that name."""
        work = self.root / name / "src"
        shutil.copytree(self.work, work)
        return dataclasses.replace(self.inventory(), job=dataclasses.replace(self.job, workdir=work))

    def home(self, name: str) -> Path:
        """Return a host's home of ours."""
        return self.root / name

    def agents(self) -> dict[str, int]:
        """Return the live agents: `node/job` and pid."""
        found = {}
        for lock in sorted(self.root.glob("n*/jobs/*/agent.pid")):
            text = lock.read_text().split()
            if text and _alive(int(text[0]), lock.parent.name):
                found[f"{lock.parents[2].name}/{lock.parent.name}"] = int(text[0])
        return found

    def end(self) -> None:
        """End every agent, and wait until it is gone."""
        end = time.monotonic() + WAIT_S
        number = signal.SIGTERM
        while agents := self.agents():
            for pid in agents.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            # Not our children: nothing tells us when they are gone.
            time.sleep(0.1)
            if time.monotonic() > end - WAIT_S + 5.0:
                number = signal.SIGKILL
            assert time.monotonic() < end, agents


def _alive(pid: int, job: str) -> bool:
    try:
        return job.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def hosts(root: Path, count: int, **job: Any) -> Iterator[Hosts]:
    """Make hosts; whatever the block leaves is ended."""
    made = Hosts(root, count, **job)
    try:
        yield made
    finally:
        made.end()


def test_hosts_have_homes_of_their_own(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as made:
        homes = [host.env["SUPERVISOR_HOME"] for host in made.inventory().hosts]
        assert len(set(homes)) == 2
        assert made.agents() == {}
