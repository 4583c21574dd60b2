"""The inventory of a run without hosts.toml.

In: this machine. Out: an inventory of one host that is reached without SSH.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from supervisor.inventory.model import Host, Inventory, JobDefaults


def local() -> Inventory:
    """Return an inventory of this machine alone: no SSH, no sync, the current directory, torchrun's own defaults."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().partition(".")[0])[:64].lstrip("-._") or "localhost"
    host = Host(name, "localhost", "127.0.0.1", python=sys.executable, nproc_per_node="1", local=True)
    job = JobDefaults(workdir=Path.cwd(), sync=False, max_restarts=0)
    return Inventory(path=None, hosts=(host,), job=job)
