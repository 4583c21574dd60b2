"""Hosts without root: embedded SSH servers on loopback addresses, with the attributes of `Cluster`.

In: how many hosts.
Out: `LoopbackHosts`: hosts, an inventory, commands on them; no faults, and all hosts share one network and one name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.cli.demo import DemoHost, DemoHosts, hosts_in_thread
from tests.cluster.inventory import write_inventory
from tests.scratch import outer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

_END_GRACE_S = 2.0


class LoopbackHosts:
    """`with LoopbackHosts(2) as cluster: …`; everything started through the hosts is ended at the end."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._stack = ExitStack()
        self._served: DemoHosts | None = None
        self.directory = Path()

    def __enter__(self) -> LoopbackHosts:
        self.directory = Path(tempfile.mkdtemp(prefix="supervisor-loopback-", dir=outer()))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        try:
            self._served = self._stack.enter_context(hosts_in_thread(self._size, self.directory))
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._served.end_processes, _END_GRACE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def served(self) -> DemoHosts:
        """The servers; raises RuntimeError outside of the `with`."""
        if self._served is None:
            raise RuntimeError("these hosts are not up")
        return self._served

    @property
    def hosts(self) -> tuple[DemoHost, ...]:
        """The hosts, in order."""
        return self.served.hosts

    def inventory(
        self,
        path: Path | None = None,
        *,
        defaults: Mapping[str, object] | None = None,
        hosts: Mapping[str, Mapping[str, object]] | None = None,
        **job: object,
    ) -> Path:
        """Write a hosts.toml, as `Cluster.inventory` does."""
        common = {**self.served.defaults(sys.executable), **(defaults or {})}
        entries: list[dict[str, object]] = [
            {"name": host.name, "ssh": host.address, "port": host.port, **(hosts or {}).get(host.name, {})}
            for host in self.hosts
        ]
        return write_inventory(path or self.directory / "hosts.toml", dict(job), common, entries)

    def ssh(self, which: int, line: str, *, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a shell line on a host through the system's own ssh client."""
        host = self.hosts[which]
        options = [f"UserKnownHostsFile={self.served.known_hosts}", "BatchMode=yes", "StrictHostKeyChecking=yes"]
        words = [word for option in options for word in ("-o", option)]
        return subprocess.run(
            [
                "ssh",
                "-F",
                "none",
                "-i",
                str(self.served.identity_file),
                "-p",
                str(host.port),
                *words,
                host.address,
                line,
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """The command lines by pid of everything alive that was started through any of the hosts."""
        return self.served.processes()
