"""Why a host did not come up: one reason and one next step for each cause."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
from pathlib import Path

import asyncssh
import pytest

from supervisor.cli import main
from supervisor.inventory import Host
from supervisor.ssh import AgentFile, HostError, boot, connect
from tests.agents.servers import serving
from tests.hostile import HOSTILE, check_harmless

pytestmark = pytest.mark.usefixtures("ssh_home")


async def _failure(host: Host, agent: AgentFile, deadline_s: float = 20) -> HostError:
    with pytest.raises(HostError) as failed:
        await connect(host, agent=agent, deadline_s=deadline_s)
    assert failed.value.host == host.name
    return failed.value


async def test_an_unknown_host_key(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        error = await _failure(dataclasses.replace(served.hosts[0], known_hosts=None), agent)
        host = served.hosts[0]
        key = served.demo.known_hosts.read_text().split(" ", 1)[1]
        fingerprint = asyncssh.import_public_key(key).get_fingerprint()
        assert error.step == "connect"
        assert f"host key of [{host.ssh}]:{host.port} is not in " in error.reason
        assert f"ED25519 key fingerprint is {fingerprint}" in error.reason
        assert f"ssh-keyscan -p {host.port} {host.ssh} >> " in error.hint


async def test_a_host_key_that_has_changed(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        host = served.hosts[0]
        for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256"):
            other = asyncssh.generate_private_key(kind).export_public_key("openssh").decode()
            known = tmp_path / f"known-{kind}"
            known.write_text(f"[{host.ssh}]:{host.port} {other}")
            error = await _failure(dataclasses.replace(host, known_hosts=known), agent)
            assert "has changed" in error.reason
            assert f"ssh-keygen -f {known} -R '[{host.ssh}]:{host.port}'" in error.hint


async def test_a_key_that_is_not_let_in(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        wrong = tmp_path / "wrong"
        wrong.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
        host = dataclasses.replace(served.hosts[0], identity_file=wrong, user="somebody")
        error = await _failure(host, agent)
        assert error.step == "auth"
        assert error.reason.startswith(f"auth refused for user somebody; keys tried: {wrong}; ssh says: ")
        assert error.hint.startswith("try by hand: ssh -l somebody -p ")
        nothing = await _failure(dataclasses.replace(host, identity_file=None), agent)
        assert "keys tried: none, there is no key here; ssh says: " in nothing.reason


async def test_no_connection(tmp_path: Path, agent: AgentFile) -> None:
    host = Host(name="n1", ssh="127.0.0.1", address="x", port=1)

    refused = await _failure(host, agent)
    assert (refused.step, refused.reason) == ("connect", "connection refused: 127.0.0.1 port 1")
    unresolved = await _failure(dataclasses.replace(host, ssh="no-such-host.invalid"), agent)
    assert (unresolved.step, unresolved.reason) == ("resolve", "the name no-such-host.invalid does not resolve")
    too_long = await _failure(dataclasses.replace(host, ssh="x" * 300), agent)
    assert too_long.step == "resolve"
    unroutable = await _failure(dataclasses.replace(host, ssh="255.255.255.255"), agent)
    assert unroutable.step == "connect"


async def test_servers_that_are_silent_or_speak_something_else(agent: AgentFile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = Host(name="n1", ssh="127.0.0.1", address="x", port=silent.getsockname()[1])
        error = await _failure(host, agent, 1.0)
        assert error.reason == "timeout: no answer within 1 s"
        assert error.step == "connect"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10_000)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    for handler, reason in ((answer, "no SSH server at"), (hang_up, "closed the connection")):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            error = await _failure(dataclasses.replace(host, port=port), agent)
            assert reason in error.reason


def test_an_ssh_configuration_that_cannot_be_read(ssh_home: Path, agent: AgentFile) -> None:
    (ssh_home / ".ssh" / "config").write_text("Host *\n  Port many\n")
    error = asyncio.run(_failure(Host(name="n1", ssh="x", address="x"), agent))
    assert "config line 2" in error.reason


async def test_python_that_is_missing_old_or_broken(tmp_path: Path, agent: AgentFile) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho This account is not available. >&2\nexit 1\n")
    script.chmod(0o755)
    plain = tmp_path / "plain"
    plain.write_text("no program")

    async with serving(tmp_path) as served:

        async def why(python: str) -> HostError:
            return await _failure(dataclasses.replace(served.hosts[0], python=python), agent)

        missing = await why("python9")
        assert (missing.step, "no python9 there: command not found" in missing.reason) == ("python", True)
        assert 'set python = "/path/to/python3"' in missing.hint
        assert "cannot be executed" in (await why(str(plain))).reason
        broken = await why(str(script))
        assert "exited with code 1" in broken.reason
        assert "This account is not available." in broken.reason


_PYENV = Path(os.environ.get("PYENV_ROOT", "/root/.pyenv")) / "versions"
OLD = [path for version in ("2.7", "3.6", "3.8") for path in _PYENV.glob(f"{version}.*/bin/python")]


@pytest.mark.parametrize("python", [pytest.param(path, id=path.parent.parent.name) for path in OLD])
async def test_an_old_python_can_still_say_so(tmp_path: Path, agent: AgentFile, python: Path) -> None:
    async with serving(tmp_path) as served:
        error = await _failure(dataclasses.replace(served.hosts[0], python=str(python)), agent)
        assert error.step == "python"
        assert f"python too old: {python}" in error.reason
        assert f"is Python {python.parent.parent.name}" in error.reason


async def test_a_prelude_that_fails(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:

        async def why(prelude: str) -> HostError:
            return await _failure(dataclasses.replace(served.hosts[0], prelude=prelude), agent)

        failed = await why("echo no such module: cuda >&2\nfalse")
        assert failed.step == "prelude"
        assert failed.reason == "prelude failed: it exited with code 1; it printed: no such module: cuda"
        left = await why("echo bye >&2; exit 3")
        assert left.reason == "prelude failed: the shell exited with code 3; it printed: bye"
        assert "prelude failed" in (await why("if")).reason
        assert "prelude failed" in (await why("module load cuda")).reason


async def test_a_slow_prelude_is_waited_for_beyond_the_connection(
    tmp_path: Path, agent: AgentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as served:
        host = dataclasses.replace(served.hosts[0], prelude="echo loading cuda >&2; sleep 5")
        await (await connect(host, agent=agent, deadline_s=4)).close()
        monkeypatch.setattr(boot, "BOOT_DEADLINE_S", 2.0)
        monkeypatch.setattr(boot, "PRELUDE_DEADLINE_S", 0.0)
        error = await _failure(host, agent)
        assert (error.step, error.reason) == ("prelude", "timeout: no answer within 2 s; it printed: loading cuda")


async def test_a_prelude_changes_the_environment_and_cannot_spoil_the_wire(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        prelude = 'export SUPERVISOR_HOME="$HOME/it\'s {!} \\"%s\\" ü"\necho SUPERVISOR-NEED; cat; echo on stdout'
        link = await connect(dataclasses.replace(served.hosts[0], prelude=prelude), agent=agent)
        assert link.hello["home"] == str(served.home(0) / 'it\'s {!} "%s" ü')
        await link.close()


async def test_noise_before_the_greeting_is_skipped(
    tmp_path: Path, agent: AgentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = tmp_path / "noisy"
    noisy.write_text(f'#!/bin/sh\nprintf "Welcome\\nto n1"\nexec {shutil.which("python3")} "$@"\n')
    noisy.chmod(0o755)
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nyes welcome\n")
    endless.chmod(0o755)

    # Who never stops printing does not end: there is no exit code to wait for.
    monkeypatch.setattr(boot, "EXIT_DEADLINE_S", 600.0)

    async with serving(tmp_path) as served:
        link = await connect(dataclasses.replace(served.hosts[0], python=str(noisy)), agent=agent)
        await link.close()
        here = Host(name="here", ssh="localhost", address="x", python=str(endless), local=True)
        error = await _failure(here, agent)
        assert "never stops printing" in error.reason


async def test_a_home_that_cannot_be_written(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        (tmp_path / "file").touch()
        for home in ("/proc/nowhere", str(tmp_path / "file" / "below")):
            error = await _failure(dataclasses.replace(served.hosts[0], env={"SUPERVISOR_HOME": home}), agent)
            assert (error.step, "home not writable" in error.reason) == ("push", True), error
            assert "SUPERVISOR_HOME" in error.hint


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
async def test_a_disk_that_is_full_at_the_push(tmp_path: Path, agent: AgentFile) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=64k", "tmpfs", disk], check=True)
    try:
        async with serving(tmp_path) as served:
            error = await _failure(dataclasses.replace(served.hosts[0], env={"SUPERVISOR_HOME": str(disk)}), agent)
            assert error.step == "push"
            assert "disk full" in error.reason
            assert f"{len(agent.data)} bytes are needed" in error.reason
            assert str(disk) in error.reason
            assert list((disk / "agents").iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("words", [["check"], ["status"], ["up"]])
def test_what_a_server_says_before_its_key_is_checked_is_only_text(
    tmp_path: Path, ssh_home: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    said = f"owned{HOSTILE}".encode(errors="replace")
    # SSH_MSG_DISCONNECT: by application, the text, no language; a packet is padded to 8 bytes.
    payload = b"\x01" + struct.pack(">II", 11, len(said)) + said + struct.pack(">I", 0)
    padding = 8 + -(len(payload) + 5) % 8
    packet = struct.pack(">IB", len(payload) + padding + 1, padding) + payload + bytes(padding)

    class Disconnects(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-x\r\n" + packet)
            while self.request.recv(4096):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Disconnects) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            hosts, script = tmp_path / "hosts.toml", tmp_path / "train.py"
            hosts.write_text(f'[[hosts]]\nname = "n1"\nssh = "127.0.0.1"\nport = {server.server_address[1]}\n')
            script.touch()
            more = ["--headless", "--no-sync", str(script)] if words == ["up"] else []
            assert main([*words, str(hosts), *more]) == 3
        finally:
            server.shutdown()
            serving.join()
    out, err = capsys.readouterr()
    check_harmless(out + err)
