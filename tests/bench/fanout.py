"""The same command on many hosts by clush or pdsh, with the cluster's keys.

In: a Cluster, a shell line. Out: how it went.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster import Cluster

TOOLS = ("clush", "pdsh")
PACKAGES = {"clush": "clustershell", "pdsh": "pdsh"}


def missing() -> list[str]:
    """Return the Debian packages of the tools that are not here."""
    return [PACKAGES[tool] for tool in TOOLS if shutil.which(tool) is None]


def run(tool: str, cluster: Cluster, line: str, timeout_s: float, log: Path) -> int:
    """Run a shell line on all hosts at once; what it says goes to `log`. Returns the tool's exit code.

    Raises subprocess.TimeoutExpired.
    """
    addresses = ",".join(host.address for host in cluster.hosts)
    fanout = str(len(cluster.hosts))
    # The system's own client, as in Cluster.ssh: `ssh`, options, address.
    options = " ".join(cluster.ssh_command(0)[1:-1])
    env = dict(os.environ)
    if tool == "clush":
        command = ["clush", "-S", "-n", "-f", fanout, "-o", options, "-w", addresses, line]
    else:
        command = ["pdsh", "-S", "-R", "ssh", "-f", fanout, "-w", addresses, line]
        env["PDSH_SSH_ARGS"] = f"-a -x {options} -l%u %h"
    with log.open("ab") as out:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, timeout=timeout_s, check=False
        )
    return done.returncode
