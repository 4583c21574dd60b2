"""Commands of a job behind a bastion and a host that ask, on a terminal: what is asked, refused, kept and left behind.

In: two hosts behind a bastion with a second factor, of which the second asks for a password, too; all by the ssh
program. Out: questions that a terminal or the screen shows; logins, processes, sockets and secrets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.door import FACTORS, PASSWORD_ALONE, Door, Operator, Server
from tests.cluster.inventory import write_inventory
from tests.cluster.job import until
from tests.contract.test_ssh_sessions import secrets_found, ssh_processes, unix_sockets, watched
from tests.ports import reserved_port
from tests.screens.test_pty import Terminal
from tests.stub import STUB

HOSTS = ("gpu1", "gpu2")
JOB = "walk"
WAIT_S = 30.0
GONE_S = 10.0
UNREACHABLE = 3
# What a node has for a job; two of them cannot share it.
OWN = f"SetEnv PYTHONPATH={STUB} SUPERVISOR_HOME={{directory}}/node"
CODES = re.compile(r"\x1b(?:\[[0-9;:?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[=>78M])")
# It runs until it is stopped; "version 1" is what an edit changes.
SCRIPT = """
import os, time
for step in range(1, 1_000_000):
    print(f"version 1 of rank {os.environ['RANK']} step={step}", flush=True)
    time.sleep(0.05)
"""


class Window(Terminal):
    """A command on a terminal of its own."""

    @property
    def text(self) -> str:
        """All that it has shown since `forget`, without the codes between."""
        return CODES.sub("", self.seen.decode("utf-8", "replace"))

    def forget(self) -> None:
        """Forget what it has shown."""
        self.seen = b""

    def until(self, *wanted: str, count: int = 1, seconds: float = WAIT_S) -> None:
        """Read until it has shown each of these so often."""
        end = time.monotonic() + seconds
        while not all(self.text.count(one) >= count for one in wanted):
            is_over = time.monotonic() > end or self.process.poll() is not None
            assert not is_over, f"no {wanted}: {self.text[-3000:]}"
            self._read(time.monotonic() + 0.1)

    def shows(self, pattern: str) -> bool:
        """Read a little, and return whether it has shown a text like this."""
        self._read(time.monotonic() + 0.1)
        return re.search(pattern, self.text) is not None

    def ends_with_one(self, text: str) -> int:
        """Read until the command has ended, which may show this only once until then; returns its status."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            assert self.text.count(text) <= 1, self.text
            self._read(time.monotonic() + 0.1)
        return self.wait_for_end()

    def answer(self, question: str, typed: str, times: int = 1) -> None:
        """Answer a question each time that it is put."""
        for count in range(1, times + 1):
            self.until(question, count=count)
            self.send(typed.encode())

    def press(self, keys: str, *wanted: str) -> None:
        """Type, and wait until it has shown all of these after that."""
        self.forget()
        self.send(keys.encode())
        self.until(*wanted)


@contextmanager
def on_terminal(operator: Operator, command: Sequence[str], columns: int = 120, lines: int = 40) -> Iterator[Window]:
    """Run a command inside, on a terminal that is its own, in the directory of the script."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", *operator.door.entered, "env", "-C", str(operator.hosts.parent), *command],
        env={**operator.environment, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "TZ": "UTC"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        yield Window(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@dataclass(frozen=True)
class Site:
    """What the operator finds: servers, an inventory, a script."""

    operator: Operator
    bastion: Server
    hosts: tuple[Server, Server]

    @property
    def door(self) -> Door:
        """The place of all servers."""
        return self.operator.door

    @property
    def of_bastion(self) -> str:
        """What ssh asks for the bastion."""
        return f"(root@{self.bastion.address}) Password:"

    @property
    def of_second(self) -> str:
        """What ssh asks for the second host."""
        return f"root@{self.hosts[1].address}'s password:"

    @property
    def typed(self) -> str:
        """The right answer to both, with its enter."""
        return f"{self.door.password}\n"

    @property
    def nodes(self) -> list[Path]:
        """The SUPERVISOR_HOME of each host."""
        return [server.directory / "node" for server in self.hosts]

    @property
    def places(self) -> list[Path]:
        """Where supervisor could keep something: here, on the nodes, and for the time being."""
        names = ("TMPDIR", "XDG_STATE_HOME")
        return [self.door.home, self.door.run, *self.nodes, *(Path(self.operator.variables[name]) for name in names)]

    def logins(self) -> list[int]:
        """Return how often the bastion and each host have been logged in to."""
        return [server.logins() for server in (self.bastion, *self.hosts)]

    def since(self, before: Sequence[int]) -> list[int]:
        """Return how often they have been logged in to since then."""
        return [now - then for now, then in zip(self.logins(), before, strict=True)]

    def sockets(self) -> list[str]:
        """Return the sockets of the operator's ssh."""
        return unix_sockets(self.door.home, self.door.run, Path(self.operator.variables["TMPDIR"]))

    def command(self, verb: str, *words: str) -> list[str]:
        """Return the command line of a verb with the inventory."""
        return [sys.executable, "-m", "supervisor", verb, str(self.operator.hosts), *words]

    def terminal(self, *words: str, lines: int = 40) -> contextlib.AbstractContextManager[Window]:
        """Run a verb on a terminal."""
        return on_terminal(self.operator, self.command(*words), lines=lines)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a verb without a terminal; it must succeed."""
        done = self.operator.run(*self.command(*words))
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def launch(self) -> None:
        """Launch the job, and answer both questions."""
        with self.terminal("up", "--detach", "--job", JOB, "train.py") as tty:
            tty.answer(self.of_bastion, self.typed)
            tty.answer(self.of_second, self.typed)
            assert tty.wait_for_end() == 0, tty.text

    def exit_masters(self, *names: str) -> None:
        """End the logins to these servers, all without names, as `ssh -O exit` does."""
        masters = [words for pid in ssh_processes(self.door) if "-M" in (words := _words(pid))]
        # Without the bastion's, those of the hosts behind it would end by themselves.
        for words in sorted(masters, key=lambda words: words[-1] == "bastion"):
            if not names or words[-1] in names:
                done, _ = self.operator.ssh("-F", "none", "-S", words[words.index("-S") + 1], "-O", "exit", "any")
                assert done.returncode == 0, done.stdout


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def _helpers(door: Door) -> list[int]:
    """Return the processes that wait for an answer: the text of the program is on their command line."""
    return [pid for pid in door.pids() if any("SUPERVISOR_ASKPASS" in word for word in _words(pid))]


def _give_home(server: Server) -> None:
    """Give a server the agent in a SUPERVISOR_HOME of its own."""
    shutil.copytree(server.directory.parent / "node", server.directory / "node")


@pytest.fixture
def site(operator: Operator) -> Site:
    """Two hosts behind a bastion; it and the second host ask."""
    door = operator.door
    first = door.server("gpu1", OWN, prepare=_give_home)
    second = door.server("locked", f"{PASSWORD_ALONE}\n{OWN}", at="gpu2", prepare=_give_home)
    made = Site(operator, door.server("guarded", FACTORS, at="bastion"), (first, second))
    temporary, state = door.directory / "tmp", door.directory / "state"
    old = [home / name for home in made.nodes for name in ("jobs", "trees")]
    for directory in (temporary, state, *old):
        shutil.rmtree(directory, ignore_errors=True)
    temporary.mkdir()
    operator.variables |= {"TMPDIR": str(temporary), "XDG_STATE_HOME": str(state)}
    servers = (made.bastion, first, second)
    key = operator.key(lets_in=servers)
    operator.write("known_hosts", "".join(server.known_as() for server in servers))
    _configure(operator, "User root", f"IdentityFile {key}", f"Host {' '.join(HOSTS)}", "  ProxyJump bastion")
    _append(operator, *servers)
    job = {"nproc_per_node": 1, "standby": "off", "stop_grace": 3.0, "hang_after": 0.0}
    hosts = [{"name": name, "python": sys.executable} for name in HOSTS]
    write_inventory(operator.hosts, job, {"via": "openssh"}, hosts)
    (operator.hosts.parent / "train.py").write_text(SCRIPT)
    return made


def _configure(operator: Operator, *lines: str) -> None:
    operator.write("config", "".join(f"{line}\n" for line in lines))


def _append(operator: Operator, *servers: Server) -> None:
    """Say in the configuration where servers are."""
    for server in servers:
        operator.append("config", f"Host {server.name}\n  HostName {server.address}\n  Port {server.port}\n")


@contextmanager
def own_master(operator: Operator) -> Iterator[Callable[[], bool]]:
    """A connection of the user's own to another server, ended at last; yields whether it is alive."""
    server = operator.door.server("own", at="gate")
    shutil.copyfile(operator.ssh_directory / "id_test.pub", server.directory / "authorized_keys")
    operator.append("known_hosts", server.known_as())
    _append(operator, server)
    operator.append("config", "  ControlPath ~/.ssh/%C\n")
    opened, asked = operator.ssh("-fNM", "gate")
    assert (opened.returncode, asked) == (0, []), opened.stdout
    try:
        yield lambda: operator.ssh("-O", "check", "gate")[0].returncode == 0
    finally:
        operator.ssh("-O", "exit", "gate")


# A day's work


def test_a_job_from_its_launch_to_its_end_with_one_answer_for_each_server(site: Site) -> None:
    before = site.logins()
    with own_master(site.operator) as is_alive:
        own = set(ssh_processes(site.door)), site.sockets()
        with site.terminal("up", "--detach", "--job", JOB, "train.py") as tty:
            tty.answer(site.of_bastion, site.typed)
            tty.answer(site.of_second, site.typed)
            assert tty.wait_for_end() == 0, tty.text
            assert (tty.text.count(site.of_bastion), tty.text.count(site.of_second)) == (1, 1)
            assert f"gpu2: {site.of_second}" in tty.text
            shown = tty.text
        with site.terminal("logs", "-f", JOB) as tty:
            tty.until("version 1 of rank 0", "version 1 of rank 1")
            tty.send(b"\x03")
            assert tty.wait_for_end() == 130
            shown += tty.text
        script = site.operator.hosts.parent / "train.py"
        script.write_text(SCRIPT.replace("version 1", "version 2"))
        with site.terminal("restart", JOB, "--sync") as tty:
            assert tty.wait_for_end() == 0, tty.text
            shown += tty.text
        with site.terminal("attach", JOB) as tty:
            tty.until("RUNNING", "version 2 of rank 0", "version 2 of rank 1")
            _shell(tty)
            _forward(tty)
            tty.leave()
            shown += tty.text
        assert "job stopped" in site.run("stop", JOB).stdout
        # The login of each server is the first one, and nothing has been asked again.
        assert site.since(before) == [1, 1, 1]
        assert shown.lower().count("password:") == 2
        assert "removed walk on gpu1 gpu2" in site.run("clean").stdout
        assert site.since(before) == [1, 1, 1]
        until(lambda: (set(ssh_processes(site.door)), site.sockets()) == own, "something of ssh is left")
        assert is_alive(), "the user's own connection has been closed"
    until(lambda: (ssh_processes(site.door), site.sockets()) == ({}, []), "the user's own connection stays")


def _shell(tty: Window) -> None:
    """Open a shell on the node, run something there, and return."""
    tty.press("B", "exit returns to the screen", "# ")
    tty.press("echo marker-$((40+2))\r", "marker-42")
    tty.press("exit\r", "RUNNING")


def _forward(tty: Window) -> None:
    """Forward a port, and send something through it."""
    with socket.create_server(("127.0.0.1", 0)) as server, reserved_port() as here:
        server.settimeout(WAIT_S)
        there = server.getsockname()[1]
        tty.press("F", "forward a port of", "6006")
        tty.press("\x7f" * len("6006") + f"{here}:{there}\r", f"http://127.0.0.1:{here}")
        with socket.create_connection(("127.0.0.1", here), WAIT_S) as client:
            client.sendall(b"abc")
            # The first connection only looks whether anybody listens.
            received = b""
            while not received:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(WAIT_S)
                    received = connection.recv(16)
                    connection.sendall(received[::-1])
            assert (received, client.recv(16)) == (b"abc", b"cba")


# Secrets


def test_no_answer_is_found_anywhere_right_or_wrong(site: Site) -> None:
    right, wrong = site.door.password, f"wrong-{os.urandom(6).hex()}"
    bundle, report = site.door.home / "walk.zip", site.door.home / "report.md"
    with watched([right, wrong], *site.places) as seen:
        with site.terminal("up", "--detach", "--job", JOB, "train.py") as tty:
            tty.answer(site.of_bastion, f"{wrong}\n")
            tty.until(site.of_bastion, count=2)
            tty.send(site.typed.encode())
            tty.answer(site.of_second, f"{wrong}\n")
            tty.until(site.of_second, count=2)
            tty.send(site.typed.encode())
            assert tty.wait_for_end() == 0, tty.text
            shown = tty.text
        for words in (["report", JOB, "--bundle", str(bundle)], ["report", JOB, "-o", str(report)], ["logs", JOB]):
            shown += site.run(*words).stdout
    assert seen == set()
    assert secrets_found([right, wrong], *site.places) == []
    with zipfile.ZipFile(bundle) as file:
        shown += "".join(file.read(name).decode("utf-8", "replace") for name in file.namelist())
    assert "version 1 of rank 0" in shown
    assert [secret for secret in (right, wrong) if secret in shown] == []


# A sudden end


def test_killed_while_a_question_is_open(site: Site) -> None:
    with site.terminal("check") as tty:
        tty.until(site.of_bastion)
        assert (len(_helpers(site.door)), bool(ssh_processes(site.door))) == (1, True)
        tty.process.kill()
        until(lambda: not _helpers(site.door) and not ssh_processes(site.door), "ssh or its helper stays", GONE_S)
    with site.terminal("check") as tty:
        tty.answer(site.of_bastion, site.typed)
        tty.answer(site.of_second, site.typed)
        assert tty.wait_for_end() == 0, tty.text


def test_a_login_that_was_killed_is_made_again_once(site: Site) -> None:
    for count in (1, 2):
        with site.terminal("check") as tty:
            tty.answer(site.of_bastion, site.typed)
            tty.answer(site.of_second, site.typed)
            assert tty.wait_for_end() == 0, tty.text
        masters = [pid for pid in ssh_processes(site.door) if "-M" in _words(pid)]
        assert len(masters) == len(HOSTS) + 1, count
        for pid in masters:
            # Its socket stays.
            os.kill(pid, signal.SIGKILL)
        until(lambda: not ssh_processes(site.door), "ssh stays", GONE_S)
    # Nobody answers, and nobody may be asked: what is left ends all the same.
    assert site.operator.run(*site.command("clean")).returncode == UNREACHABLE
    assert site.sockets() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_question_that_is_interrupted_leaves_the_terminal_as_it_was(site: Site, number: signal.Signals) -> None:
    with site.terminal("check") as tty:
        tty.until(site.of_bastion)
        until(lambda: not _echoes(tty), "what is typed is shown")
        tty.process.send_signal(number)
        assert tty.wait_for_end() != 0
        assert _echoes(tty), (tty.process.returncode, tty.text)
    until(lambda: not ssh_processes(site.door), "ssh stays", GONE_S)


def test_a_question_comes_again_after_a_stop_and_the_answer_is_not_shown(site: Site) -> None:
    with site.terminal("check") as tty:
        tty.until(site.of_bastion)
        until(lambda: not _echoes(tty), "what is typed is shown")
        tty.process.send_signal(signal.SIGSTOP)
        # A shell would set the terminal as it likes it.
        shown = termios.tcgetattr(tty.master)
        shown[3] |= termios.ECHO
        termios.tcsetattr(tty.master, termios.TCSANOW, shown)
        tty.process.send_signal(signal.SIGCONT)
        tty.until(site.of_bastion, count=2)
        assert not _echoes(tty)
        tty.send(site.typed.encode())
        tty.answer(site.of_second, site.typed)
        assert tty.wait_for_end() == 0, tty.text
        assert site.door.password not in tty.text


def _echoes(tty: Window) -> bool:
    return bool(termios.tcgetattr(tty.master)[3] & termios.ECHO)


def test_a_second_command_waits_for_the_answer_to_the_first(site: Site) -> None:
    before = site.logins()
    with site.terminal("check") as first:
        first.until(site.of_bastion)
        with site.terminal("check") as second:
            second.until("hosts: ")
            first.send(site.typed.encode())
            first.answer(site.of_second, site.typed)
            assert (first.wait_for_end(), second.wait_for_end()) == (0, 0), second.text
            assert site.of_bastion not in second.text
    assert site.since(before)[0] == 1


def test_killed_while_logins_are_open(site: Site) -> None:
    site.launch()
    before = set(site.door.pids())
    with site.terminal("logs", "-f", JOB) as tty:
        tty.until("version 1 of rank 0", "version 1 of rank 1")
        here = {tty.process.pid, *ssh_processes(site.door)}
        bridges = {pid for pid in site.door.pids() if any(word.endswith(".pyz") for word in _words(pid))}
        bridges -= before | here
        assert len(bridges) >= len(HOSTS), {pid: _words(pid) for pid in set(site.door.pids()) - before}
        tty.process.kill()
        until(lambda: not bridges & set(site.door.pids()), "a bridge stays on its node", GONE_S)

    def masters() -> dict[str, list[str]]:
        found = [_words(pid) for pid in ssh_processes(site.door)]
        return {words[-1]: words for words in found if words[1:4] == ["-f", "-N", "-M"]}

    def is_quiet() -> bool:
        # Each host's master reaches the bastion through a process of its own.
        others = [words for pid in ssh_processes(site.door) if "-M" not in (words := _words(pid))]
        return all("-W" in words and words[-1] == "jump" for words in others) and len(others) == len(HOSTS)

    until(is_quiet, f"more than masters: {ssh_processes(site.door)}", GONE_S)
    assert masters().keys() == {"bastion", *HOSTS}
    assert [name for name, words in masters().items() if not _persists(words)] == []
    site.exit_masters()
    until(lambda: (ssh_processes(site.door), site.sockets()) == ({}, []), "a master stays", GONE_S)


def _persists(words: Sequence[str]) -> bool:
    return any(re.fullmatch(r"ControlPersist=[1-9]\d*", word) for word in words)


# Refusals


def test_three_wrong_answers_are_about_their_host_alone(site: Site) -> None:
    with site.terminal("check") as tty:
        tty.answer(site.of_bastion, site.typed)
        tty.answer(site.of_second, "a wrong password\n", times=3)
        assert tty.wait_for_end() == UNREACHABLE, tty.text
        assert (tty.text.count(site.of_bastion), tty.text.count(site.of_second)) == (1, 3)
        assert tty.text.count("gpu2: Permission denied, please try again.") == 2
    lines = [line for line in tty.text.splitlines() if "auth refused" in line]
    assert len(lines) == 1, tty.text
    assert "gpu2" in lines[0]
    assert "gpu1" not in lines[0]
    # The first host and the bastion are logged in to: only the second one is asked about.
    with site.terminal("jobs") as tty:
        tty.answer(site.of_second, "a wrong password\n", times=3)
        assert tty.wait_for_end() == 0, tty.text
        assert "no jobs" in tty.text
        assert "gpu2: auth" in tty.text
        assert tty.text.count("assword:") == 3


def test_without_a_terminal_the_question_is_quoted_with_what_helps(site: Site) -> None:
    done = site.operator.run(*site.command("check"))
    said = done.stdout + done.stderr
    assert done.returncode == UNREACHABLE, said
    assert said.count(f"“{site.of_bastion}”") == 1, said
    assert all(word in said for word in ("gpu", "bastion", "in a terminal", "ssh-agent")), said
    assert ssh_processes(site.door) == {}


def test_the_end_of_the_input_is_no_answer(site: Site) -> None:
    with site.terminal("check") as tty:
        tty.answer(site.of_bastion, "\x04")
        assert tty.ends_with_one(f"bastion: {site.of_bastion} ") == UNREACHABLE, tty.text
        assert f"“{site.of_bastion}”, and there is no answer" in " ".join(tty.text.split()), tty.text
    assert ssh_processes(site.door) == {}


@pytest.fixture
def open_site(operator: Operator) -> list[Server]:
    """Two hosts without a bastion; the test says which key they let in, and which of theirs are known."""
    servers = [operator.door.server("gpu1", OWN, prepare=_give_home), operator.door.server("plain", at="gpu2")]
    _configure(operator, "User root", "IdentityFile ~/.ssh/id_test")
    _append(operator, *servers)
    operator.inventory(*HOSTS, via="openssh")
    return servers


def _check(operator: Operator) -> contextlib.AbstractContextManager[Window]:
    return on_terminal(operator, [sys.executable, "-m", "supervisor", "check", str(operator.hosts)])


# Host keys


@pytest.mark.parametrize("via", ["openssh", "auto"])
def test_a_changed_host_key_is_refused_and_never_asked_about(
    operator: Operator, open_site: list[Server], via: str
) -> None:
    first, second = open_site
    operator.key(lets_in=open_site)
    operator.inventory(*HOSTS, via=via)
    changed = first.known_as().replace(first.host_key, second.host_key)
    known = operator.write("known_hosts", changed + second.known_as())
    operator.append("config", "Host *\n  StrictHostKeyChecking no\n")
    before = [server.logins() for server in open_site]
    with _check(operator) as tty:
        assert tty.wait_for_end() == UNREACHABLE, tty.text
        assert "has changed" in tty.text
        assert "(yes/no" not in tty.text
    assert [server.logins() for server in open_site] == [before[0], before[1] + 1]
    assert known.read_text() == changed + second.known_as()


@pytest.mark.parametrize("via", ["openssh", "auto"])
def test_an_unknown_host_key_is_asked_about_whatever_the_configuration_says(
    operator: Operator, open_site: list[Server], via: str
) -> None:
    first, second = open_site
    operator.key(lets_in=open_site)
    operator.inventory(*HOSTS, via=via)
    known = operator.write("known_hosts", second.known_as())
    operator.append("config", "Host *\n  StrictHostKeyChecking no\n")
    with _check(operator) as tty:
        tty.answer("(yes/no", "no\n")
        assert tty.wait_for_end() == UNREACHABLE, tty.text
        assert tty.text.count("(yes/no") == 1, tty.text
    assert known.read_text() == second.known_as()
    with _check(operator) as tty:
        tty.answer("(yes/no", "yes\n")
        assert tty.wait_for_end() == 0, tty.text
        assert tty.text.count("(yes/no") == 1, tty.text
    assert first.host_key.split()[1] in known.read_text()


# The screen


def test_the_screen_asks_at_first_and_later_only_when_it_is_called(site: Site) -> None:
    site.launch()
    site.exit_masters()
    until(lambda: not ssh_processes(site.door), "a master stays")
    before = site.logins()
    with site.terminal("attach", JOB, lines=24) as tty:
        tty.until("ssh to jump host bastion", site.of_bastion)
        tty.press(site.typed.replace("\n", "\r"), "ssh to gpu2", site.of_second)
        assert site.door.password not in tty.text
        tty.press(site.typed.replace("\n", "\r"), "RUNNING", "version 1 of rank 1")
        assert site.door.password not in tty.text
        # Before its own connection is open, its lines come through the other host, and its questions are its first.
        until(lambda: site.since(before) == [1, 1, 1], "gpu2 is not connected")
        tty.press("2", "node gpu1")
        tty.press("\x1b[B", "node gpu2")

        def gpu2_answers() -> bool:
            # What has not changed since the other node was shown is not painted again.
            tty.press("3", "gpu2")
            tty.press("2", "node gpu2")
            return tty.shows("agent answers")

        until(gpu2_answers, "gpu2 is not connected")
        tty.forget()
        site.exit_masters("gpu2")
        tty.until("needs your answer")
        assert "ssh to gpu2" not in tty.text
        assert site.since(before) == [1, 1, 1]
        tty.press("A", "ssh to gpu2", site.of_second)
        tty.forget()
        tty.send(site.typed.replace("\n", "\r").encode())
        until(lambda: site.since(before) == [1, 1, 2], "gpu2 is not connected again")
        tty.press("3", "gpu2")
        assert site.door.password not in tty.text
        tty.leave()


def test_the_screen_does_without_a_host_that_gets_no_answer(site: Site) -> None:
    site.launch()
    site.exit_masters("gpu2")
    with site.terminal("attach", JOB, lines=24) as tty:
        tty.until("ssh to gpu2", site.of_second)
        # Had ssh asked again, there would be another dialog instead.
        tty.press("\x1b", "needs your answer")
        tty.press("A", "ssh to gpu2", site.of_second)
        tty.press(site.typed.replace("\n", "\r"), "version 1 of rank 1")
        tty.leave()
