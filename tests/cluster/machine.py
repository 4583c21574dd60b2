"""One host of the cluster: its files, its namespaces, its sshd.

In: a name, a number, the network and the directory of the cluster.
Out: a running keeper process that holds the host's namespaces, and a real OpenSSH sshd inside.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests import watch
from tests.cluster.network import SSH_PORT, ClusterError

# Runs with the host's network. The root of the file system stays the machine's own, except for what makes a host:
# its passwd (and so the home directory), its hosts file, no name server, and a /run of its own.
_BOOT = """set -e
hostname "$1"
ip link set lo up
ip addr add "$2/24" dev eth0
ip link set eth0 up
mount --bind "$3/passwd" /etc/passwd
mount --bind "$3/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$3/resolv.conf" /etc/resolv.conf; fi
mount -t tmpfs -o mode=755,size=1m tmpfs /run
mkdir -m 755 /run/sshd
echo ready
exec sleep infinity
"""

_SSHD_CONFIG = """Port {port}
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {authorized}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
PidFile none
MaxStartups 500
MaxSessions 200
LogLevel VERBOSE
Subsystem sftp internal-sftp
SetEnv {variables}
"""


@dataclass(frozen=True)
class Machine:
    """One host: where it is, where its files are."""

    name: str
    number: int
    address: str
    netns: str
    directory: Path
    python_path: str = ""

    @property
    def home(self) -> Path:
        """The home directory of the user that SSH logs in as."""
        return self.directory / "home"

    @property
    def temporary(self) -> Path:
        """Where the host's programs keep what they do not clean up when they are killed."""
        return self.directory / "tmp"

    @property
    def variables(self) -> dict[str, str]:
        """What every login has in its environment, of this host's own."""
        python_path = {"PYTHONPATH": self.python_path} if self.python_path else {}
        if watch.HELD in os.environ:
            python_path = {**watch.variables(self.python_path), watch.HELD: os.environ[watch.HELD]}
        return {"TMPDIR": str(self.temporary), **python_path}

    @property
    def sshd_log(self) -> Path:
        """What the host's sshd has to say."""
        return self.directory / "sshd.log"

    @property
    def known_hosts_line(self) -> str:
        """The line of this host for a known_hosts file."""
        return f"{self.name},{self.address} {(self.directory / 'host_key.pub').read_text().strip()}"


def make_key(path: Path) -> None:
    """Write a new ed25519 key as `path` (mode 0600) and `path`.pub, as ssh-keygen would."""
    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def make_files(machine: Machine, hosts_file: str, authorized_keys: Path) -> None:
    """Write all files of a host that do not exist before its first boot."""
    machine.home.mkdir(parents=True, mode=0o700)
    machine.temporary.mkdir()
    make_key(machine.directory / "host_key")
    (machine.directory / "passwd").write_text(user_list(machine.home))
    (machine.directory / "hosts").write_text(hosts_file)
    (machine.directory / "resolv.conf").write_text("")
    (machine.directory / "sshd_config").write_text(
        _SSHD_CONFIG.format(
            port=SSH_PORT,
            address=machine.address,
            directory=machine.directory,
            authorized=authorized_keys,
            variables=" ".join(f"{name}={value}" for name, value in machine.variables.items()),
        )
    )


def user_list(home: Path) -> str:
    """Return the machine's own user list, in which the present user lives elsewhere."""
    user = pwd.getpwuid(os.getuid()).pw_name
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) == 7:
            fields[5] = str(home)
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def boot(machine: Machine) -> subprocess.Popen[bytes]:
    """Start the host's keeper; `await_booted` waits for it."""
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", machine.netns, "unshare", "--uts"),
            *("sh", "-c", _BOOT, "boot", machine.name, machine.address, str(machine.directory)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
    )


def await_booted(machine: Machine, keeper: subprocess.Popen[bytes]) -> None:
    """Wait until the host's namespaces are complete; raises ClusterError with what went wrong in them."""
    if keeper.stdout is None:
        raise ClusterError(f"{machine.name}: the keeper has no output")
    with keeper.stdout as output:
        line = output.readline()
        if line != b"ready\n":
            raise ClusterError(f"{machine.name} does not boot: {(line + output.read()).decode().strip()}")


def enter(keeper_pid: int) -> list[str]:
    """The command prefix that runs something on the host."""
    return ["nsenter", "--target", str(keeper_pid), "--net", "--uts", "--mount"]


def start_sshd(machine: Machine, keeper_pid: int) -> subprocess.Popen[bytes]:
    """Start the host's sshd; `await_sshd` waits for it."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None:
        raise ClusterError("no sshd: apt-get install openssh-server")
    config = str(machine.directory / "sshd_config")
    return subprocess.Popen(
        [*enter(keeper_pid), sshd, "-D", "-f", config, "-E", str(machine.sshd_log)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    )


def await_sshd(machine: Machine, deadline_s: float = 10.0) -> None:
    """Wait until the host answers with an SSH banner; raises ClusterError with sshd's own log."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            with socket.create_connection((machine.address, SSH_PORT), timeout=deadline_s) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        if time.monotonic() > end:
            log = machine.sshd_log.read_text() if machine.sshd_log.exists() else "(no log)"
            raise ClusterError(f"{machine.name} ({machine.address}) has no sshd after {deadline_s:g} s: {log}")
        time.sleep(0.004)  # nothing announces that another namespace's port is open


def environment(machine: Machine) -> dict[str, str]:
    """The environment of a login on the host, for commands that do not come in through SSH."""
    user = pwd.getpwuid(os.getuid())
    return {
        "HOME": str(machine.home),
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        **machine.variables,
    }
