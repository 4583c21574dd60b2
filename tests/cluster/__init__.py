"""Hosts to test against, on this one machine.

In: nothing but root rights (namespaces), or not even these (loopback.py).
Out: `Cluster`, `ClusterError`, `cluster_obstacle`.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.machine import Machine
from tests.cluster.network import ClusterError

__all__ = ["Cluster", "ClusterError", "Machine", "cluster_obstacle"]


@functools.lru_cache(maxsize=1)
def cluster_obstacle() -> str | None:
    """Why no `Cluster` can be made here, for a skip; None when one can."""
    if not Path("/proc/self/ns/net").exists():
        return "hosts are network namespaces: Linux only"
    if os.geteuid() != 0:
        return "hosts are network namespaces: needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    wanted = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "nft": "nftables"}
    wanted |= {"unshare": "util-linux", "nsenter": "util-linux"}
    missing = sorted({package for program, package in wanted.items() if shutil.which(program, path=path) is None})
    if missing:
        return f"apt-get install {' '.join(missing)}"
    # Root of a container may lack the rights, and a kernel the parts.
    probe = "ip link add probe0 type veth peer name probe1 && ip link add br0 type bridge && nft add table bridge cuts"
    return _complaint(["unshare", "--net", "--uts", "--mount", "sh", "-c", probe])


def _complaint(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces here: {error}"
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"
