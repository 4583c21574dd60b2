"""The connection to one host.

In: a Host. Out: a NodeLink, whose channel answers `hello`, `jobs`, `tree_*`, `start`, `clean` and `open`; or a
HostError with the failed step and what to do next.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import shlex
import signal
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.wire import Args, CallFailed, WireError
from supervisor.errors import HostError, RequestFailed, SupervisorError, why
from supervisor.inventory import sshconfig
from supervisor.ssh import boot, reasons, srun
from supervisor.ssh.answers import HostChannel, MalformedAnswer
from supervisor.ssh.dial import dial, hang_up
from supervisor.ssh.openssh import OpenSshWire, find, log_in
from supervisor.ssh.questions import questions
from supervisor.ssh.reasons import Attempt, NeedsSsh
from supervisor.ssh.settings import Settings, chain, for_host
from supervisor.ssh.srun import SrunWire, is_node
from supervisor.ssh.wires import OPEN_DEADLINE_S, LocalWire, SshWire, Terminal, Wire, end_process
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from supervisor.inventory import Host
    from supervisor.ssh.agent_file import AgentFile
    from supervisor.ssh.answers import Hello
    from supervisor.ssh.forward import Reader, Writer

    Progress = Callable[[str, str], None]

# Handshakes at once. More would not be faster: each needs some milliseconds of CPU here.
MAX_AT_ONCE = 64
# A host needs a socket or three pipes, and for a moment an ssh-agent's socket and a key file.
FILES_PER_HOST = 6
FILES_OF_OURS = 64
HELLO_DEADLINE_S = 20.0
# SSH is tried this long before srun: a firewall that drops SSH must leave enough time to connect.
SSH_TRY_S = 6.0
# The parts of closing have deadlines of their own, which add up to less.
CLOSE_DEADLINE_S = 15.0


class NodeLink:
    """One host's channel, until the connection ends."""

    def __init__(self, host: Host, opened: Opened) -> None:
        self.host = host
        self.opened = opened
        self.hello: Hello = {}
        self.closed = asyncio.Event()
        self._wire = wire = opened.wire
        self.channel = HostChannel(host.name, wire.reader, wire.writer)
        self._owner = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self.channel.run()
        finally:
            self.closed.set()
            await self._wire.close()

    @property
    def via(self) -> str:
        """How the host is reached, and why not by asyncssh."""
        why = self.opened.reason
        return f"{self.opened.via} ({why})" if why else self.opened.via

    async def ask_hello(self, timeout_s: float) -> Hello:
        """Return the host's answer to `hello`, with `clock_offset_ms` (ahead of this machine) ± `clock_error_ms`.

        Raises CallFailed, WireError, asyncio.TimeoutError.
        """
        sent = time.time_ns()
        answer: Hello = (await self.channel.call("hello", timeout=timeout_s)).data
        half = (time.time_ns() - sent) / 2
        offset = answer["time_ns"] - sent - half
        return {**answer, "clock_offset_ms": round(offset / 1e6, 2), "clock_error_ms": round(half / 1e6, 2)}

    async def start_agent(self, request: Args, timeout_s: float) -> Any:
        """Start the agent of a job; returns the host's answer to `start`.

        Raises CallFailed, WireError, asyncio.TimeoutError, HostError.
        """
        if isinstance(self._wire, SrunWire):
            return await self._wire.start_agent(self.channel, request, timeout_s)
        return (await self.channel.call("start", request, timeout=timeout_s)).data

    async def run_on(self, terminal: Terminal, agent: AgentFile, *words: str) -> None:
        """Run a part of the agent on a terminal until it ends; raises HostError."""
        command = boot.command(self.host, agent, *map(shlex.quote, words))
        try:
            if isinstance(self._wire, SshWire):
                await self._wire.run_on(terminal, command)
            elif isinstance(self._wire, OpenSshWire):
                await terminal.run(self._wire.words("-t", "node", command))
            elif isinstance(self._wire, SrunWire):
                await terminal.run(srun.words(self.host, command, "--pty"), srun.environment(os.environ))
            else:
                await terminal.run(["sh", "-c", command])
        except (asyncssh.Error, OSError, asyncio.TimeoutError) as error:
            raise HostError(self.host.name, words[0], why(error)) from error

    async def open_port(self, port: int) -> tuple[Reader, Writer]:
        """Connect to a port of the node, as a program on it would.

        Raises ConnectionRefusedError if nothing listens there, RequestFailed, HostError.
        """
        name = self.host.name
        if isinstance(self._wire, SrunWire):
            hint = f"a program that listens on all addresses of the node is at http://{self.host.ssh}:{port}"
            raise RequestFailed(f"{name} is reached through srun, which cannot forward ports", hint)
        if not isinstance(self._wire, (SshWire, OpenSshWire)):
            raise RequestFailed(f"{name} is this machine: open http://localhost:{port}")
        try:
            return await self._wire.open_port(port)
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_CONNECT_FAILED:
                raise ConnectionRefusedError(error.reason) from error
            hint = "AllowTcpForwarding and PermitOpen in its sshd_config must allow it"
            raise RequestFailed(f"the SSH server of {name} does not forward ports: {error.reason}", hint) from error
        except (asyncssh.Error, OSError, asyncio.TimeoutError) as error:
            raise HostError(name, "forward", why(error)) from error

    async def close(self) -> None:
        """End the connection; agents and jobs on the node are unaffected."""
        # Closing the channel would wait for its last frame, even on a dead connection.
        self._owner.cancel()
        try:
            await asyncio.wait([self._owner], timeout=CLOSE_DEADLINE_S)
        except asyncio.CancelledError:
            # The second cancellation ends the wire at once; wait for it, so that nothing is left.
            self._owner.cancel()
            await asyncio.wait([self._owner], timeout=CLOSE_DEADLINE_S)
            raise

    def stderr_tail(self) -> str:
        """Return the end of the stderr of the node's bridge, for messages."""
        return bytes(self._wire.stderr).decode(errors="replace").strip()


async def connect(
    host: Host,
    *,
    agent: AgentFile,
    progress: Progress | None = None,
    deadline_s: float | None = None,
    may_ask: bool = True,
) -> NodeLink:
    """Connect to a host and push the agent; raises HostError.

    `deadline_s`: for the connection, without the time in which questions are open; the prelude, the push and the
    greeting have deadlines of their own. `may_ask`: False to fail where ssh would ask the user.
    """
    current = ["resolve"]

    def report(step: str, text: str) -> None:
        current[0] = step
        if progress is not None:
            progress(step, text)

    async with _gate():
        opening = asyncio.ensure_future(_open(host, agent, report, may_ask))
        try:
            opened = await questions().wait_for(opening, deadline_s)
        except BaseException as error:
            if not opening.cancelled() and opening.exception() is None:
                # It was opened at the very moment of the cancellation.
                await opening.result().wire.close()
            if isinstance(error, asyncio.TimeoutError):
                raise reasons.timeout_error(host.name, current[0], deadline_s or 0.0) from None
            raise
        return await _greet(host, opened, agent, report)


async def connect_all(
    hosts: Iterable[Host], *, agent: AgentFile, deadline_s: float | None = None
) -> dict[str, NodeLink | HostError]:
    """Connect to all hosts at once; returns for each the link, or why there is none."""

    async def one(host: Host) -> NodeLink | HostError:
        try:
            return await connect(host, agent=agent, deadline_s=deadline_s)
        except HostError as error:
            return error

    chosen = list(hosts)
    tasks = [asyncio.ensure_future(one(host)) for host in chosen]
    try:
        results = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in ended if isinstance(link, NodeLink)), return_exceptions=True)
        raise
    return {host.name: result for host, result in zip(chosen, results, strict=True)}


async def _greet(host: Host, opened: Opened, agent: AgentFile, progress: Progress) -> NodeLink:
    """Start the agent's bridge on an open wire and wait for its answer to `hello`; raises HostError."""
    wire, refused = opened.wire, opened.refused
    if refused is not None:
        host = dataclasses.replace(host, via="srun")
    try:
        await boot.boot(host, wire, agent, progress)
    except BaseException as error:
        await wire.close()
        if refused is not None and isinstance(error, HostError):
            raise HostError(host.name, error.step, f"{error.reason}; by SSH: {refused.reason}", error.hint) from error
        raise
    link = NodeLink(host, opened)
    try:
        link.hello = await link.ask_hello(HELLO_DEADLINE_S)
    except CallFailed as error:
        await link.close()
        raise HostError(host.name, "push", f"{error.kind.replace('_', ' ')}: {error.message}", error.hint) from error
    except MalformedAnswer:
        await link.close()
        raise
    except (WireError, asyncio.TimeoutError) as error:
        stderr = link.stderr_tail()
        await link.close()
        text = f"the agent's bridge does not answer: {stderr or str(error) or 'no answer in time'}"
        raise HostError(host.name, "start", text) from error
    except BaseException:
        await link.close()
        raise
    progress("python", f"python {link.hello['python']}")
    return link


class Opened(NamedTuple):
    """The streams of the command on a host, and how they got there."""

    wire: Wire
    via: str
    reason: str = ""
    """Why not asyncssh."""
    refused: HostError | None = None
    """Why SSH failed, if srun is used instead."""


async def _open(host: Host, agent: AgentFile, progress: Progress, may_ask: bool) -> Opened:
    if host.local:
        return Opened(await _open_local(host, agent), "local")
    refused: HostError | None = None
    if host.via != "srun":
        if host.via != "auto" or not is_node(host):
            return await _open_ssh(host, agent, progress, may_ask)
        try:
            # Where srun may do without, nobody is asked.
            return await asyncio.wait_for(_open_ssh(host, agent, progress, may_ask=False), SSH_TRY_S)
        except asyncio.TimeoutError:
            refused = reasons.timeout_error(host.name, "connect", SSH_TRY_S)
        except HostError as error:
            refused = error
    progress("connect", f"srun -w {host.ssh}")
    reason = refused.reason if refused is not None else 'via = "srun"'
    return Opened(await SrunWire.open(host, agent), "srun", reason, refused)


async def _open_local(host: Host, agent: AgentFile) -> Wire:
    try:
        return LocalWire(await LocalWire.run(["sh", "-c", boot.command(host, agent)]))
    except OSError as error:
        raise HostError(host.name, "python", f"no process can be started: {error.strerror}") from error


async def _open_ssh(host: Host, agent: AgentFile, progress: Progress, may_ask: bool) -> Opened:
    """Return the streams of the command on a host over asyncssh, or over ssh where only ssh can get in."""
    progress("resolve", host.ssh)
    settings = await asyncio.to_thread(for_host, host)
    jumps = await asyncio.to_thread(chain, host, settings)
    command = boot.command(host, agent)
    try:
        reason = await _only_ssh(host, settings, jumps)
        if not reason:
            try:
                wire = await _open_asyncssh(host, settings, jumps, command, progress, may_ask)
                return Opened(wire, "asyncssh")
            except NeedsSsh as refused:
                if host.via == "asyncssh" or sshconfig.program() is None:
                    raise
                reason = _needed_ssh[settings.digest] = f"asyncssh: {refused.reason}"
        login = await log_in(host.name, settings, jumps, progress, may_ask=may_ask)
        return Opened(await OpenSshWire.open(login, command), "ssh", reason)
    except (SupervisorError, OSError) as error:
        # The network may be another one the next time.
        sshconfig.forget(*(way.target for way in (*jumps, settings)))
        if isinstance(error, HostError):
            raise
        if isinstance(error, SupervisorError):
            raise HostError(host.name, "connect", error.message, error.hint) from error
        raise HostError(host.name, "connect", f"ssh: {why(error)}") from error


async def _only_ssh(host: Host, settings: Settings, jumps: Sequence[Settings]) -> str:
    """Return why the ssh program is used for a host from the start; empty: asyncssh is tried; raises HostError."""
    if sshconfig.program() is None and (host.via == "openssh" or (host.proxy_jump or "none").lower() != "none"):
        raise HostError(host.name, "resolve", "there is no ssh program on this machine", "install OpenSSH's client")
    if host.via == "openssh":
        return 'via = "openssh"'
    if host.via == "asyncssh":
        if settings.only_ssh:
            reason = f"asyncssh cannot do this: {settings.only_ssh}"
            raise HostError(host.name, "resolve", reason, 'write via = "openssh"')
        return ""
    if reason := settings.only_ssh or _needed_ssh.get(settings.digest, ""):
        return reason
    with contextlib.suppress(SupervisorError):
        # Without a directory for its socket no connection is open.
        return "a connection is open" if await find(settings, jumps) is not None else ""
    return ""


_needed_ssh: dict[str, str] = {}
"""Why ssh is used where asyncssh was refused, by the digest of the settings."""


async def _open_asyncssh(
    host: Host, settings: Settings, jumps: Sequence[Settings], command: str, progress: Progress, may_ask: bool
) -> Wire:
    passed_on = passing = connection = None
    if jumps:
        jump = await log_in(host.name, jumps[-1], jumps[:-1], progress, may_ask=may_ask)
        passed_on, passing = await jump.pass_on(settings.host, settings.port)
    try:
        connection = await dial(settings, passed_on, progress)
        return await SshWire.open(connection, passing, command)
    except BaseException as error:
        if connection is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await hang_up(connection)
        if passing is not None:
            await end_process(passing, (signal.SIGKILL,))
        if isinstance(error, asyncssh.ChannelOpenError):
            raise reasons.channel_error(settings, error) from error
        if isinstance(error, asyncio.TimeoutError):
            raise reasons.timeout_error(settings.label, "python", OPEN_DEADLINE_S, settings.where) from error
        if isinstance(error, (asyncssh.Error, OSError)):
            raise reasons.ssh_error(settings, Attempt(step="python"), error) from error
        raise


_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _gate() -> asyncio.Semaphore:
    """Return the semaphore that limits the handshakes of this event loop."""
    return _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(at_once()))


def at_once() -> int:
    """Raise the limit of open files, and return how many handshakes may run at once under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        # Links stay open after their handshake, one socket each, so the default of 1024 bounds the hosts too.
        wanted = max(soft, 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, min(MAX_AT_ONCE, (soft - FILES_OF_OURS) // FILES_PER_HOST))
