"""A real Slurm on the test hosts: munge, a controller and a slurmd on each.

In: a Cluster. Out: the environment for Slurm's commands; `down` (or the end of the block) ends the daemons.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from tests.cluster.cluster import Cluster

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "sinfo")
UP_S = 60.0
# No cgroups here: the kernel's may not be ours to write. What a step started is found by its parents.
CONF = """
ClusterName=test
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmdParameters=config_overrides
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={root}/prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
KillWait=20
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=2 State=UNKNOWN"
# slurmd wants a cgroup file system to be there, also where it uses none.
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\nConstrainRAMSpace=no\n"
# srun takes HOME along from the node where it is called: right on a cluster that has one home for all nodes.
PROLOG = "#!/bin/sh\necho export HOME=$(getent passwd $(id -u) | cut -d: -f6)\n"
MOUNT = "cd /sys/fs && mount -t tmpfs t cgroup && mkdir cgroup/freezer && mount -t tmpfs t cgroup/freezer"


def slurm_obstacle() -> str:
    """Say why no Slurm can be started here; empty when it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge" if missing else ""


class Slurm:
    """Slurm on all hosts of a cluster; the first one is the controller too."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self._cluster = cluster
        self._root = root
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> Slurm:
        self._configure()
        try:
            self._start()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _configure(self) -> None:
        hosts = self._cluster.hosts
        for folder in ("state", *(f"spool.{host.name}" for host in hosts)):
            (self._root / folder).mkdir(parents=True)
        key = self._root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        text = CONF.format(
            controller=hosts[0].name,
            address=hosts[0].address,
            root=self._root,
            user="root",
            nodes="\n".join(NODE.format(name=host.name, address=host.address) for host in hosts),
            names=",".join(host.name for host in hosts),
        )
        (self._root / "slurm.conf").write_text(text)
        (self._root / "cgroup.conf").write_text(CGROUP)
        (self._root / "prolog").write_text(PROLOG)
        (self._root / "prolog").chmod(0o755)

    def _start(self) -> None:
        first = self._cluster.hosts[0].name
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        words = [f"--{word}={self._root / name}" for word, name in {**files, "log-file": "munged.log"}.items()]
        self._daemon(first, "munged", "--foreground", "--force", *words)
        self._until(lambda: (self._root / "munge.sock").exists(), "munge")
        self._daemon(first, "slurmctld", "-D")
        for host in self._cluster.hosts:
            mounted = self._cluster.exec(host.name, ["sh", "-c", MOUNT])
            assert mounted.returncode == 0, mounted.stderr
            self._daemon(host.name, "slurmd", "-D", "-N", host.name)
        size = len(self._cluster.hosts)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").count("idle") == size, "idle nodes")

    def _daemon(self, node: str, *command: str) -> None:
        with (self._root / f"{command[0]}.{node}.out").open("wb") as out:
            self._daemons.append(
                self._cluster.popen(
                    node, list(command), env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    def run(self, *command: str) -> str:
        """Return what a command of Slurm's prints on the controller."""
        done = self._cluster.exec(self._cluster.hosts[0].name, list(command), env=self.environment)
        return done.stdout if done.returncode == 0 else ""

    def _until(self, true: object, what: str) -> None:
        assert callable(true)
        end = time.monotonic() + UP_S
        while not true():
            if time.monotonic() > end:
                logs = [f"{path.name}: {path.read_text()[-600:]}" for path in sorted(self._root.glob("*.log"))]
                raise AssertionError(f"no {what} within {UP_S:g} s\n" + "\n".join(logs))
            time.sleep(0.1)

    def down(self) -> None:
        """End the daemons, those that need the others first."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
