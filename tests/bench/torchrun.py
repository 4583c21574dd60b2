"""Stock torchrun on hosts of a cluster: one agent a host, c10d rendezvous on the first.

In: a Cluster, a script. Out: its agents, running until the end of the `with`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.bench.fleet import ended
from tests.cluster import Cluster

PORT = 29400
# By default all groups of a job share one store, and may read what an earlier group left there: a restart can fail or
# hang. With this every group has its own.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    """One torchrun a host, by the host's name."""

    def __init__(self, start: Callable[[str], subprocess.Popen[bytes]], log: Path) -> None:
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.log = log
        self._start = start

    def start(self, host: str) -> None:
        """Start the agent of a host, in the place of one that was there."""
        self.agents[host] = self._start(host)

    def goes_on(self) -> bool:
        """Return whether every agent runs."""
        return all(agent.poll() is None for agent in self.agents.values())

    def said(self) -> str:
        """Return the end of what the agents wrote."""
        return self.log.read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def running(
    cluster: Cluster,
    words: list[str],
    *,
    nproc: int,
    max_restarts: int,
    log: Path,
    env: Mapping[str, str],
    hosts: Sequence[str] | None = None,
    nnodes: str | None = None,
    options: Sequence[str] = (),
) -> Iterator[Torchrun]:
    """Start the agents with a script and its arguments; after the `with` they and their workers are over.

    `hosts`: where to start one at first (default: on all). Torch's own logs lie beside `log`, in `<log>.d`.
    """
    names = [host.name for host in cluster.hosts] if hosts is None else list(hosts)
    directory = log.with_name(f"{log.name}.d")
    directory.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", nnodes or str(len(names)), "--nproc-per-node", str(nproc)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster.hosts[0].address}:{PORT}", "--rdzv-id", "bench"]
    command += ["--max-restarts", str(max_restarts), "--log-dir", str(directory), *options]
    with contextlib.ExitStack() as stack, log.open("wb") as out:

        def start(name: str) -> subprocess.Popen[bytes]:
            line = [*command, "--local-addr", cluster.host(name).address, *words]
            agent = cluster.popen(name, line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            return stack.enter_context(ended(agent))

        group = Torchrun(start, log)
        for name in names:
            group.start(name)
        yield group
