"""OpenSSH on both ends of one machine: sshd on loopback addresses, and the files that ssh reads about users and names.

In: nothing but root rights, for a mount namespace. Out: `Door`: servers, the operator's home, what the tests type into
ssh; and commands inside, also on a terminal that answers questions. All of it is ended and removed at the end.
"""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select

from tests import known_torch
from tests.cluster.inventory import write_inventory
from tests.cluster.leftovers import MARK
from tests.cluster.machine import make_key, user_list
from tests.cluster.network import ClusterError, await_ends, process_state
from tests.cluster.prepared import prepared
from tests.ports import reserved_port
from tests.scratch import OUTER
from tests.stub import STUB

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DOMAIN = "lab.test"
ADDRESSES = {"gpu1": "127.0.0.2", "gpu2": "127.0.0.3", "bastion": "127.0.0.4", "gate": "127.0.0.5"}
"""The servers there can be; each has its name in the domain, and no other name resolves."""
DEADLINE_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]

# /run and /var/log are the namespace's own: sshd's directory, and its notes of logins and of wrong passwords.
_BOOT = """set -e
mount --make-rprivate /
for name in passwd shadow hosts resolv.conf ssh/ssh_config pam.d/sshd; do
    if [ -e "/etc/$name" ]; then mount --bind "$1/$(basename "$name").etc" "/etc/$name"; fi
done
mount -t tmpfs -o mode=755,size=1m tmpfs /run
mount -t tmpfs -o mode=755,size=1m tmpfs /var/log
mkdir -m 755 /run/sshd
echo ready
exec sleep infinity
"""
_PAM = """auth required pam_unix.so nodelay
account required pam_unix.so
session required pam_permit.so
"""
# The first value of a key holds in sshd, so what a server has of its own comes first.
_SSHD_CONFIG = """{own}
Port {port}
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PermitRootLogin yes
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
SetEnv {variables}
"""
# Notes each question of ssh, and answers from a file; without one it refuses, as a user does who goes away.
_ASKPASS = """#!/bin/sh
printf '%s\\n' "$1" >>{asked}
exec cat {answer}
"""
FACTORS = "AuthenticationMethods publickey,keyboard-interactive\nKbdInteractiveAuthentication yes\nUsePAM yes"
"""What makes a server ask for the password after the key."""
PASSWORD_ALONE = "AuthenticationMethods password\nPasswordAuthentication yes\nUsePAM yes"


@functools.lru_cache(maxsize=1)
def door_obstacle() -> str | None:
    """Why there can be no `Door` here, for a skip; None when there can."""
    if not Path("/proc/self/ns/mnt").exists():
        return "the servers are in a mount namespace: Linux only"
    if os.geteuid() != 0:
        return "the servers are in a mount namespace: needs root"
    wanted = {"sshd": "openssh-server", "openssl": "openssl"}
    wanted |= dict.fromkeys(("ssh", "ssh-agent", "ssh-add", "ssh-keygen"), "openssh-client")
    wanted |= dict.fromkeys(("unshare", "nsenter", "setsid", "setpriv"), "util-linux")
    missing = sorted({package for program, package in wanted.items() if shutil.which(program, path=PATH) is None})
    if missing:
        return f"apt-get install {' '.join(missing)}"
    # Root of a container may lack the rights.
    probe = "mount --make-rprivate / && mount --bind /etc/hosts /etc/passwd && mount -t tmpfs tmpfs /run"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"test -e /etc/pam.d/sshd && {probe}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return None if done.returncode == 0 else f"nothing can be mounted here: {done.stderr.strip()}"


@dataclass(frozen=True)
class Server:
    """One sshd: where it listens, where its files are."""

    name: str
    address: str
    port: int
    directory: Path

    @property
    def full_name(self) -> str:
        """Its name in the domain, which resolves."""
        return f"{self.name}.{DOMAIN}"

    @property
    def host_key(self) -> str:
        """The public half of its host key."""
        return (self.directory / "host_key.pub").read_text().strip()

    @property
    def log(self) -> Path:
        """What sshd has to say."""
        return self.directory / "sshd.log"

    def known_as(self, *names: str) -> str:
        """Return the line of its key for a known_hosts file, under its address or under these names instead."""
        places = ",".join(f"[{name}]:{self.port}" for name in names or (self.address,))
        return f"{places} {self.host_key}\n"

    def logins(self) -> int:
        """Return how many connections have logged in: sshd calls all factors but the last one partial."""
        return len(re.findall(r"^Accepted \S+ for ", self.log.read_text(), re.MULTILINE))


@dataclass(frozen=True)
class Spoken:
    """What a program has done on a terminal: how it ended, all that it wrote, how often it was answered."""

    status: int
    text: str
    answers: int


class Door:
    """`with Door() as door: …`: a place with its own passwd, shadow, hosts and PAM; `server` starts an sshd in it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._namespace = (0, 0)
        self._keeper = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._servers: dict[str, Server] = {}
        self.directory = Path()
        self.password = ""

    # Life

    def __enter__(self) -> Door:
        try:
            # Sockets lie below it, so the path is short.
            self.directory = Path(tempfile.mkdtemp(prefix="door-"))
            self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self._stack.callback(self._end_all)
            self._make_files()
            self._boot()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _make_files(self) -> None:
        self.password = f"pass-{os.urandom(6).hex()}"
        hashed = subprocess.run(
            ["openssl", "passwd", "-6", "-stdin"], input=self.password, capture_output=True, text=True, check=True
        )
        # ssh asks for names of CanonicalDomains with a dot at their end, and only DNS knows what that means.
        names = [f"{address} {name}.{DOMAIN} {name}.{DOMAIN}." for name, address in ADDRESSES.items()]
        files = {
            "passwd": user_list(self.home),
            "shadow": f"root:{hashed.stdout.strip()}:19000:0:99999:7:::\n",
            "hosts": "\n".join(["127.0.0.1 localhost", *names, ""]),
            "resolv.conf": "",
            "ssh_config": "",
            "sshd": _PAM,
        }
        for name, text in files.items():
            file = self.directory / f"{name}.etc"
            file.touch(mode=0o600 if name == "shadow" else 0o644)
            file.write_text(text)
        shutil.copytree(prepared(), self.node)
        known_torch.lend(self.node)

    def _boot(self) -> None:
        keeper = self._start(["unshare", "--mount", "sh", "-c", _BOOT, "boot", str(self.directory)])
        assert keeper.stdout is not None
        with keeper.stdout as output:
            line = output.readline()
            if line != b"ready\n":
                raise ClusterError(f"no namespace: {(line + output.read()).decode().strip()}")
        self._keeper = keeper.pid
        found = os.stat(f"/proc/{keeper.pid}/ns/mnt")
        self._namespace = (found.st_ino, found.st_dev)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],  # it ends with the tests, also when those are killed
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PATH": PATH, MARK: os.environ.get(MARK, "")},
        )
        self._children.append(process)
        return process

    def end_commands(self) -> None:
        """SIGKILL what runs inside until only the servers do; raises ClusterError when something cannot be ended."""
        self._end({child.pid for child in self._children})

    def _end(self, kept: Collection[int] = ()) -> None:
        end = time.monotonic() + 10
        while pids := [pid for pid in self.pids() if pid not in kept]:
            if time.monotonic() > end:
                raise ClusterError(f"processes {pids} of {self.directory} do not end")
            for pid in pids:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            await_ends(pids, 0.1)  # a child forked meanwhile is seen only by looking again

    def _end_all(self) -> None:
        self._end()
        for child in self._children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        known_torch.keep(self.node)

    # What is where

    @property
    def home(self) -> Path:
        """The home directory of root inside, which is the operator and whom the servers log in."""
        return self.directory / "home"

    @property
    def node(self) -> Path:
        """SUPERVISOR_HOME of all servers."""
        return self.directory / "node"

    @property
    def run(self) -> Path:
        """XDG_RUNTIME_DIR of the operator."""
        return self.directory / "run"

    @property
    def keeper_pid(self) -> int:
        """The process that holds the namespace."""
        return self._keeper

    def pids(self) -> list[int]:
        """Return the living processes inside, the keeper and sshd too."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                its = os.stat(f"/proc/{entry}/ns/mnt") if entry.isdigit() else None
            except OSError:
                continue
            if its and (its.st_ino, its.st_dev) == self._namespace and process_state(int(entry)) not in {"Z", "X", ""}:
                found.append(int(entry))
        return sorted(found)

    # Servers

    def server(
        self, name: str, own: str = "", *, at: str = "", prepare: Callable[[Server], None] | None = None
    ) -> Server:
        """Return the sshd of that name at the address of `at` (default: the same name), started if it is new.

        `own` are lines of its configuration, `{directory}` in them its directory, which `prepare` fills before it
        starts; every caller of a name gives the same ones. `Operator.key` says which key it lets in.
        """
        if name not in self._servers:
            place = at or name
            port = self._stack.enter_context(reserved_port(host=ADDRESSES[place]))
            server = Server(place, ADDRESSES[place], port, self.directory / name)
            server.directory.mkdir()
            make_key(server.directory / "host_key")
            if prepare is not None:
                prepare(server)
            self._serve(server, own)
            self._servers[name] = server
        return self._servers[name]

    def _serve(self, server: Server, own: str) -> None:
        config = _SSHD_CONFIG.format(
            own=own.format(directory=server.directory),
            port=server.port,
            address=server.address,
            directory=server.directory,
            variables=f"PYTHONPATH={STUB} SUPERVISOR_HOME={self.node}",
        )
        (server.directory / "sshd_config").write_text(config)
        program = shutil.which("sshd", path=PATH)
        assert program is not None
        words = [program, "-D", "-f", str(server.directory / "sshd_config"), "-E", str(server.log)]
        process = self._start([*self.entered, *words])
        end = time.monotonic() + 10
        while not server.log.exists() or "Server listening" not in server.log.read_text():
            if time.monotonic() > end or process.poll() is not None:
                assert process.stdout is not None
                said = server.log.read_text() if server.log.exists() else process.stdout.read().decode()
                raise ClusterError(f"{server.directory} has no sshd: {said}")
            time.sleep(0.004)  # nothing announces a line in a log

    @property
    def entered(self) -> list[str]:
        """The words before those of a command that runs inside, in the operator's home."""
        return ["nsenter", "--target", str(self._keeper), "--mount", f"--wd={self.home}"]


class Operator:
    """Who uses ssh at a door: a new home with a configuration, keys and agents, until the `with` block ends."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.variables: dict[str, str] = {}
        """What is more in the environment of the operator's commands."""
        self._agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Operator:
        for folder in (self.door.home, self.door.run):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        self.ssh_directory.mkdir(mode=0o700)
        (self.door.home / "work").mkdir()
        return self

    def __exit__(self, *_error: object) -> None:
        for agent in self._agents:
            agent.terminate()
            agent.wait()
        self.door.end_commands()

    # Files

    @property
    def ssh_directory(self) -> Path:
        """The operator's ~/.ssh."""
        return self.door.home / ".ssh"

    def write(self, name: str, text: str) -> Path:
        """Write a file of ~/.ssh, which only its owner can read."""
        file = self.ssh_directory / name
        file.touch(mode=0o600)
        file.write_text(text)
        return file

    def append(self, name: str, text: str) -> None:
        """Write more at the end of a file of ~/.ssh."""
        with (self.ssh_directory / name).open("a") as file:
            file.write(text)

    def key(self, name: str = "id_test", *, passphrase: str = "", lets_in: Sequence[Server] = ()) -> Path:
        """Make a key in ~/.ssh, the only one that these servers let in from now on."""
        file = self.ssh_directory / name
        if passphrase:
            # One round: the passphrase need not withstand anybody.
            keygen("-t", "ed25519", "-a", "1", "-N", passphrase, "-f", str(file))
        else:
            make_key(file)
        for server in lets_in:
            shutil.copyfile(f"{file}.pub", server.directory / "authorized_keys")
        return file

    def agent(self, *keys: Path) -> Path:
        """Start an ssh-agent with these keys, and return its socket."""
        path = self.door.directory / f"agent{len(self._agents)}"
        path.unlink(missing_ok=True)
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._agents.append(agent)
        assert agent.stdout is not None
        # It says where it listens once it does; its socket is there before that, and refuses a connection.
        with agent.stdout as said:
            assert os.fsencode(path) in said.readline()
            said.readline()
        environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        subprocess.run(["ssh-add", "-q", *map(str, keys)], env=environment, stdin=subprocess.DEVNULL, check=True)
        return path

    def inventory(self, *names: str, **more: object) -> Path:
        """Write a hosts.toml of hosts with these names (gpu1), and return its path; `more` are keys of each."""
        hosts = [{"name": name, "python": sys.executable, **more} for name in names or ("gpu1",)]
        return write_inventory(self.hosts, {}, {}, hosts)

    @property
    def hosts(self) -> Path:
        """The file that `inventory` writes."""
        return self.door.home / "work" / "hosts.toml"

    # Commands

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the operator's commands: of ours what does not lead ssh or supervisor elsewhere."""
        known = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SSH_", "SUPERVISOR_")) or name in (MARK, OUTER)
            if name not in ("DISPLAY", "NO_COLOR", "COLUMNS", "LINES")
        }
        ours = {"HOME": str(self.door.home), "XDG_RUNTIME_DIR": str(self.door.run), "PYTHONPATH": str(_ROOT)}
        return {**known, **ours, "USER": "root", "LOGNAME": "root", **self.variables}

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, without a terminal and with an empty input; `more` is added to its environment."""
        return subprocess.run(
            [*self.door.entered, *command],
            env={**self.environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def ssh(self, *words: str, answer: str | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run ssh, and return how it ended and what it has asked; each question gets the answer, or none at all."""
        with self.askpass(answer) as (variables, asked):
            # `ssh -f` leaves a process behind that keeps a pipe open.
            with tempfile.TemporaryFile("w+") as said:
                done = subprocess.run(
                    [*self.door.entered, "ssh", *words],
                    env={**self.environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                    timeout=DEADLINE_S,
                    check=False,
                )
                said.seek(0)
                text = said.read()
            questions = asked.read_text().splitlines() if asked.exists() else []
        return subprocess.CompletedProcess(done.args, done.returncode, text, ""), questions

    @contextmanager
    def askpass(self, answer: str | None) -> Iterator[tuple[Mapping[str, str], Path]]:
        """The variables by which ssh asks a program with that answer, and the file in which it notes the questions."""
        with tempfile.TemporaryDirectory(prefix="askpass-", dir=self.door.directory) as place:
            program, asked, told = (Path(place) / name for name in ("program", "asked", "answer"))
            program.touch(mode=0o700)
            program.write_text(_ASKPASS.format(asked=shlex.quote(str(asked)), answer=shlex.quote(str(told))))
            if answer is not None:
                told.write_text(f"{answer}\n")
            yield {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force"}, asked

    def supervisor(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run supervisor, without a terminal and with an empty input."""
        return self.run(sys.executable, "-m", "supervisor", *words)

    def supervisor_asked(self, *words: str, prompt: str, answer: str) -> Spoken:
        """Run supervisor on a terminal, and answer each time that it has shown the prompt."""
        return self.on_terminal([sys.executable, "-m", "supervisor", *words], prompt, answer)

    def on_terminal(self, command: Sequence[str], prompt: str, answer: str) -> Spoken:
        """Run a command inside on a terminal that is its own, and answer each time that it has shown the prompt."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        process = subprocess.Popen(
            ["setsid", "--ctty", *self.door.entered, *command],
            env={**self.environment, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        try:
            text, answers = _converse(master, prompt.encode(), f"{answer}\n".encode())
            return Spoken(process.wait(DEADLINE_S), text.decode("utf-8", "replace"), answers)
        finally:
            process.kill()
            process.wait()
            os.close(master)


def _converse(master: int, prompt: bytes, answer: bytes) -> tuple[bytes, int]:
    """Read until nobody has the terminal any more; return all of it, and how often the prompt was answered."""
    seen, answers, end = b"", 0, time.monotonic() + DEADLINE_S
    while True:
        ready = select([master], [], [], max(0.0, end - time.monotonic()))[0]
        assert ready, f"it neither ends nor asks: {seen.decode('utf-8', 'replace')[-2000:]}"
        try:
            some = os.read(master, 65536)
        except OSError:
            # The last process has closed the other end.
            return seen, answers
        seen += some
        while answers < seen.count(prompt):
            os.write(master, answer)
            answers += 1


def keygen(*words: str | Path) -> None:
    """Run ssh-keygen."""
    subprocess.run(["ssh-keygen", "-q", *words], stdin=subprocess.DEVNULL, capture_output=True, check=True)
