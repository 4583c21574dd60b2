"""Logging in by the ssh program: one shared connection (ControlMaster) for a host, or for a jump host.

In: Settings of a host and of the jump hosts before it. Out: a Login over which commands, terminals and ports are
opened, each by a process of its own; or a HostError with ssh's own words.

The user's own shared connection is used where one is open. Otherwise ssh makes a private one, which stays for PERSIST_S
after its last use, so that the next command need not log in, and ask, again. `clean` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shlex
import signal
import socket
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from supervisor.errors import HostError, SupervisorError, one_line
from supervisor.inventory import sshconfig
from supervisor.ssh import reasons
from supervisor.ssh.dial import CONNECT_DEADLINE_S
from supervisor.ssh.questions import Asking, questions, run_dir
from supervisor.ssh.reasons import NeedsAnswer
from supervisor.ssh.settings import chain, for_host
from supervisor.ssh.wires import LocalWire, end_at_once, end_process
from supervisor.standard_streams import write_err

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from supervisor.inventory import Host
    from supervisor.ssh.settings import Settings

    Progress = Callable[[str, str], None]

PERSIST_S = 600
# Another supervisor may stand at a question while it logs in; one that is suspended there never goes on.
OTHERS_S = 120.0
# For `ssh -O`, which asks a process of this machine.
CONTROL_DEADLINE_S = 5.0
LOOK_S = 0.1
SHOWN_LINES = 3
# Whatever ~/.ssh/config says about sessions: the shared connection has none of its own, and gives nothing of the
# operator's to the node.
OURS = (
    *("-o", f"ControlPersist={PERSIST_S}", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no"),
    *("-o", "ForwardX11=no", "-o", "RemoteCommand=none", "-o", "RequestTTY=no", "-o", "PermitLocalCommand=no"),
    *("-o", "Tunnel=no", "-o", "LogLevel=INFO", "-o", f"ConnectTimeout={CONNECT_DEADLINE_S:.0f}"),
    # A dead connection must not stand in the way of the next one for long.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_STEPS = (
    (re.compile("Could not resolve hostname"), "resolve"),
    (re.compile("Permission denied|Too many authentication failures|Disconnected from"), "auth"),
)
_NOISE = re.compile("Warning: Permanently added|Permission denied, please try again|@@@|^\\s*$")


class Login(NamedTuple):
    """A shared connection of ssh, by its socket."""

    path: str

    def words(self, *options: str) -> list[str]:
        """Return the command line of a process that uses this connection, and never makes one of its own."""
        program = sshconfig.program() or "ssh"
        return [program, "-F", "none", "-S", self.path, "-o", "ProxyCommand=false", *options]

    async def pass_on(self, host: str, port: int) -> tuple[socket.socket, asyncio.subprocess.Process]:
        """Return a socket that leads to a port of a host there, and the process behind it; raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.words("-W", f"[{host}]:{port}", "jump"),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return ours, process

    async def control(self, request: str) -> bool:
        """Send `check` or `stop` to the process that holds the connection; returns whether it answers."""
        if not os.path.exists(self.path):
            return False
        quiet = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *self.words("-O", request, "node"), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
            )
        except OSError:
            return False
        await end_process(process, (signal.SIGKILL,), CONTROL_DEADLINE_S)
        return process.returncode == 0


async def find(settings: Settings, jumps: Sequence[Settings]) -> Login | None:
    """Return the login that is open already: the user's own, or one of ours."""
    for path in filter(None, (settings.control_path, _path(settings, jumps))):
        login = Login(path)
        if await login.control("check"):
            return login
    return None


async def log_in(
    label: str, settings: Settings, jumps: Sequence[Settings], progress: Progress, *, may_ask: bool
) -> Login:
    """Return a login, made if there is none; raises HostError.

    `may_ask`: False to fail instead of asking, and not to try where something was asked before.
    """
    path = _path(settings, jumps)
    making = _makings().get(path)
    if making is None or making.task.done():
        work = asyncio.ensure_future(_make(path, settings, jumps, progress, may_ask))
        making = _makings()[path] = _Making(work, may_ask)
    making.waiting += 1
    try:
        # Others wait for the same login: cancelling one must not cancel it.
        return await asyncio.shield(making.task)
    except HostError as error:
        if isinstance(error, NeedsAnswer) and may_ask and not making.may_ask:
            return await log_in(label, settings, jumps, progress, may_ask=True)
        if error.host == label:
            raise
        raise type(error)(label, error.step, f"{error.host}: {error.reason}", error.hint) from error
    finally:
        making.waiting -= 1
        if not making.waiting and not making.task.done():
            making.task.cancel()
            await asyncio.gather(making.task, return_exceptions=True)


async def end_logins(hosts: Iterable[Host]) -> None:
    """End our logins to these hosts and to their jump hosts, as soon as nothing uses them."""
    paths: dict[str, None] = {}
    for host in hosts:
        with contextlib.suppress(SupervisorError):
            settings = for_host(host)
            ways = [*chain(host, settings), settings]
            paths.update(dict.fromkeys(_path(way, ways[:at]) for at, way in reversed([*enumerate(ways)])))
    for path in paths:
        file = _lock(path)
        if file is None:
            # Another supervisor logs in there just now.
            continue
        try:
            # The socket of one that was killed stays.
            if not await Login(path).control("stop"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            with contextlib.suppress(OSError):
                os.unlink(f"{path}.lock")
        finally:
            os.close(file)


def _path(settings: Settings, jumps: Sequence[Settings]) -> str:
    digests = "".join(one.digest for one in (*jumps, settings))
    return str(run_dir() / hashlib.sha256(digests.encode()).hexdigest()[:16])


@contextlib.asynccontextmanager
async def _alone(path: str, label: str, progress: Progress) -> AsyncIterator[None]:
    """Hold a login for one supervisor: a second ssh for the same socket would stay without one. Raises HostError."""
    file = _lock(path)
    if file is None:
        other = f"another supervisor{_holder(path)}"
        progress("connect", f"{other} logs in there")
        if not questions().on_demand:
            # Without a screen, nobody shows the progress of a login.
            write_err(f"supervisor: {label}: {other} logs in there; waiting for it\n")
        end = time.monotonic() + OTHERS_S
        # It may wait for its user.
        with questions().standing():
            while (file := _lock(path)) is None:
                if time.monotonic() > end:
                    reason = f"{other} has been logging in there for {OTHERS_S:.0f} s"
                    raise HostError(label, "connect", reason, "answer its question, or end it")
                await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: str) -> int | None:
    """Return the file that locks a login, None while another supervisor holds it."""
    while True:
        file = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed it.
            if os.path.samestat(os.fstat(file), os.stat(f"{path}.lock")):
                os.pwrite(file, b"%-20d" % os.getpid(), 0)
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except FileNotFoundError:
            pass
        os.close(file)


def _holder(path: str) -> str:
    """Return which process has locked a login, in words."""
    with contextlib.suppress(OSError), open(f"{path}.lock", encoding="ascii", errors="replace") as file:
        number = file.read(20).strip()
        return f" (process {number})" if number.isdecimal() else ""
    return ""


async def _make(path: str, settings: Settings, jumps: Sequence[Settings], progress: Progress, may_ask: bool) -> Login:
    async with _alone(path, settings.label, progress):
        login = await find(settings, jumps)
        if login is not None:
            return login
        again = [question for question in _asked.get(path, ()) if not questions().remembers(question)]
        if not may_ask and again:
            raise _unanswered(settings, one_line(again[-1]), may_ask)
        jump = None
        if jumps:
            jump = await log_in(settings.label, jumps[-1], jumps[:-1], progress, may_ask=may_ask)
        progress("connect", f"{settings.where} by ssh")
        # A socket on which nobody listens would keep ssh from making its own.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        await _run(path, settings, jump, progress, may_ask)
        return Login(path)


async def _run(path: str, settings: Settings, jump: Login | None, progress: Progress, may_ask: bool) -> None:
    """Run ssh until it has logged in and gone to the background; raises HostError."""
    asking = Asking(settings.label, may_ask, settings.marks_hosts)
    options = [*OURS]
    if jump is not None:
        options += ["-o", f"ProxyCommand={shlex.join(jump.words('-W', '[%h]:%p', 'jump'))}"]
    if not settings.checks_keys:
        options += ["-o", "StrictHostKeyChecking=ask"]
    words = [sshconfig.program() or "ssh", "-f", "-N", "-M", "-S", path, *options, *settings.target.options]
    async with questions().environment(asking) as environment:
        while True:
            asking.withdrawn = False
            status, output = await _end_of([*words, "--", settings.alias], environment, settings, asking.gave_up)
            if not asking.withdrawn:
                break
            # The server's patience ended while the user answered for another host.
    if asking.asked:
        _asked[path] = [question for question in asking.asked if "(yes/no" not in question]
    if status:
        raise _error(settings, output.decode(errors="replace"), asking)
    progress("auth", f"as {settings.user}")


async def _end_of(
    words: Sequence[str], environment: dict[str, str], settings: Settings, gave_up: asyncio.Event
) -> tuple[int, bytes]:
    """Return ssh's exit code and what it has printed; it is ended if `gave_up` is set. Raises HostError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise HostError(settings.label, "connect", f"ssh: {error.strerror}") from error
    output = asyncio.ensure_future(process.communicate())
    ends = (output, asyncio.ensure_future(gave_up.wait()))
    try:
        # ssh has a deadline of its own for the connection; the rest is for the handshake.
        await questions().wait_for(asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED), 2 * CONNECT_DEADLINE_S)
    except asyncio.TimeoutError:
        raise reasons.timeout_error(settings.label, "connect", 2 * CONNECT_DEADLINE_S, settings.where) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await end_process(process, (signal.SIGKILL,))
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
    return process.returncode or 0, b"" if output.cancelled() else output.result()[1]


def _error(settings: Settings, output: str, asking: Asking) -> HostError:
    """Return the error for a login that failed, in ssh's words."""
    if asking.unanswered and "(yes/no" in asking.unanswered:
        reason, hint = reasons.complaint(settings, "", None)
        return NeedsAnswer(settings.label, "connect", f"{reason}; ssh asks “{asking.unanswered}”", hint)
    if asking.unanswered:
        return _unanswered(settings, asking.unanswered, asking.may_ask)
    if "Host key verification failed" in output and "revoked" not in output:
        return HostError(settings.label, "connect", *reasons.complaint(settings, "", None))
    lines = [line for line in output.splitlines() if not _NOISE.search(line)]
    step = next((step for pattern, step in _STEPS if pattern.search(output)), "connect")
    # The line before the last may be that of a ProxyCommand.
    reason = one_line("\n".join(lines[-SHOWN_LINES:])) or "ssh failed without a word"
    if step == "auth":
        refused = reasons.auth_refused(settings)
        # Other answers may be right.
        kind = NeedsAnswer if asking.asked else HostError
        return kind(settings.label, step, f"{refused.reason}; ssh says: {reason}", refused.hint)
    by_hand = shlex.join(["ssh", *settings.target.options, settings.alias, "true"])
    return HostError(settings.label, step, reason, f"try by hand: {by_hand}")


def _unanswered(settings: Settings, question: str, may_ask: bool) -> NeedsAnswer:
    if not may_ask or questions().on_demand:
        hint = "press A on the screen, or run the command again in a terminal"
        return NeedsAnswer(settings.label, "auth", f"needs your answer to “{question}”", hint)
    hint = "run it in a terminal; or log in by hand with ControlMaster, or load the key into an ssh-agent, before"
    return NeedsAnswer(settings.label, "auth", f"ssh asks “{question}”, and there is no answer", hint)


class PortWriter:
    """What is sent to a port of a node, by a process of ssh."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        self._process = process
        self.write = process.stdin.write
        self.drain = process.stdin.drain
        self.write_eof = process.stdin.write_eof

    def close(self) -> None:
        """End the connection and the process."""
        end_at_once(self._process)


class OpenSshWire(LocalWire):
    """The command in a session over a login."""

    def __init__(self, process: asyncio.subprocess.Process, login: Login) -> None:
        super().__init__(process)
        self.words = login.words

    @classmethod
    async def open(cls, login: Login, command: str) -> OpenSshWire:
        """Run a command; raises OSError."""
        return cls(await cls.run(login.words("-T", "node", command)), login)

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, PortWriter]:
        """Connect to a port of the node; one on which nothing listens is closed at once. Raises OSError."""
        process = await self.run(self.words("-W", f"localhost:{port}", "node"))
        assert process.stdout is not None
        return process.stdout, PortWriter(process)


@dataclasses.dataclass
class _Making:
    """A login that is being made, and how many wait for it."""

    task: asyncio.Task[Login]
    may_ask: bool
    waiting: int = 0


_asked: dict[str, Sequence[str]] = {}
"""What logins have asked in this process and will ask again, by their socket."""
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Making]] = weakref.WeakKeyDictionary()


def _makings() -> dict[str, _Making]:
    return _by_loop.setdefault(asyncio.get_running_loop(), {})
