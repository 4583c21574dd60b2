"""SSH servers for tests: the demo's embedded hosts, and a jump host that only passes connections on.

In: a directory. Out: inventory hosts that lead to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh

from supervisor.cli.demo import DemoHosts, demo_hosts
from supervisor.inventory import Host


@dataclasses.dataclass(frozen=True)
class Served:
    """The embedded hosts as the inventory would name them."""

    demo: DemoHosts
    hosts: tuple[Host, ...]

    def home(self, index: int) -> Path:
        """Return a host's home directory."""
        return self.demo.hosts[index].home


def host_of(demo: DemoHosts, index: int) -> Host:
    """Return the inventory's host for an embedded one."""
    one = demo.hosts[index]
    return Host(
        name=one.name,
        ssh=one.address,
        address=one.address,
        user=getpass.getuser(),
        port=one.port,
        identity_file=demo.identity_file,
        known_hosts=demo.known_hosts,
        python=sys.executable,
    )


async def end_logins() -> None:
    """End the connections of ssh that supervisor has made: the servers here end with the test."""
    for path in Path(os.environ["XDG_RUNTIME_DIR"]).glob("supervisor/*"):
        if path.is_socket():
            process = await asyncio.create_subprocess_exec(
                "ssh", "-F", "none", "-S", path, "-O", "exit", "node", stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()


@contextlib.asynccontextmanager
async def serving(root: Path, count: int = 1) -> AsyncIterator[Served]:
    """Some embedded hosts; nothing of theirs may be left."""
    async with demo_hosts(count, root) as demo:
        try:
            yield Served(demo, tuple(host_of(demo, index) for index in range(count)))
        finally:
            await end_logins()
        is_over = await asyncio.to_thread(demo.await_end, 60)
        assert is_over, demo.processes()


class Jump(asyncssh.SSHServer):
    """A server that passes connections on and counts who came."""

    def __init__(self, counts: dict[str, int], forbids: bool) -> None:
        self._counts = counts
        self._forbids = forbids

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        """Count a connection."""
        self._counts["connections"] = self._counts.get("connections", 0) + 1
        self._counts["open"] = self._counts.get("open", 0) + 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out."""
        self._counts["open"] -= 1

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        """Pass everything on, or say that it is forbidden, as sshd does with AllowTcpForwarding no."""
        if self._forbids:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "open failed")
        self._counts["forwarded"] = self._counts.get("forwarded", 0) + 1
        return True


@contextlib.asynccontextmanager
async def jump_host(
    demo: DemoHosts, address: str, counts: dict[str, int], *, forbids: bool = False, **options: Any
) -> AsyncIterator[int]:
    """Serve a jump host with the demo's keys at an address of the loopback network; yields its port."""
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    public = asyncssh.read_private_key(demo.identity_file).export_public_key("openssh").decode()
    acceptor = await asyncssh.listen(
        address,
        0,
        server_host_keys=[host_key],
        authorized_client_keys=asyncssh.import_authorized_keys(public),
        server_factory=lambda: Jump(counts, forbids),
        **options,
    )
    port = acceptor.get_port()
    with demo.known_hosts.open("a") as file:
        file.write(f"[{address}]:{port} {host_key.export_public_key('openssh').decode().strip()}\n")
    try:
        yield port
    finally:
        await end_logins()
        acceptor.close()
        await asyncio.wait_for(acceptor.wait_closed(), 60)
