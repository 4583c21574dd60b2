"""What supervisor's use of ssh leaves behind, and how often it asks: logins, secrets, processes and sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.door import FACTORS, Door, Operator, Server
from tests.cluster.job import until
from tests.cluster.leftovers import MARK, describe
from tests.cluster.network import process_state

HOSTS = ("gpu1", "gpu2")


def secrets_found(secrets: Iterable[str], *directories: Path) -> list[str]:
    """Return where a secret stands in the clear: files below these directories, and words and variables of processes.

    A place is a file's path, or pid and program of a process.
    """
    wanted = [secret.encode() for secret in secrets]
    files = [file for directory in directories for file in sorted(directory.rglob("*"))]
    found = [str(file) for file in files if file.is_file() and not file.is_symlink() and _has(file, wanted)]
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return found + [
        f"{name} of {pid} ({_program(pid)})"
        for pid in pids
        for name in ("cmdline", "environ")
        if _has(Path(f"/proc/{pid}/{name}"), wanted)
    ]


@contextmanager
def watched(secrets: Iterable[str], *directories: Path) -> Iterator[set[str]]:
    """Look for secrets over and over until the block ends; the set gets the places."""
    wanted, found, over = list(secrets), set[str](), threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            found.update(secrets_found(wanted, *directories))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _has(file: Path, wanted: list[bytes]) -> bool:
    try:
        data = file.read_bytes()
    except OSError:
        # It has gone, or it is a process of the kernel.
        return False
    return any(secret in data for secret in wanted)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def ssh_processes(door: Door) -> dict[int, str]:
    """Return the living ssh clients of this run of the tests, or inside: pid and command line."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    inside = set(door.pids())
    found = {}
    for entry in os.listdir("/proc"):
        pid = int(entry) if entry.isdigit() else 0
        if not pid or _program(pid) != "ssh" or process_state(pid) in {"Z", "X", ""}:
            continue
        try:
            is_ours = pid in inside or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours:
            found[pid] = describe(pid)
    return found


def unix_sockets(*directories: Path) -> list[str]:
    """Return the sockets below these directories: those that a process has, and those that are left as files.

    ssh gives a ControlPath its name only when it listens there, and the kernel goes on to name it with what ssh had
    put at its end: it is listed once, under its own name.
    """
    left = {str(path) for directory in directories for path in directory.rglob("*") if path.is_socket()}
    held = [line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]
    below = {path for path in held if any(Path(path).is_relative_to(directory) for directory in directories)}
    return sorted(left | {path for path in below if path.rpartition(".")[0] not in left})


@pytest.fixture
def bastion(operator: Operator) -> Server:
    """A server that asks for a second factor, on the only way to gpu1 and gpu2, which want a key alone."""
    door = operator.door
    servers = [door.server("guarded", FACTORS, at="bastion"), *(door.server(name) for name in HOSTS)]
    key = operator.key(lets_in=servers)
    operator.write("known_hosts", "".join(server.known_as() for server in servers))
    lines = ["User root", f"IdentityFile {key}", f"Host {' '.join(HOSTS)}", "  ProxyJump bastion"]
    for server in servers:
        lines += [f"Host {server.name}", f"  HostName {server.address}", f"  Port {server.port}"]
    operator.write("config", "\n".join([*lines, ""]))
    operator.inventory(*HOSTS)
    return servers[0]


@pytest.fixture
def places(operator: Operator) -> list[Path]:
    """Where supervisor could keep something: here, on the nodes, and for the time being."""
    temporary = operator.door.directory / "tmp"
    temporary.mkdir(exist_ok=True)
    state = operator.door.directory / "state"
    operator.variables |= {"TMPDIR": str(temporary), "XDG_STATE_HOME": str(state)}
    return [operator.door.home, operator.door.run, operator.door.node, temporary, state]


def _question(bastion: Server) -> str:
    return f"(root@{bastion.address}) Password:"


# What these tests look with


def test_ssh_logs_in_once_for_each_command(operator: Operator, bastion: Server) -> None:
    for count, name in enumerate(HOSTS, 1):
        before = bastion.logins(), operator.door.server(name).logins()
        done, asked = operator.ssh(name, "true", answer=operator.door.password)
        assert done.returncode == 0, done.stdout
        assert [text.strip() for text in asked] == [_question(bastion)], count
        # One connection with two factors is one login.
        assert (bastion.logins(), operator.door.server(name).logins()) == (before[0] + 1, before[1] + 1)
    before = bastion.logins(), operator.door.server(HOSTS[0]).logins()
    refused, asked = operator.ssh(HOSTS[0], "true", answer="a wrong password")
    assert (refused.returncode, len(asked)) == (255, 3)
    assert (bastion.logins(), operator.door.server(HOSTS[0]).logins()) == before


def test_a_secret_is_found_in_files_and_processes(tmp_path: Path) -> None:
    secret = f"secret-{os.urandom(6).hex()}"
    assert secrets_found([secret], tmp_path) == []
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"\xff" + secret.encode())
    with _sleeping("in the words", secret) as words, _sleeping("in the environment", SECRET=secret) as variables:
        expected = [str(tmp_path / "below" / "file")]
        places = [("cmdline", words.pid), ("environ", variables.pid)]
        expected += [f"{name} of {pid} (sleep)" for name, pid in sorted(places, key=lambda place: place[1])]
        assert secrets_found([secret, "not there at all"], tmp_path) == expected
        with watched([secret], tmp_path) as seen:
            until(lambda: seen, "it is not seen")
        assert seen == set(expected)


@contextmanager
def _sleeping(*words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    # exec keeps the words of no shell, so they are the program's own name.
    script = 'import os, sys; os.execvp("sleep", [" ".join(["sleep", *sys.argv[1:]]), "infinity"])'
    process = subprocess.Popen([sys.executable, "-c", script, *words], env={**os.environ, **variables})
    try:
        until(lambda: _program(process.pid) == "sleep", "no sleep")
        yield process
    finally:
        process.kill()
        process.wait()


def test_processes_and_sockets_of_ssh_are_found(operator: Operator, bastion: Server, places: list[Path]) -> None:
    assert (ssh_processes(operator.door), unix_sockets(*places)) == ({}, [])
    operator.append("config", "Host *\n  ControlMaster auto\n  ControlPath ~/.ssh/%C\n")
    opened, asked = operator.ssh("-fN", HOSTS[0], answer=operator.door.password)
    assert (opened.returncode, len(asked)) == (0, 1), opened.stdout
    # The master, and the one through which it reaches the host: ProxyJump is an ssh too.
    assert len(ssh_processes(operator.door)) == 2
    assert {Path(path).parent for path in unix_sockets(*places)} == {operator.ssh_directory}
    for name in (HOSTS[0], "bastion"):
        operator.ssh("-O", "exit", name)
    until(lambda: not ssh_processes(operator.door) and not unix_sockets(*places), "the master stays")


# supervisor


def test_a_question_is_asked_once_its_answer_is_found_nowhere_and_the_login_is_used_again(
    operator: Operator, bastion: Server, places: list[Path]
) -> None:
    def logins() -> list[int]:
        return [server.logins() for server in (bastion, *map(operator.door.server, HOSTS))]

    assert (ssh_processes(operator.door), unix_sockets(*places)) == ({}, [])
    password, before = operator.door.password, logins()
    with watched([password], *places) as seen:
        spoken = operator.supervisor_asked("check", str(operator.hosts), prompt=_question(bastion), answer=password)
    assert (spoken.status, spoken.answers) == (0, 1), spoken.text
    assert logins() == [count + 1 for count in before]
    assert not seen
    assert password not in spoken.text
    assert secrets_found([password], *places) == []
    left, before = ssh_processes(operator.door), logins()
    (socket,) = unix_sockets(*places)
    assert Path(socket).is_relative_to(operator.door.run)
    assert [line for line in left.values() if socket not in line] == []
    again = operator.supervisor("check", str(operator.hosts))
    assert again.returncode == 0, again.stderr
    assert (ssh_processes(operator.door), unix_sockets(*places), logins()[0]) == (left, [socket], before[0])
