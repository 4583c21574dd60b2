"""Where files are on a node, and the lock that shows that a job's agent runs.

In: SUPERVISOR_HOME or the user's home; names of jobs and work trees. Out: the paths of the contract's section 5.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from remote_agent.base import private
from remote_agent.base.files import try_lock
from remote_agent.base.proc import environment, has_same, start_ticks
from remote_agent.wire import JOB_NAME, Problem

# agent_alive may hold a shared lock for microseconds, on a busy machine longer.
LOCK_TRIES = 400
LOCK_PAUSE_S = 0.005


def check_name(name: object, what: str = "job") -> str:
    """Return the name; raises Problem for one that could leave its directory or confuse a shell."""
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise Problem(
            "bad_name",
            f"bad {what} name {name!r}: 1 to 64 letters, digits, dots, dashes or underscores, a letter or digit first",
        )
    return name


class Home:
    """The root of all our files on a node, mode 0700."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.agents = root / "agents"
        """Pushed agents, each named by its sha256."""
        self.trees = root / "trees"
        self.jobs = root / "jobs"
        self.environments = root / "environments"
        """What was built from lock files, each named by its digest."""
        self.standby = root / "standby"
        """What scripts import, for waiting processes."""
        self.torch = root / "torch.json"
        """What is known of the torch that is installed."""

    @classmethod
    def from_environment(cls) -> Home:
        """Return SUPERVISOR_HOME, or ~/.supervisor, as an absolute path."""
        named = os.environ.get("SUPERVISOR_HOME") or "~/.supervisor"
        return cls(Path(os.path.abspath(os.path.expanduser(named))))

    def is_of(self, pid: int) -> bool:
        """Return whether an agent or an engine has this very home."""
        key = b"SUPERVISOR_HOME="
        named = b"".join(entry[len(key) :] for entry in environment(pid) if entry.startswith(key))
        return has_same(pid, os.path.expanduser(os.fsdecode(named) or "~/.supervisor"), self.root)

    def job(self, name: object) -> JobFiles:
        """Return the files of one job; raises Problem."""
        return JobFiles(self, check_name(name))

    def tree(self, name: object) -> Path:
        """Return the directory of one work tree; raises Problem."""
        return self.trees / check_name(name, "tree")

    def job_names(self) -> list[str]:
        """Return the jobs that have a directory here, sorted."""
        try:
            names = os.listdir(self.jobs)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if JOB_NAME.fullmatch(name) and (self.jobs / name).is_dir())

    def make(self) -> None:
        """Create the root and its three directories, mode 0700; raises OSError, Problem if others can change them."""
        with _trusted():
            private.make_private(str(self.root))
            for path in (self.agents, self.trees, self.jobs):
                private.make_own(str(path))


class JobFiles:
    """The files of one job on this node."""

    def __init__(self, home: Home, name: str) -> None:
        self.home = home
        self.name = name
        self.root = root = home.jobs / name
        """The job's directory, mode 0700."""
        self.sock = root / "agent.sock"
        self.warm = root / "warm.sock"
        """The socket at which the agent of a job that is over keeps its waiting process for the next job."""
        self.wire = root / "engine.sock"
        """The socket at which the agent waits for its engine."""
        self.uses = root / "environments"
        """The digests of the environments that the job has used here, one on each line."""
        self.container = root / "container.json"
        """The container of the newest engine: tool and name."""
        self.pid = root / "agent.pid"
        """The agent's lock: its pid and start time in clock ticks."""
        self.log = root / "agent.log"
        self.events = root / "events.jsonl"
        """The journal, one JSON object on each line."""
        self.status = root / "status.json"
        """How the job was when a bundle was made of it, if it had not ended."""
        self.history = root / "history.bin"
        """What ranks printed and node and GPUs used, as far as it is kept."""
        self.spec = root / "spec.json"
        self.node = root / "node.json"
        """This machine's name in the job."""
        self.term = root / "term.json"
        """The newest term and coordinator that this agent has accepted."""
        self.members = root / "members.json"
        """The last known addresses of the other agents."""
        self.tls = root / "tls"
        """The directory of the agent's keys, mode 0700."""
        self.ca = self.tls / "ca.pem"
        """The certificates of the authorities that this agent trusts; their keys are nowhere."""
        self.cert = self.tls / "cert.pem"
        self.key = self.tls / "key.pem"

    def generation(self, generation: int) -> Path:
        """Return the directory of one generation."""
        return self.root / f"generation_{generation}"

    def rank(self, generation: int, rank: int) -> Path:
        """Return the directory of one rank: stdout.log, stderr.log, nccl.log, error.json."""
        return self.generation(generation) / f"rank_{rank}"

    def make(self) -> None:
        """Create the job's directory and its tls directory, mode 0700; raises OSError, Problem."""
        self.home.make()
        with _trusted():
            private.make_own(str(self.root))
            private.make_own(str(self.tls))


@contextlib.contextmanager
def _trusted() -> Iterator[None]:
    try:
        yield
    except private.Untrusted as error:
        hint = "make it yours alone (chown, chmod go-w), or set SUPERVISOR_HOME to a directory of your own"
        raise Problem("home_not_private", str(error), hint) from error


def lock_agent(files: JobFiles) -> int | None:
    """Take the job's agent lock for this process's lifetime; returns its descriptor, or None when it is held.

    Writes this process's pid and start ticks into the file. Raises OSError, Problem.
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


def unlock_agent(files: JobFiles, lock: int) -> None:
    """Remove the agent's socket and release the lock; raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        # If the job's directory was removed and made again, the socket in it is another agent's.
        if os.path.samestat(os.fstat(lock), os.stat(files.pid)):
            files.sock.unlink()
    os.close(lock)


def _take(fd: int) -> bool:
    """Take the lock, retrying while no live agent holds it: agent_alive may hold it for a moment."""
    for _ in range(LOCK_TRIES):
        if try_lock(fd):
            return True
        if _names_live_process(fd):
            return False
        time.sleep(LOCK_PAUSE_S)
    return False


def _names_live_process(fd: int) -> bool:
    return _named(os.pread(fd, 64, 0)) is not None


def _named(text: bytes) -> int | None:
    """Return the pid in a lock file if that process lives, whether it holds the lock or not."""
    words = text.split()
    try:
        return int(words[0]) if len(words) == 2 and start_ticks(int(words[0])) == int(words[1]) else None
    except ValueError:
        return None


def named_agent(files: JobFiles) -> int | None:
    """Return the pid of the job's last agent if it lives, perhaps for another job, or None."""
    try:
        return _named(files.pid.read_bytes())
    except OSError:
        return None


def agent_alive(files: JobFiles) -> int | None:
    """Return the pid of the agent that holds the job's lock, or None when no agent does.

    It does not disturb an agent that is starting.
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
    """Return whether the file is locked; reads /proc/locks first so as not to block an agent that takes the lock."""
    stat = os.fstat(fd)
    wanted = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii", errors="replace") as file:
        if any(_is_lock_of(line, wanted) for line in file):
            return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _is_lock_of(line: str, wanted: str) -> bool:
    """Return whether a line of /proc/locks is an exclusive lock of this device and inode."""
    return {wanted, "FLOCK", "WRITE"} <= set(line.split())
