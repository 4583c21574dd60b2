"""What gets `ssh gpu1` in gets supervisor in: the same ~/.ssh/config, with OpenSSH's own client first.

Each test writes a configuration, sees that ssh gets in by it, and then that `supervisor check` does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.door import DOMAIN, FACTORS, PASSWORD_ALONE, Operator, Server, keygen

HOST = "gpu1"
# Whatever ssh asks about a secret or a host key.
QUESTION = re.compile(r"pass(?:word|phrase)|\(yes/no", re.IGNORECASE)
RELAY = """
import os, socket, sys, threading
open({noted!r}, "a").write(f"{{sys.argv[1:]}}\\n")
far = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def there():
    while data := os.read(0, 65536):
        far.sendall(data)
    far.shutdown(socket.SHUT_WR)
threading.Thread(target=there, daemon=True).start()
while data := far.recv(65536):
    os.write(1, data)
"""


def ssh_gets_in(operator: Operator, answer: str | None = None) -> list[str]:
    """Log in with ssh, and return what it has asked; each question got the answer."""
    begun = time.perf_counter()
    done, asked = operator.ssh(HOST, "true", answer=answer)
    print(f"ssh: {time.perf_counter() - begun:.2f} s")
    assert done.returncode == 0, f"ssh itself does not get in, so this says nothing about supervisor: {done.stdout}"
    return asked


def supervisor_gets_in(operator: Operator) -> None:
    """Run `check` without a terminal: it must reach the host, and ask nothing."""
    begun = time.perf_counter()
    done = operator.supervisor("check", str(operator.hosts), "--json")
    print(f"supervisor: {time.perf_counter() - begun:.2f} s")
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (done.returncode, found["unreachable"], list(found["nodes"])) == (0, {}, [HOST]), done.stdout + done.stderr
    assert not QUESTION.search(done.stderr), done.stderr


def supervisor_gets_in_with(operator: Operator, question: str, answer: str) -> None:
    """Run `check` on a terminal: it must ask this once, in ssh's words and for this host, and reach the host."""
    begun = time.perf_counter()
    spoken = operator.supervisor_asked("check", str(operator.hosts), prompt=question, answer=answer)
    print(f"supervisor: {time.perf_counter() - begun:.2f} s")
    assert (spoken.status, spoken.answers) == (0, 1), spoken.text
    # A busy machine is worth a remark of `check`.
    assert re.search(r"no problems found|would start", spoken.text), spoken.text
    assert answer not in spoken.text, "the answer is on the terminal"
    before, _, after = spoken.text.partition(question)
    # The list of hosts, which comes first in any case, names it too.
    around = [line for line in before.splitlines() if "hosts: " not in line] + after.splitlines()[:1]
    assert any(HOST in line for line in around), f"for which host? {spoken.text}"


def both_get_in(
    operator: Operator, *servers: Server, question: str = "", answer: str | None = None, **host: object
) -> None:
    """Log in with ssh, then with supervisor, through all these servers; what ssh has asked, supervisor must ask too.

    `host` are more keys of the host in hosts.toml.
    """
    operator.inventory(HOST, **host)
    before = [server.logins() for server in servers]
    asked = ssh_gets_in(operator, answer)
    assert [text.strip() for text in asked] == ([question] if question else []), "ssh asks something else"
    between = [server.logins() for server in servers]
    assert between == [count + 1 for count in before], "ssh takes another way"
    if answer is None:
        supervisor_gets_in(operator)
    else:
        supervisor_gets_in_with(operator, question, answer)
    after = [server.logins() for server in servers]
    assert all(now > then for now, then in zip(after, between, strict=True)), "supervisor takes another way"


def block(head: str, server: Server, *more: str) -> str:
    """A block of ~/.ssh/config that leads to a server."""
    lines = [f"HostName {server.address}", f"Port {server.port}", "User root", *more]
    return "\n  ".join([head, *lines]) + "\n"


@pytest.fixture
def gpu1(operator: Operator) -> Server:
    """A server that lets keys in; the operator knows it."""
    server = operator.door.server(HOST)
    operator.write("known_hosts", server.known_as())
    return server


@pytest.fixture
def key(operator: Operator, gpu1: Server) -> Path:
    """The key that it lets in."""
    return operator.key(lets_in=[gpu1])


def test_a_plain_host(operator: Operator, gpu1: Server, key: Path) -> None:
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}"))
    both_get_in(operator, gpu1)


# Keys


def test_a_key_that_only_an_agent_has(operator: Operator, gpu1: Server, key: Path) -> None:
    operator.variables["SSH_AUTH_SOCK"] = str(operator.agent(key))
    key.unlink()
    operator.write("config", block("Host gpu1", gpu1))
    both_get_in(operator, gpu1)


def test_identity_agent(operator: Operator, gpu1: Server, key: Path) -> None:
    agent = operator.agent(key)
    key.unlink()
    operator.write("config", block("Host gpu1", gpu1, f"IdentityAgent {agent}"))
    both_get_in(operator, gpu1)


def test_identities_only_with_an_agent_full_of_other_keys(operator: Operator) -> None:
    server = operator.door.server("impatient", "MaxAuthTries 3", at=HOST)
    key = operator.key(lets_in=[server])
    operator.variables["SSH_AUTH_SOCK"] = str(operator.agent(*(operator.key(f"other{number}") for number in range(6))))
    operator.write("known_hosts", server.known_as())
    operator.write("config", block("Host gpu1", server, f"IdentityFile {key}"))
    refused, _ = operator.ssh(HOST, "true")
    assert "Too many authentication failures" in refused.stdout, "the agent's keys do no harm"
    operator.write("config", block("Host gpu1", server, f"IdentityFile {key}", "IdentitiesOnly yes"))
    both_get_in(operator, server)


def test_certificates_of_the_user_and_of_the_host(operator: Operator) -> None:
    def sign(server: Server) -> None:
        keygen("-t", "ed25519", "-N", "", "-f", server.directory / "authority")
        public = server.directory / "host_key.pub"
        keygen("-s", server.directory / "authority", "-h", "-I", HOST, "-n", server.address, public)

    trust = "TrustedUserCAKeys {directory}/authority.pub\nHostCertificate {directory}/host_key-cert.pub"
    server = operator.door.server("certified", trust, at=HOST, prepare=sign)
    authority = server.directory / "authority"
    key = operator.key()
    keygen("-s", authority, "-I", "operator", "-n", "root", f"{key}.pub")
    # Not under the name at which ssh looks by itself.
    certificate = key.with_name("id_test-cert.pub").rename(key.with_name("signed.pub"))
    place, public = f"[{server.address}]:{server.port}", authority.with_suffix(".pub").read_text()
    operator.write("known_hosts", f"@cert-authority {place} {public}")
    operator.write("config", block("Host gpu1", server, f"IdentityFile {key}", f"CertificateFile {certificate}"))
    both_get_in(operator, server)


# Ways


def _behind(operator: Operator, *names: str) -> list[Server]:
    """Hosts by these names that let the operator's key in as gpu1 does, each with a block of its own to begin with."""
    servers = [operator.door.server(name) for name in names]
    gpu1 = operator.door.server(HOST)
    key = operator.key(lets_in=[gpu1, *servers])
    operator.write("known_hosts", "".join(server.known_as() for server in (gpu1, *servers)))
    blocks = [block(f"Host {server.name}", server, f"IdentityFile {key}") for server in servers]
    operator.write("config", "".join([*blocks, block("Host gpu1", gpu1, f"IdentityFile {key}")]))
    return [gpu1, *servers]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["bastion"], "ProxyJump bastion"),
        (["gate", "bastion"], "ProxyJump gate,bastion"),
        (["bastion"], "ProxyCommand ssh -W %h:%p bastion"),
    ],
    ids=["ProxyJump", "ProxyJump in a chain", "ProxyCommand with ssh -W"],
)
def test_through_other_hosts(operator: Operator, names: Sequence[str], line: str) -> None:
    servers = _behind(operator, *names)
    operator.append("config", f"  {line}\n")
    both_get_in(operator, *servers)


def test_proxy_command_with_a_relay(operator: Operator, gpu1: Server, key: Path) -> None:
    noted = operator.ssh_directory / "noted"
    relay = operator.write("relay.py", RELAY.format(noted=str(noted)))
    command = f"ProxyCommand {sys.executable} -S {relay} %h %p"
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}", command))
    both_get_in(operator, gpu1)
    assert noted.read_text().splitlines() == [str([gpu1.address, str(gpu1.port)])] * 2


def test_a_connection_that_the_user_has_opened_is_shared(operator: Operator) -> None:
    server = operator.door.server("factors", FACTORS, at=HOST)
    key = operator.key(lets_in=[server])
    operator.write("known_hosts", server.known_as())
    control = operator.ssh_directory / "%C"
    shared = block("Host gpu1", server, f"IdentityFile {key}", "ControlMaster auto", f"ControlPath {control}")
    operator.write("config", shared)
    opened, asked = operator.ssh("-fN", HOST, answer=operator.door.password)
    assert (opened.returncode, len(asked)) == (0, 1), opened.stdout
    logins = server.logins()
    operator.inventory(HOST)
    assert ssh_gets_in(operator) == []
    supervisor_gets_in(operator)
    assert server.logins() == logins, "somebody has logged in again"
    alive, _ = operator.ssh("-O", "check", HOST)
    assert alive.returncode == 0, f"the user's own connection has been closed: {alive.stdout}"
    ended, _ = operator.ssh("-O", "exit", HOST)
    assert ended.returncode == 0, ended.stdout


# Which lines hold


def test_include(operator: Operator, gpu1: Server, key: Path) -> None:
    (operator.ssh_directory / "config.d").mkdir()
    operator.write("config.d/10-lab", block("Host gpu1", gpu1, f"IdentityFile {key}"))
    operator.write("config", "Include config.d/*\n")
    both_get_in(operator, gpu1)


def test_match_host_and_match_final(operator: Operator, gpu1: Server, key: Path) -> None:
    lines = ["Match host gpu1", f"  HostName {gpu1.address}", f"Match final host {gpu1.address}"]
    lines += [f"  Port {gpu1.port}", "  User root", f"  IdentityFile {key}", ""]
    operator.write("config", "\n".join(lines))
    both_get_in(operator, gpu1)


@pytest.mark.parametrize(
    "head",
    [
        # %h is the name as it is by then: a HostName before this line would change it.
        'Match exec "test %h = gpu1"',
        'Match originalhost gpu1 exec "test %n = gpu1"',
        "Match localnetwork 127.0.0.0/8",
    ],
    ids=["exec with %h", "originalhost and exec with %n", "localnetwork"],
)
def test_match(operator: Operator, gpu1: Server, key: Path, head: str) -> None:
    operator.write("config", block(head, gpu1, f"IdentityFile {key}"))
    if "localnetwork" in head and _refuses(head):
        pytest.skip("Match localnetwork came with OpenSSH 9.4")
    both_get_in(operator, gpu1)


def _refuses(line: str) -> bool:
    """Tell whether this machine's ssh does not know a line of ssh_config."""
    done = subprocess.run(["ssh", "-G", "-F", "/dev/stdin", "any"], input=line, capture_output=True, text=True)
    return done.returncode != 0


@pytest.mark.parametrize("head", [f"Host *.{DOMAIN}", f"Match canonical host *.{DOMAIN}"])
def test_canonical_names(operator: Operator, gpu1: Server, key: Path, head: str) -> None:
    operator.write("known_hosts", gpu1.known_as(gpu1.full_name))
    lines = ["CanonicalizeHostname yes", f"CanonicalDomains {DOMAIN}", head]
    lines += [f"  Port {gpu1.port}", "  User root", f"  IdentityFile {key}", ""]
    operator.write("config", "\n".join(lines))
    both_get_in(operator, gpu1)


# Host keys


def test_host_key_alias(operator: Operator, gpu1: Server, key: Path) -> None:
    operator.write("known_hosts", f"the-door {gpu1.host_key}\n")
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}", "HostKeyAlias the-door"))
    both_get_in(operator, gpu1)


def test_hashed_known_hosts(operator: Operator, gpu1: Server, key: Path) -> None:
    known = operator.ssh_directory / "known_hosts"
    keygen("-H", "-f", known)
    known.with_suffix(".old").unlink()
    assert known.read_text().startswith("|1|")
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}"))
    both_get_in(operator, gpu1)


def test_user_known_hosts_file_with_the_name_of_the_host(operator: Operator, gpu1: Server, key: Path) -> None:
    (operator.ssh_directory / "known_hosts").rename(operator.ssh_directory / f"known.{gpu1.address}")
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}", "UserKnownHostsFile ~/.ssh/known.%h"))
    both_get_in(operator, gpu1)


def test_known_hosts_command(operator: Operator, gpu1: Server, key: Path) -> None:
    keys = (operator.ssh_directory / "known_hosts").rename(operator.ssh_directory / "elsewhere")
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}", f"KnownHostsCommand /bin/cat {keys}"))
    both_get_in(operator, gpu1)


def test_accept_new(operator: Operator, gpu1: Server, key: Path) -> None:
    known = operator.write("known_hosts", "")
    accept = block("Host gpu1", gpu1, f"IdentityFile {key}", "StrictHostKeyChecking accept-new")
    operator.write("config", accept)
    operator.inventory(HOST)
    assert ssh_gets_in(operator) == []
    noted = known.read_text()
    assert gpu1.host_key.split()[1] in noted
    known.write_text("")
    supervisor_gets_in(operator)
    assert known.read_text() == noted, "the key has not become known as ssh makes it known"


# Questions


def test_a_password_after_the_key(operator: Operator) -> None:
    server = operator.door.server("factors", FACTORS, at=HOST)
    key = operator.key(lets_in=[server])
    operator.write("known_hosts", server.known_as())
    operator.write("config", block("Host gpu1", server, f"IdentityFile {key}"))
    question = f"(root@{server.address}) Password:"
    both_get_in(operator, server, question=question, answer=operator.door.password)


def test_a_password_alone(operator: Operator) -> None:
    server = operator.door.server("password", PASSWORD_ALONE, at=HOST)
    operator.write("known_hosts", server.known_as())
    operator.write("config", block("Host gpu1", server))
    question = f"root@{server.address}'s password:"
    both_get_in(operator, server, question=question, answer=operator.door.password)


def test_a_key_with_a_passphrase_and_no_agent(operator: Operator, gpu1: Server) -> None:
    key = operator.key("id_locked", passphrase="a passphrase of a test", lets_in=[gpu1])
    operator.write("config", block("Host gpu1", gpu1, f"IdentityFile {key}"))
    question = f"Enter passphrase for key '{key}':"
    both_get_in(operator, gpu1, question=question, answer="a passphrase of a test")
