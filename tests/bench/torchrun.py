"""Stock torchrun on hosts of a cluster: one agent a host, c10d rendezvous on the first.

In: a Cluster, a script. Out: its agents, running until the end of the `with`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.bench.fleet import ended
from tests.cluster import Cluster

PORT = 29400
# By default all groups of a job share one store, and may read what an earlier group left there: a restart can fail or
# hang. With this every group has its own.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    """One torchrun a host."""

    def __init__(self, agents: list[subprocess.Popen[bytes]], log: Path) -> None:
        self._agents, self._log = agents, log

    def goes_on(self) -> bool:
        """Return whether every agent runs."""
        return all(agent.poll() is None for agent in self._agents)

    def said(self) -> str:
        """Return the end of what the agents wrote."""
        return self._log.read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def running(
    cluster: Cluster, words: list[str], *, nproc: int, max_restarts: int, log: Path, env: Mapping[str, str]
) -> Iterator[Torchrun]:
    """Start the agents with a script and its arguments; after the `with` they and their workers are over."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(len(cluster.hosts)), "--nproc-per-node", str(nproc)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster.hosts[0].address}:{PORT}", "--rdzv-id", "bench"]
    command += ["--max-restarts", str(max_restarts), "--log-dir", f"{log}.d"]
    with contextlib.ExitStack() as stack, log.open("wb") as out:
        agents = []
        for host in cluster.hosts:
            line = [*command, "--local-addr", host.address, *words]
            agent = cluster.popen(host.name, line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            agents.append(stack.enter_context(ended(agent)))
        yield Torchrun(agents, log)
