"""The embedded hosts behave as real ones: homes apart, bytes unchanged, commands that end with their channel."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import asyncssh
import pytest

from supervisor.cli.demo import DemoHosts, demo_hosts
from tests.examples import nightly

pytestmark = [nightly, pytest.mark.usefixtures("ssh_home")]


@contextlib.asynccontextmanager
async def _hosts(root: Path) -> AsyncIterator[DemoHosts]:
    async with demo_hosts(2, root) as hosts:
        yield hosts
    assert hosts.processes() == {}


def _connect(hosts: DemoHosts, number: int) -> AbstractAsyncContextManager[asyncssh.SSHClientConnection]:
    host = hosts.hosts[number]
    return asyncssh.connect(
        host.address,
        host.port,
        client_keys=[str(hosts.identity_file)],
        known_hosts=str(hosts.known_hosts),
        config=None,
        agent_path=None,
    )


async def test_bytes_pass_unchanged_and_status_comes_back(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 8000

    async with _hosts(tmp_path) as hosts, _connect(hosts, 0) as connection:
        done = await connection.run("cat; echo trouble >&2; exit 9", input=payload, encoding=None)
        assert done.stdout == payload
        assert done.stderr == b"trouble\n"
        assert done.exit_status == 9
        killed = await connection.run("kill -9 $$")
        assert killed.exit_signal is not None
        assert killed.exit_signal[0] == "KILL"


async def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    async with _hosts(tmp_path) as hosts:
        host = hosts.hosts[0]
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                host.address,
                host.port,
                client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                known_hosts=str(hosts.known_hosts),
                config=None,
                agent_path=None,
                password=None,
            )


async def test_a_lost_connection_ends_the_command_but_not_its_daemon(tmp_path: Path) -> None:
    async with _hosts(tmp_path) as hosts:
        async with _connect(hosts, 0) as connection:
            line = "setsid sleep 601 </dev/null >/dev/null 2>&1 & echo $!; trap '' HUP; sleep 602"
            process = await connection.create_process(line)
            daemon = int(await process.stdout.readline())
            # Both sleeps have the mark, and so has the shell between.
            while not {"sleep 601", "sleep 602"} <= set(hosts.processes().values()):
                await asyncio.sleep(0.01)
            connection.abort()
        # The shell may end a moment after what it waits for.
        while hosts.processes() != {daemon: "sleep 601"}:
            await asyncio.sleep(0.01)
        os.kill(daemon, signal.SIGTERM)
        assert await asyncio.to_thread(hosts.await_end, 30.0)


STAYS = """
import os, signal, time
signal.signal(signal.SIGHUP, lambda *_: open("hung_up", "w").close())
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_hosts_that_go_reap_a_command_that_is_just_being_ended(tmp_path: Path) -> None:
    async def run() -> int:
        async with demo_hosts(1, tmp_path) as hosts, _connect(hosts, 0) as connection:
            process = await connection.create_process(f"exec {shlex.join([sys.executable, '-c', STAYS])}")
            pid = int(await process.stdout.readline())
            connection.abort()
            while not (hosts.hosts[0].home / "hung_up").exists():
                await asyncio.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists()
        return pid

    # A process that nobody has waited for would be reported by Python as it is collected.
    assert asyncio.run(run())
    gc.collect()


async def test_what_does_not_end_is_killed_and_named(tmp_path: Path) -> None:
    async with _hosts(tmp_path) as hosts:
        async with _connect(hosts, 0) as connection:
            line = "trap '' TERM; echo up; while :; do sleep 600; done"
            await connection.run(f'setsid sh -c "{line}" </dev/null >$HOME/said 2>&1 & :')
            while not (hosts.hosts[0].home / "said").read_text():
                await asyncio.sleep(0.01)
        killed = await asyncio.to_thread(hosts.end_processes, 0.2)
        assert any("trap" in command for command in killed)
        assert hosts.processes() == {}
