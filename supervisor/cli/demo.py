"""`supervisor demo`: two SSH hosts inside this process, a real DDP run on them, and nothing left afterwards.

In: argv. Out: the exit code of `up`. `DemoHosts` are servers on loopback addresses, each with its own home directory,
that run commands as real processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import getpass
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.wire.events import ENDED_EVENTS
from supervisor.cli.options import is_terminal, make_parser, need_linux, parse
from supervisor.inventory.sources import Document, HostEntry, to_toml
from supervisor.paths import examples_dir
from supervisor.ssh_library import asyncssh
from supervisor.standard_streams import write_err

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

log = logging.getLogger(__name__)

_HOSTS = 2
_RANKS_PER_HOST = 2
_STOP_DEADLINE_S = 20.0
_AGENT_GRACE_S = 8.0  # an agent whose job is over stays for some seconds, so that its end can be read
# The headless run ends after some seconds; with the TUI there is time to try the keys.
_HEADLESS_ARGS = ("--epochs", "4", "--steps-per-epoch", "10", "--step-time", "0.05")
_TUI_ARGS = ("--epochs", "60", "--steps-per-epoch", "20", "--step-time", "0.1")

_NO_TORCH = """supervisor demo: the demo needs torch, which is not installed for {python}
  hint: install it into the same environment, for example: {python} -m pip install torch numpy"""

MARK = "SUPERVISOR_DEMO"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_HANGUP_GRACE_S = 1.0
_CHUNK = 65536
_THREAD_DEADLINE_S = 10.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    parser = make_parser(verb, "", target=False)
    parser.add_argument("--headless", action="store_true", help="print the merged log instead of the TUI")
    options = parse(parser, argv)
    return run_demo(headless=options.headless or not is_terminal())


def run_demo(headless: bool) -> int:
    """Run the example on two embedded hosts and return the exit code of `up`; always cleans up.

    Raises UsageError where this machine cannot be a host.
    """
    need_linux("the demo")
    if importlib.util.find_spec("torch") is None:
        write_err(_NO_TORCH.format(python=sys.executable) + "\n")
        return 1
    with (
        _terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="supervisor-demo-", ignore_cleanup_errors=True) as root,
        hosts_in_thread(_HOSTS, Path(root)) as hosts,
    ):
        toml = _prepare(hosts)
        try:
            return _up(toml, headless)
        finally:
            _outlast_signals()
            end_job(hosts, toml)


def _prepare(hosts: DemoHosts) -> Path:
    workdir = hosts.root / "work"
    workdir.mkdir()
    shutil.copy(examples_dir() / "ddp" / "train.py", workdir / "train.py")
    job = {
        "workdir": "work",
        "nproc_per_node": _RANKS_PER_HOST,
        "min_nodes": 1,
        "max_restarts": 3,
        "stop_grace": 5.0,
        # All hosts share this machine's name, so gloo must not resolve it.
        "env": {"GLOO_SOCKET_IFNAME": "lo"},
    }
    return hosts.inventory(hosts.root / "hosts.toml", sys.executable, job)


def _up(toml: Path, headless: bool) -> int:
    from supervisor.cli import main  # the command line imports this module

    where = str(toml.parent / "work" / "train.py")
    mode = ["--headless"] if headless else ["--ends-with-screen"]
    return main(["up", str(toml), *mode, where, *(_HEADLESS_ARGS if headless else _TUI_ARGS)])


def end_job(hosts: DemoHosts, toml: Path) -> None:
    """End what `up` left running: a detached job, and agents that wait for their end to be read."""
    try:
        if hosts.processes() and not _is_over(hosts):
            write_err("demo: its hosts are part of this process, so the job ends with it\n")
            _stop(toml)
    except KeyboardInterrupt:
        log.info("interrupted again: ending everything at once")
    finally:
        write_err("demo: ending the agents and removing the hosts\n")
        killed = hosts.end_processes(_AGENT_GRACE_S)
        if killed:
            log.warning("the demo had to kill: %s", "; ".join(killed))


def _is_over(hosts: DemoHosts) -> bool:
    """Tell whether every journal on the hosts has the end of its job: then no stop is needed."""
    journals = [path for host in hosts.hosts for path in host.home.glob(".supervisor/jobs/*/events.jsonl")]
    return all(any(f'"{end}"' in journal.read_text() for end in ENDED_EVENTS) for journal in journals)


def _stop(toml: Path) -> None:
    # The stop runs in another process because a signal may have ended the event loop of this one.
    command = [sys.executable, "-m", "supervisor", "stop", str(toml)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STOP_DEADLINE_S,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        log.info("stop: status %d: %s", done.returncode, done.stderr.strip())
    except subprocess.TimeoutExpired:
        log.warning("stop did not answer within %g s", _STOP_DEADLINE_S)


def _outlast_signals() -> None:
    """Ignore further signals during the clean-up: a terminal that closes sends several."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Processes started during the clean-up would inherit SIG_IGN.
            signal.signal(number, lambda _number, _frame: None)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the demo through its clean-up."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class DemoHost:
    """One embedded host: n1 is 127.0.0.2, n2 is 127.0.0.3, and so on."""

    name: str
    address: str
    port: int
    home: Path


@dataclass(frozen=True)
class DemoHosts:
    """All embedded hosts; `mark` is in the environment of every process that was started through them."""

    root: Path
    hosts: tuple[DemoHost, ...]
    identity_file: Path
    known_hosts: Path
    mark: str

    def inventory(self, path: Path, python: str, job: Mapping[str, object]) -> Path:
        """Write a hosts.toml for these hosts, with `job` as keys of [job], and return its path."""
        hosts: list[HostEntry] = [{"name": one.name, "ssh": one.address, "port": one.port} for one in self.hosts]
        document: Document = {"job": job, "defaults": self.defaults(python), "hosts": hosts}
        path.write_text(to_toml(document, "embedded hosts on loopback addresses"))
        return path

    def defaults(self, python: str) -> dict[str, str]:
        """The [defaults] of a hosts.toml for these hosts."""
        return {
            "user": getpass.getuser(),
            "identity_file": str(self.identity_file),
            "known_hosts": str(self.known_hosts),
            "python": python,
        }

    def processes(self) -> dict[int, str]:
        """Return the live processes that were started through these hosts: command lines by pid."""
        return marked_processes(self.mark)

    def end_processes(self, grace_s: float) -> list[str]:
        """Send SIGTERM, wait at most `grace_s`, send SIGKILL; returns the command lines of killed processes."""
        for pid in self.processes():
            _signal(pid, signal.SIGTERM)
        self.await_end(grace_s)
        killed: list[str] = []
        while left := self.processes():
            killed += [line for line in left.values() if line not in killed]
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)  # they are not our children, so there is nothing to wait for
        return killed

    def await_end(self, deadline_s: float) -> bool:
        """Wait until no process that was started through these hosts is alive; False after the deadline."""
        end = time.monotonic() + deadline_s
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)  # they are not our children, so there is nothing to wait for
        return True


@dataclass
class _Server:
    """The state that the sessions of one host share."""

    home: Path
    address: str
    mark: str
    sessions: set[asyncio.Task[None]] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends all sessions: a session that is cancelled while it ends its command could not wait for the command."""

    def environment(self) -> dict[str, str]:
        """Return the environment of a login, without the operator's variables."""
        user = getpass.getuser()
        return {
            "HOME": str(self.home),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/sh",
            "PATH": _PATH,
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "SSH_CONNECTION": f"127.0.0.1 0 {self.address} 22",
            MARK: self.mark,
        }

    async def serve(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run one command of a client until it ends or the channel closes."""
        task = asyncio.current_task()
        if task is not None:
            self.sessions.add(task)
            task.add_done_callback(self.sessions.discard)
        child = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", process.command or "exec /bin/sh"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
            cwd=self.home,
            start_new_session=True,
        )
        try:
            await self._until_over(process, child)
        finally:
            await _end_group(child)

    async def _until_over(self, process: asyncssh.SSHServerProcess[bytes], child: asyncio.subprocess.Process) -> None:
        ends = [
            asyncio.ensure_future(process.wait_closed()),
            asyncio.ensure_future(_answer(process, child)),
            asyncio.ensure_future(self.over.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)


class _Login(asyncssh.SSHServer):
    """A login with the demo's key."""

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        """Forward ports, as sshd does."""
        return True


async def _answer(process: asyncssh.SSHServerProcess[bytes], child: asyncio.subprocess.Process) -> None:
    """Copy bytes in both directions until the command closes its outputs, then send its exit code."""
    if child.stdin is None or child.stdout is None or child.stderr is None:
        raise RuntimeError("the command was started without pipes")
    copying = asyncio.ensure_future(_copy(process.stdin, child.stdin))
    outputs = [
        asyncio.ensure_future(_copy(child.stdout, process.stdout)),
        asyncio.ensure_future(_copy(child.stderr, process.stderr)),
    ]
    try:
        await asyncio.gather(*outputs)
        status = await child.wait()
    finally:
        for task in (copying, *outputs):
            task.cancel()
        await asyncio.gather(copying, *outputs, return_exceptions=True)
    if status >= 0:
        process.exit(status)
    else:
        process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))


async def _copy(
    source: asyncssh.SSHReader[bytes] | asyncio.StreamReader, target: asyncio.StreamWriter | asyncssh.SSHWriter[bytes]
) -> None:
    try:
        while chunk := await source.read(_CHUNK):
            target.write(chunk)
            await target.drain()
    except (OSError, asyncssh.Error):
        log.debug("the command or its client stopped listening")
    finally:
        if isinstance(target, asyncio.StreamWriter):
            # The command reads to the end of its input.
            target.close()


async def _end_group(child: asyncio.subprocess.Process) -> None:
    """End a command whose channel has closed, with its process group; a daemon outside the group stays."""
    try:
        if child.returncode is None:
            _signal(-child.pid, signal.SIGHUP)
            await asyncio.wait_for(child.wait(), _HANGUP_GRACE_S)
    except asyncio.TimeoutError:
        _signal(-child.pid, signal.SIGKILL)
    finally:
        # This precedes the wait: asyncio reports the end of a process only once its pipes are closed, which a daemon
        # may prevent. The transport closes itself only in a later turn of the loop, and there is no public way.
        child._transport.close()  # type: ignore[attr-defined]
    await child.wait()


@asynccontextmanager
async def demo_hosts(count: int, root: Path) -> AsyncIterator[DemoHosts]:
    """Serve `count` hosts until the block ends; raises OSError if 127.0.0.2 and up are not loopback addresses."""
    identity = asyncssh.generate_private_key("ssh-ed25519")
    identity_file = root / "identity"
    identity_file.touch(mode=0o600)
    identity_file.write_bytes(identity.export_private_key("openssh"))
    authorized = asyncssh.import_authorized_keys(identity.export_public_key("openssh").decode())
    mark = secrets.token_hex(16)
    known: list[str] = []
    hosts: list[DemoHost] = []
    servers: list[_Server] = []
    acceptors: list[asyncssh.SSHAcceptor] = []
    try:
        for number in range(1, count + 1):
            name, address = f"n{number}", f"127.0.0.{number + 1}"
            home = root / name
            home.mkdir(mode=0o700)
            server = _Server(home, address, mark)
            host_key = asyncssh.generate_private_key("ssh-ed25519")
            acceptor = await asyncssh.listen(
                address,
                0,
                server_host_keys=[host_key],
                authorized_client_keys=authorized,
                server_factory=_Login,
                process_factory=server.serve,
                encoding=None,
            )
            acceptors.append(acceptor)
            servers.append(server)
            hosts.append(DemoHost(name, address, acceptor.get_port(), home))
            public = host_key.export_public_key("openssh").decode().strip()
            known.append(f"[{address}]:{acceptor.get_port()} {public}\n")
        (root / "known_hosts").write_text("".join(known))
        yield DemoHosts(root, tuple(hosts), identity_file, root / "known_hosts", mark)
    finally:
        await _close(acceptors, servers)


async def _close(acceptors: Sequence[asyncssh.SSHAcceptor], servers: Sequence[_Server]) -> None:
    for acceptor in acceptors:
        acceptor.close()
    for server in servers:
        server.over.set()
    await asyncio.gather(*(task for server in servers for task in server.sessions), return_exceptions=True)
    for acceptor in acceptors:
        await asyncio.wait_for(acceptor.wait_closed(), 5.0)


@contextmanager
def hosts_in_thread(count: int, root: Path) -> Iterator[DemoHosts]:
    """Serve as `demo_hosts` does, from a thread with its own event loop; raises OSError."""
    ready: concurrent.futures.Future[tuple[DemoHosts, asyncio.AbstractEventLoop, asyncio.Event]]
    ready = concurrent.futures.Future()
    thread = threading.Thread(target=_serve, args=(count, root, ready), name="demo-hosts", daemon=True)
    thread.start()
    hosts, loop, over = ready.result(timeout=_THREAD_DEADLINE_S)
    try:
        yield hosts
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=_THREAD_DEADLINE_S)


def _serve(
    count: int,
    root: Path,
    ready: concurrent.futures.Future[tuple[DemoHosts, asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    async def serve() -> None:
        over = asyncio.Event()
        async with demo_hosts(count, root) as hosts:
            ready.set_result((hosts, asyncio.get_running_loop(), over))
            await over.wait()

    try:
        asyncio.run(serve())
    except Exception as error:
        if ready.done():
            log.exception("the embedded hosts failed")
        else:
            ready.set_exception(error)


def marked_processes(mark: str) -> dict[int, str]:
    """Return the live processes whose environment has the mark: command lines by pid."""
    wanted = f"{MARK}={mark}".encode()
    processes: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        # The environment of a zombie is empty.
        if wanted in environment:
            processes[int(entry)] = line.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return processes


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, or to a process group (negative number), if it still exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        log.debug("process %d has ended by itself", pid)
