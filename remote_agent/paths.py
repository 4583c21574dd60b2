"""Where everything lies on a node, and how to reach a unix socket however long its path is.

In: SUPERVISOR_HOME or the user's home. Out: paths of the contract's section 5, sockets, the agent's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.wire import Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Frames may be 8 MiB; asyncio's own limit only bounds readline and readuntil, and how much is read ahead.
READ_AHEAD = 1024 * 1024
# A look at the lock lasts microseconds, on a busy machine longer; somebody who looks is not an agent.
LOCK_TRIES = 400
LOCK_PAUSE_S = 0.005


class NameRefused(ValueError):
    """A job or tree name that could leave its directory or confuse a shell."""


def check_name(name: str, what: str = "job") -> str:
    """Return the name; raises NameRefused when it is not letters, digits, dots, dashes and underscores."""
    if not JOB_NAME.fullmatch(name):
        raise NameRefused(
            f"bad {what} name {name!r}: 1 to 64 letters, digits, dots, dashes or underscores, a letter or digit first"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Home:
    """The root of all our files on a node, mode 0700."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        """Return the root named by SUPERVISOR_HOME, else ~/.supervisor, as an absolute path."""
        named = os.environ.get("SUPERVISOR_HOME") or "~/.supervisor"
        return cls(Path(os.path.abspath(os.path.expanduser(named))))

    @property
    def agents(self) -> Path:
        """Pushed agents, each named by its sha256."""
        return self.root / "agents"

    @property
    def trees(self) -> Path:
        """Synced work trees."""
        return self.root / "trees"

    @property
    def jobs(self) -> Path:
        """One directory a job."""
        return self.root / "jobs"

    def job(self, name: str) -> JobFiles:
        """Return the files of one job; raises NameRefused."""
        return JobFiles(self, check_name(name))

    def tree(self, name: str) -> Path:
        """Return the directory of one work tree; raises NameRefused."""
        return self.trees / check_name(name, "tree")

    def job_names(self) -> list[str]:
        """Return the jobs that have a directory here, sorted."""
        try:
            names = os.listdir(self.jobs)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if JOB_NAME.fullmatch(name) and (self.jobs / name).is_dir())

    def make(self) -> None:
        """Create the root and its three directories, mode 0700; raises OSError."""
        for path in (self.root, self.agents, self.trees, self.jobs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclasses.dataclass(frozen=True)
class JobFiles:
    """The files of one job on this node."""

    home: Home
    name: str

    @property
    def root(self) -> Path:
        """The job's directory, mode 0700."""
        return self.home.jobs / self.name

    @property
    def sock(self) -> Path:
        """Unix socket on which the agent serves supervisors."""
        return self.root / "agent.sock"

    @property
    def pid(self) -> Path:
        """The agent's lock: pid and start time in clock ticks."""
        return self.root / "agent.pid"

    @property
    def log(self) -> Path:
        """What the agent itself prints."""
        return self.root / "agent.log"

    @property
    def events(self) -> Path:
        """The journal, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def spec(self) -> Path:
        """The job as the supervisor described it."""
        return self.root / "spec.json"

    @property
    def node(self) -> Path:
        """Which node of the job this machine is."""
        return self.root / "node.json"

    @property
    def term(self) -> Path:
        """The newest term and coordinator this agent has accepted."""
        return self.root / "term.json"

    @property
    def members(self) -> Path:
        """Where the agents of the other nodes are, as far as this one knew."""
        return self.root / "members.json"

    @property
    def tls(self) -> Path:
        """Directory of the agent's key material, mode 0700."""
        return self.root / "tls"

    @property
    def ca(self) -> Path:
        """Certificate of the job's own authority."""
        return self.tls / "ca.pem"

    @property
    def cert(self) -> Path:
        """This agent's certificate."""
        return self.tls / "cert.pem"

    @property
    def key(self) -> Path:
        """This agent's private key."""
        return self.tls / "key.pem"

    @property
    def ca_key(self) -> Path:
        """The authority's private key, so that any operator can admit a further node."""
        return self.tls / "ca_key.pem"

    def generation(self, generation: int) -> Path:
        """Return the directory of one generation."""
        return self.root / f"generation_{generation}"

    def rank(self, generation: int, rank: int) -> Path:
        """Return the directory of one rank of one generation: stdout.log, stderr.log, nccl.log, error.json."""
        return self.generation(generation) / f"rank_{rank}"

    def make(self) -> None:
        """Create the job's directory and its tls directory, mode 0700; raises OSError."""
        self.home.make()
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.tls.mkdir(mode=0o700, exist_ok=True)


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader sees the old or the new content, never a part; raises OSError."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def set_aside(path: Path, mark: str) -> None:
    """Rename a file or directory to its own name, `mark` and the first free number; raises OSError."""
    number = 1
    while (aside := path.with_name(f"{path.name}{mark}{number}")).exists():
        number += 1
    path.rename(aside)


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: [0] is the state; empty when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot, or None when there is no such process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def lock_agent(files: JobFiles) -> int | None:
    """Take the job's agent lock for as long as this process lives; return its descriptor, or None when it is held.

    The file then holds this process's pid and start ticks. Raises OSError, Problem.
    """
    fd = os.open(files.pid, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        taken = _take(fd)
    except BaseException:
        os.close(fd)
        raise
    if not taken:
        os.close(fd)
        return None
    pid = os.getpid()
    os.pwrite(fd, f"{pid} {start_ticks(pid)}\n".ljust(64).encode(), 0)
    return fd


def _take(fd: int) -> bool:
    """Take the lock; somebody who only looks (agent_alive) may hold a shared one for a moment."""
    for _ in range(LOCK_TRIES):
        if try_lock(fd):
            return True
        if _names_the_living(fd):
            return False
        time.sleep(LOCK_PAUSE_S)
    return False


def try_lock(fd: int) -> bool:
    """Take a file's lock, or return False when it is held; raises Problem where its file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        message = f"{os.readlink(f'/proc/self/fd/{fd}')}: its file system cannot lock files ({error.strerror})"
        hint = 'a local disk can: set env = { SUPERVISOR_HOME = "/local/disk/supervisor" } for this host'
        raise Problem("no_locks", message, hint) from error
    return True


def _names_the_living(fd: int) -> bool:
    words = os.pread(fd, 64, 0).split()
    try:
        return len(words) == 2 and start_ticks(int(words[0])) == int(words[1])
    except ValueError:
        return False


def agent_alive(files: JobFiles) -> int | None:
    """Return the pid of the agent that holds the job's lock, or None when nobody does.

    Looks only: an agent that starts at this very moment is not disturbed.
    """
    try:
        fd = os.open(files.pid, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.pread(fd, 64, 0).split()
        if not _is_locked(fd):
            return None
        return int(text[0]) if text else 0
    except ValueError:
        return 0
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Ask /proc/locks first: a look must not collide with an agent that is just taking the lock."""
    stat = os.fstat(fd)
    wanted = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii", errors="replace") as file:
        if any(_tells_of(line, wanted) for line in file):
            return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _tells_of(line: str, wanted: str) -> bool:
    """Whether a line of /proc/locks is an exclusive lock of that very device and inode."""
    return {wanted, "FLOCK", "WRITE"} <= set(line.split())


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Name a socket through a descriptor of its directory: sun_path holds 107 bytes, job directories can be longer."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


async def open_unix(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a unix socket whose path may be of any length; raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with _short_name(path) as name:
            await asyncio.get_running_loop().sock_connect(sock, name)
        return await asyncio.open_unix_connection(sock=sock, limit=READ_AHEAD)
    except BaseException:
        sock.close()
        raise


async def serve_unix(
    path: Path, callback: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.AbstractServer:
    """Listen on a unix socket of mode 0600, replacing a stale one; the owner closes the server and unlinks the path.

    Call it only while holding the lock of whatever owns the socket. Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with _short_name(path) as name:
            # The directory is 0700, so nobody else can reach the socket in the moment before chmod.
            sock.bind(name)
        os.chmod(path, 0o600)
        return await asyncio.start_unix_server(callback, sock=sock, limit=READ_AHEAD)
    except BaseException:
        sock.close()
        raise


def own_command(*words: str) -> list[str]:
    """Return how to start this very code in another mode, from a zipapp or from source."""
    program = sys.argv[0] if sys.argv[0].endswith(".pyz") else ""
    # -S: what the installation's own start files print comes once stdout is not our wire (see __main__).
    return [sys.executable, *(["-S", program] if program else ["-m", "remote_agent"]), *words]
