"""Connecting a host: push once, then never again; names, ports, keys and jump hosts as ssh itself would take them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from supervisor.inventory import Host, local
from supervisor.ssh import AgentFile, HostError, NodeLink, connect, connect_all, openssh
from supervisor.ssh.settings import for_host, jump_of
from supervisor.ssh.wires import LocalWire
from tests.agents.servers import jump_host, serving

pytestmark = pytest.mark.usefixtures("ssh_home")


def _noting(steps: list[str]) -> Callable[[str, str], None]:
    return lambda step, _text: steps.append(step)


async def test_the_agent_is_pushed_once(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        (host,) = served.hosts
        steps: list[list[str]] = []
        for _ in range(2):
            seen: list[str] = []
            link = await connect(host, agent=agent, progress=_noting(seen))
            assert link.hello["home"] == str(served.home(0) / ".supervisor")
            assert link.hello["executable"] == sys.executable
            assert (await link.channel.call("jobs")).data == {"jobs": []}
            await link.close()
            assert link.closed.is_set()
            steps.append(seen)
        assert steps[0] == ["resolve", "resolve", "connect", "auth", "python", "push", "python"]
        assert steps[1] == ["resolve", "resolve", "connect", "auth", "python", "python"]
        pushed = served.home(0) / ".supervisor" / "agents"
        compiled = f"{agent.sha256}.{sys.implementation.cache_tag}.pyz"
        assert {path.name for path in pushed.iterdir()} == {f"{agent.sha256}.pyz", compiled}
        assert (pushed / f"{agent.sha256}.pyz").read_bytes() == agent.data
        assert pushed.stat().st_mode & 0o777 == 0o700
        assert (pushed / f"{agent.sha256}.pyz").stat().st_mode & 0o777 == 0o600
        assert pushed.parent.stat().st_mode & 0o777 == 0o700


async def test_a_damaged_agent_is_replaced(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        agents = served.home(0) / ".supervisor" / "agents"
        agents.mkdir(parents=True)
        (agents / f"{agent.sha256}.pyz").write_bytes(agent.data[:1000])
        link = await connect(served.hosts[0], agent=agent)
        await link.close()
        assert (agents / f"{agent.sha256}.pyz").read_bytes() == agent.data


async def test_all_hosts_at_once_with_a_reason_for_each_that_fails(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path, count=3) as served:
        hosts = [
            *served.hosts,
            dataclasses.replace(served.hosts[0], name="bad", python="no-such-python"),
            dataclasses.replace(served.hosts[0], name="gone", port=1),
        ]
        found = await connect_all(hosts, agent=agent)
        assert list(found) == ["n1", "n2", "n3", "bad", "gone"]
        links = [link for link in found.values() if isinstance(link, NodeLink)]
        assert [link.host.name for link in links] == ["n1", "n2", "n3"]
        assert [error.step for error in found.values() if isinstance(error, HostError)] == ["python", "connect"]
        await asyncio.gather(*(link.close() for link in links))


async def test_giving_up_in_the_middle_leaves_nothing(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path, count=2) as served:
        slow = dataclasses.replace(served.hosts[1], prelude="sleep 60")
        task = asyncio.ensure_future(connect_all([served.hosts[0], slow], agent=agent))
        while not any("sleep 60" in line for line in served.demo.processes().values()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_link_notices_that_the_server_is_gone(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        link = await connect(served.hosts[0], agent=agent)
        os.kill(link.hello["pid"], 9)
        await asyncio.wait_for(link.closed.wait(), 60)
        await link.close()


async def test_this_machine_needs_no_ssh(tmp_path: Path, agent: AgentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_HOME", str(tmp_path / "sup"))
    (host,) = local().hosts
    link = await connect(host, agent=agent, deadline_s=30)
    assert link.hello["home"] == str(tmp_path / "sup")
    pid = link.hello["pid"]
    await link.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_the_ssh_configuration_is_honoured(tmp_path: Path, agent: AgentFile, ssh_home: Path) -> None:
    async with serving(tmp_path) as served:
        host = served.hosts[0]
        known = served.demo.known_hosts.read_text().replace(f"[{host.ssh}]:{host.port}", "the-alias")
        (ssh_home / "known").write_text("a damaged line\n" + known)
        (ssh_home / ".ssh" / "config").write_text(
            f"Host box*\n  HostName {host.ssh}\n  Port {host.port}\n  User {host.user}\n  HostKeyAlias the-alias\n"
            f"  IdentityFile {host.identity_file}\n  IdentityFile ~/.ssh/missing\n"
            f"  UserKnownHostsFile {ssh_home}/known\n"
            "  RequestTTY force\n  RemoteCommand /bin/false\n"
        )
        alias = Host(name="n1", ssh="box1", address="x", python=sys.executable)
        link = await connect(alias, agent=agent)
        await link.close()
        # What hosts.toml says wins.
        with pytest.raises(HostError, match="connection refused"):
            await connect(dataclasses.replace(alias, port=1), agent=agent)
        with pytest.raises(HostError, match="is not in .*empty"):
            await connect(dataclasses.replace(alias, known_hosts=tmp_path / "empty"), agent=agent)


@pytest.mark.parametrize("named", ["", "IdentityAgent SSH_AUTH_SOCK", "IdentityAgent $OTHER", "IdentityAgent none"])
def test_an_ssh_agent_may_be_named_by_a_variable(
    tmp_path: Path, ssh_home: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (ssh_home / ".ssh" / "config").write_text(f"Host *\n  {named}\n")
    path = str(tmp_path / "a")
    monkeypatch.setenv("OTHER" if "OTHER" in named else "SSH_AUTH_SOCK", path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert for_host(Host(name="n1", ssh="box", address="x")).agent == ("" if "none" in named else path)


async def test_host_keys_are_checked_whatever_the_configuration_says(
    tmp_path: Path, agent: AgentFile, ssh_home: Path
) -> None:
    (ssh_home / ".ssh" / "config").write_text("Host *\n  UserKnownHostsFile none\n  StrictHostKeyChecking no\n")

    async with serving(tmp_path) as served:
        with pytest.raises(HostError, match="is not in"):
            await connect(dataclasses.replace(served.hosts[0], known_hosts=None), agent=agent)


async def test_a_node_gets_neither_the_operators_ssh_agent_nor_variables(
    tmp_path: Path, agent: AgentFile, ssh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "Host *\n  ForwardAgent yes\n  SendEnv *\n  IdentityAgent ~/agent\n"
    (ssh_home / ".ssh" / "config").write_text(config)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    received: list[tuple[dict[bytes, bytes], str | None]] = []

    def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
        received.append((dict(process.channel.get_environment_bytes()), process.channel.get_agent_path()))
        process.exit(0)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(ssh_home / "agent"))
        async with (
            serving(tmp_path) as served,
            jump_host(served.demo, "127.0.0.1", {}, process_factory=serve) as port,
        ):
            known, here = served.demo.known_hosts, f"[127.0.0.1]:{port}"
            known.write_text(known.read_text().replace(here, f"{here},[localhost]:{port}"))
            gate = dataclasses.replace(served.hosts[0], ssh="127.0.0.1", port=port)
            for host in (gate, dataclasses.replace(gate, ssh="localhost", proxy_jump=f"127.0.0.1:{port}")):
                for via in ("asyncssh", "openssh"):
                    reached = dataclasses.replace(host, via=via)
                    with pytest.raises(HostError, match="exited with code 0"):
                        await connect(reached, agent=agent)
    assert received == [({}, None)] * 4


@pytest.mark.parametrize(
    ("command", "alias", "options"),
    [
        ("ssh -W %h:%p gate", "gate", ()),
        ("/usr/bin/ssh -q -p 2222 me@gate -W [%h]:%p", "gate", ("-q", "-p", "2222", "-l", "me")),
        ("ssh -F /c -o User=me -W %h:%p gate", "gate", ("-F", "/c", "-o", "User=me")),
        ("ssh -S none -J me@far -W %h:%p gate", "gate", ("-o", "ControlPath=none", "-o", "ProxyJump=me@far")),
        ("ssh -i $HOME/k -W %h:%p gate", None, ()),
        ("ssh gate nc %h %p", None, ()),
        ("ssh -W %h:22 gate", None, ()),
        ("ssh -W %h:%p -l %r gate", None, ()),
        ("cloudflared access ssh --hostname %h", None, ()),
        ("ssh -W '%h:%p gate", None, ()),
        ("", None, ()),
    ],
)
def test_a_proxy_command_by_ssh_is_a_jump_host(command: str, alias: str | None, options: tuple[str, ...]) -> None:
    jump = jump_of(command)
    assert (jump.alias if jump else None, jump.options if jump else ()) == (alias, options)


def test_a_jump_host_may_be_an_address_with_colons(ssh_home: Path) -> None:
    found = for_host(Host(name="n1", ssh="box", address="x", proxy_jump="u@[::1]:22,[2001:db8::22]"))
    assert found.jump is not None
    assert found.jump == ("2001:db8::22", ("-o", "ProxyJump=u@[::1]:22"))


async def test_jump_hosts_are_shared_and_may_be_chained(tmp_path: Path, agent: AgentFile, ssh_home: Path) -> None:
    async with serving(tmp_path, count=3) as served:
        one: dict[str, int] = {}
        two: dict[str, int] = {}
        async with (
            jump_host(served.demo, "127.0.0.1", one) as first,
            jump_host(served.demo, "127.0.0.1", two) as second,
        ):
            chain = f"127.0.0.1:{first},{served.hosts[0].user}@127.0.0.1:{second}"
            hosts = [dataclasses.replace(host, proxy_jump=chain) for host in served.hosts]
            found = await connect_all(hosts, agent=agent)
            links = [link for link in found.values() if isinstance(link, NodeLink)]
            assert len(links) == 3, found
            # One connection for all: sshd on a login node would drop many that come at once.
            assert (one["connections"], two["connections"]) == (1, 1)
            assert (one["forwarded"], two["forwarded"]) == (1, 3)
            await links[0].close()
            assert (await links[1].channel.call("jobs")).data == {"jobs": []}
            for link in links:
                await link.close()
            # The next command uses the same login, until `clean`.
            await (await connect(hosts[0], agent=agent)).close()
            assert (one["connections"], two["connections"]) == (1, 1)
            await openssh.end_logins(hosts)
            while (one["open"], two["open"]) != (0, 0):
                # ssh ends a connection in its own time.
                await asyncio.sleep(0.01)
            (ssh_home / ".ssh" / "config").write_text(f"Host {served.hosts[0].ssh}\n  ProxyJump 127.0.0.1:{first}\n")
            link = await connect(served.hosts[0], agent=agent)
            assert one["connections"] == 2
            await link.close()
            link = await connect(dataclasses.replace(served.hosts[0], proxy_jump="none"), agent=agent)
            assert one["connections"] == 2
            await link.close()


def test_jump_hosts_that_lead_in_a_circle_are_an_error(agent: AgentFile, ssh_home: Path) -> None:
    (ssh_home / ".ssh" / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    hosts = [Host(f"n{jump}", "127.0.0.1", "127.0.0.1", proxy_jump=jump) for jump in "ab"]
    found = asyncio.run(asyncio.wait_for(connect_all(hosts, agent=agent), 60))
    assert ["circle" in str(one) for one in found.values()] == [True, True], found


async def test_a_refusal_of_a_jump_host_is_reported(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        counts: dict[str, int] = {}
        async with jump_host(served.demo, "127.0.0.1", counts) as port:
            host = dataclasses.replace(served.hosts[0], proxy_jump=f"127.0.0.1:{port}")
            with pytest.raises(HostError, match="cannot be reached from the jump host"):
                await connect(dataclasses.replace(host, port=1), agent=agent)
        async with jump_host(served.demo, "127.0.0.1", counts, forbids=True) as port:
            with pytest.raises(HostError, match="cannot be reached from the jump host"):
                await connect(dataclasses.replace(host, proxy_jump=f"127.0.0.1:{port}"), agent=agent)
        with pytest.raises(HostError, match=r"n1: connect: jump host 127\.0\.0\.1: .* Connection refused"):
            await connect(dataclasses.replace(host, proxy_jump="127.0.0.1:1"), agent=agent)


async def test_who_does_not_wait_for_a_local_bridge_leaves_none() -> None:
    wire = LocalWire(await LocalWire.run(["sh", "-c", "echo begun; sleep 600; sleep 600"]))
    assert await wire.reader.readline() == b"begun\n"
    closing = asyncio.ensure_future(wire.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert await asyncio.wait_for(wire.wait_exit(), 60) == -signal.SIGKILL
    # Its child holds the other end of this pipe.
    assert await asyncio.wait_for(wire.reader.read(), 60) == b""
