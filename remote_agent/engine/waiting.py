"""The waiting process of a node: a rank's own interpreter, stopped before its script, with modules loaded.

In: wait.json beside this file, which names the modules, and orders on an inherited socket. Out: ranks, forked from
this process; each returns from the bootstrap as a process that Python has just started.

It is `python -u SCRIPT`, started like a rank. Our bootstrap (worker.py) calls `wait` there; only ranks return from it.
"""

from __future__ import annotations

import json
import os
import sys
import time

_bootstrap = sys.modules["_frozen_importlib"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from remote_agent.engine.preload import Notes, Stash
    from remote_agent.wire import Args

ORDER = "wait.json"
PR_SET_PDEATHSIG = 1
SIGKILL = 9
# ioprio_set for this process: class "idle", and back to what follows from nice. agent/background.py has these numbers
# too: this process must not load a module of ours that a rank does not have.
IOPRIO_IDLE, IOPRIO_NONE = 3 << 13, 0
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
# Where torch does not seed its generator from the system, this is what it begins with.
TORCH_SEED = 67280421310721
# If it may not leave idle priority again, it uses this share of a core, by pausing between two modules.
SHARE = 0.25


class Odd(Exception):
    """This process cannot become ranks; `packages`: what should not be loaded next time."""

    def __init__(self, why: str, packages: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.packages = sorted(set(packages))


def wait(here: str, known: set[str], loader: Any) -> tuple[str, Stash]:
    """Load the modules and wait; returns, in each rank that is forked here, its boot directory and the modules.

    `known`: what sys.modules had before this module was imported; `loader`: the module preload.
    """
    for name in set(sys.modules) - known:
        # What only this module needs is loaded again where a script needs it.
        del sys.modules[name]
    engine = os.getppid()
    with open(os.path.join(here, ORDER), encoding="utf-8") as file:
        order = json.load(file)
    wire = EnginePipe(int(order["descriptor"]))
    begun = Priority(order["is_urgent"])
    try:
        added = {name: value for name, value in os.environ.items() if name not in order["env"]}
        notes = loader.Notes((os.path.join(here, "stdout"), os.path.join(here, "stderr")), known)
        seconds = load(order["modules"], notes, begun)
        stash = loader.Stash(notes, known)
        look_at_self(stash, order["tree"])
        stamp = Stamp([*stash.files(), *order["stamp"]])
    except Odd as odd:
        wire.send({"failed": str(odd), "packages": odd.packages})
        os._exit(1)
    reads = {os.fsdecode(name): sorted(packages) for name, packages in notes.reads.items()}
    begun.rest()
    wire.send(
        {
            "ready": {
                "modules": len(stash),
                "seconds": round(seconds, 2),
                "pss_kb": memory_kb(),
                "reads": reads,
                "failed": notes.failed,
            }
        }
    )
    while True:
        request = wire.receive()
        if request is None:
            os._exit(0)
        changed = stamp.changed() or shadowed(request["tree"], stash.names)
        if changed:
            wire.send({"failed": changed, "packages": []})
            os._exit(1)
        rank = fork_ranks(request["ranks"], wire)
        if rank is not None:
            become(rank, request, engine, added, stash, begun)
            return rank["boot"], stash


class EnginePipe:
    """Documents to and from the engine, one a line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_inheritable(descriptor, False)
        self._rest = b""

    def send(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode() + b"\n"
        while data:
            data = data[os.write(self.descriptor, data) :]

    def receive(self) -> Any:
        """Return the next document, or None at the end."""
        while b"\n" not in self._rest:
            data = os.read(self.descriptor, 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


class Priority:
    """How this process runs: after everything else while it loads, and the first to be killed if memory runs out."""

    def __init__(self, is_urgent: bool) -> None:
        self._policy = os.sched_getscheduler(0)
        self._parameter = os.sched_getparam(0)
        self._oom = _read("/proc/self/oom_score_adj")
        _write("/proc/self/oom_score_adj", b"1000")
        self.share = 1.0
        self._is_idle = not is_urgent and self._policy == os.SCHED_OTHER
        if self._is_idle:
            _set_io_priority(IOPRIO_IDLE)
            if may_come_back():
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            else:
                self.share = SHARE

    def rest(self) -> None:
        """Run as before: it uses nothing while it waits, and an order cannot wait for idle time; raises OSError."""
        if self._is_idle:
            _set_io_priority(IOPRIO_NONE)
            if os.sched_getscheduler(0) != self._policy:
                os.sched_setscheduler(0, self._policy, self._parameter)

    def restore(self) -> None:
        """Let the kernel treat this process, a rank now, like any other if memory runs out."""
        _write("/proc/self/oom_score_adj", self._oom)


def may_come_back() -> bool:
    """Return whether a process of this user may leave idle priority again."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            policy = os.sched_getscheduler(0)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, policy, os.sched_param(0))
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _set_io_priority(value: int) -> None:
    number = IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _call("syscall", (number, 1, 0, value))


def _call(name: str, args: tuple[int, ...]) -> int:
    import _ctypes

    return int(_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name), args))  # type: ignore[arg-type]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(data)
    except OSError:
        return


def memory_kb() -> int:
    """Return this process's proportional share of memory in KiB, or 0."""
    for line in _read("/proc/self/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return 0


def load(names: list[str], notes: Notes, priority: Priority) -> float:
    """Import modules by name and leave nothing else changed; returns the seconds that it took. Raises Odd."""
    import gc

    main = sys.modules["__main__"]
    gc.disable()
    # Modules ask it whether Python is interactive.
    main.__file__ = sys.argv[0]
    began = time.perf_counter()
    before = _state()
    with notes:
        files = _descriptors()
        for name in names:
            if name not in sys.modules and name not in notes.failed:
                _load_one(name, priority)
                if _descriptors() != files:
                    raise Odd(f"{name} opens {_new_files(files)} when it is imported", [name.partition(".")[0]])
                if threads():
                    raise Odd(f"{name} starts a thread when it is imported", [name.partition(".")[0]])
    seconds = time.perf_counter() - began
    del main.__file__
    gc.enable()
    gc.collect()
    # The collector skips what is loaded: otherwise it would copy all of it into each rank, at the latest at its end.
    gc.freeze()
    now = _state()
    changed = [what for what, value in before.items() if now[what] != value]
    if changed:
        raise Odd(f"loading modules has changed this process: {', '.join(changed)}")
    return seconds


def _load_one(name: str, priority: Priority) -> None:
    used = time.process_time()
    try:
        _bootstrap._gcd_import(name)
    except (Exception, SystemExit):  # noqa: BLE001  whatever a module raises
        # It is in `failed`; a script that imports it gets the error itself.
        return
    if priority.share < 1.0:
        time.sleep((time.process_time() - used) * (1.0 / priority.share - 1.0))


def _state() -> dict[str, Any]:
    """Return what imports should leave as it was."""
    import _signal  # type: ignore[import-not-found]  # the module signal is not for this process to import

    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "working directory": os.getcwd(),
        "umask": umask,
        "signal handlers": [_signal.getsignal(number) for number in sorted(_signal.valid_signals())],
        "affinity": os.sched_getaffinity(0),
        "descriptors": _descriptors(),
    }


def _descriptors() -> set[str]:
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{name} {os.readlink('/proc/self/fd/' + name)}")
        except OSError:
            continue  # the one that lists them
    return descriptors


def _new_files(before: set[str]) -> str:
    return ", ".join(sorted(entry.partition(" ")[2] for entry in _descriptors() - before)) or "a file"


def look_at_self(stash: Stash, directory: str) -> None:
    """Raise Odd when a fork of this process would not be a sound rank; `directory`: the script's."""
    in_tree = shadowed(directory, stash.names)
    if in_tree:
        raise Odd(in_tree)
    cuda = stash.get("torch._C")
    child = os.fork()
    if child == 0:
        is_bad = 1
        try:
            ask = getattr(cuda, "_cuda_isInBadFork", None)
            is_bad = int(bool(ask and ask()))
        finally:
            os._exit(is_bad)
    if os.waitpid(child, 0)[1] != 0:
        raise Odd("a module has asked CUDA for its devices while it was loaded")
    if count := threads():
        raise Odd(f"{count} threads run after modules were loaded")


def threads() -> int:
    """Return how many threads besides this one are left when the process is about to fork."""
    count = len(os.listdir("/proc/self/task")) - 1
    if count == 0:
        return 0
    # A library that can be forked (OpenBLAS) ends its threads at a fork, and starts them when they are needed.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) - 1


class Stamp:
    """Sizes and times of files."""

    def __init__(self, paths: list[str]) -> None:
        self._seen = {path: _stat(path) for path in paths}

    def changed(self) -> str:
        """Return which file is not as it was; empty if none."""
        for path, before in self._seen.items():
            if _stat(path) != before:
                return f"{path} has changed"
        return ""


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return (0 if os.path.isdir(path) else status.st_size), status.st_mtime_ns


def shadowed(directory: str, names: set[str]) -> str:
    """Return which module of a script's directory has the name of a loaded one; empty if none."""
    try:
        entries = {entry.partition(".")[0] for entry in os.listdir(directory)} if directory else set()
    except OSError:
        entries = set()
    both = sorted(entries & names)
    return f"{both[0]} is a module of the work tree too" if both else ""


def fork_ranks(ranks: list[dict[str, Any]], wire: EnginePipe) -> Any:
    """Fork these ranks as children of the engine; returns None here, and each rank its own part of the order."""
    pids, tell = os.pipe()
    begin, let_begin = os.pipe()
    middle = os.fork()
    if middle == 0:
        number = _fork_each(len(ranks))
        os.setsid()
        # From now on it can be killed with all that it starts.
        os.write(tell, b"%d %d\n" % (number, os.getpid()))
        for descriptor in (pids, tell, let_begin, wire.descriptor):
            os.close(descriptor)
        # The engine is the parent from the moment at which the process between has ended.
        if os.read(begin, 1) != b".":
            os._exit(1)
        os.close(begin)
        return ranks[number]
    os.close(tell)
    os.close(begin)
    status = os.waitpid(middle, 0)[1]
    output = b""
    while output.count(b"\n") < len(ranks):
        more = os.read(pids, 65536)
        if not more:
            break
        output += more
    os.close(pids)
    begun = dict(line.split() for line in output.splitlines())
    if status != 0 or len(begun) != len(ranks):
        # They exit, because nobody lets them begin.
        os.close(let_begin)
        wire.send({"failed": "the ranks could not be forked", "packages": []})
        os._exit(1)
    wire.send({"pids": [int(begun[b"%d" % number]) for number in range(len(ranks))]})
    try:
        os.write(let_begin, b"." * len(ranks))
    except BrokenPipeError:
        pass  # the engine has ended all of them already
    os.close(let_begin)
    return None


def _fork_each(count: int) -> int:
    """Fork that many processes and end; returns, in each of them, its number."""
    status = 1
    try:
        for number in range(count):
            if os.fork() == 0:
                status = -1
                return number
        status = 0
    finally:
        if status >= 0:
            os._exit(status)
    return -1


def become(
    rank: dict[str, Any],
    request: Args,
    engine: int,
    added: dict[str, str],
    stash: Stash,
    priority: Priority,
) -> None:
    """Turn this process into a rank that Python has just started."""
    _call("prctl", (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    if os.getppid() != engine:
        os._exit(1)
    try:
        priority.restore()
        for number, path in ((1, rank["stdout"]), (2, rank["stderr"])):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["cwd"])
        env = {**rank["env"], **{name: added[name] for name in added if name not in rank["env"]}}
        os.environ.clear()
        os.environ.update(env)
        show_environment(env, request["varying"])
        set_arguments(request["replaced"], request["arguments"], request["command"])
        make_new(stash)
    except BaseException as error:  # noqa: BLE001  a rank that is not set up must not run the script
        os.write(2, f"the rank does not start: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def set_arguments(count: int, arguments: list[str], command: list[str]) -> None:
    """Replace the last `count` arguments of this process, for Python and, with the whole command, in /proc."""
    for words in (sys.argv, getattr(sys, "orig_argv", [])):
        words[len(words) - count :] = arguments
    with open("/proc/self/stat", "rb") as file:
        start, end = (int(field) for field in file.read().rpartition(b")")[2].split()[45:47])
    data = b"".join(os.fsencode(word) + b"\0" for word in command)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(data.ljust(end - start, b"\0"))


def show_environment(env: dict[str, str], varying: list[str]) -> None:
    """Write a rank's variables where /proc shows them, into the space of the `varying` ones, which were last there."""
    with open("/proc/self/stat", "rb") as file:
        start, end = (int(field) for field in file.read().rpartition(b")")[2].split()[47:49])
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().split(b"\0")
    names = {os.fsencode(name) for name in varying}
    common = next((at for at, entry in enumerate(entries) if entry.partition(b"=")[0] in names), len(entries))
    at = sum(len(entry) + 1 for entry in entries[:common])
    present = set(entries[:common])
    new = [os.fsencode(f"{name}={value}") for name, value in env.items()]
    data = b"".join(entry + b"\0" for entry in new if entry not in present)
    if common < len(entries) and len(data) <= end - start - at:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start + at)
            memory.write(data.ljust(end - start - at, b"\0"))


def make_new(stash: Stash) -> None:
    """Give this process its own random state, and what else each process has of its own."""
    random = stash.get("numpy.random.mtrand")
    if random is not None:
        random._rand.seed()
    torch = stash.get("torch")
    if torch is not None and hasattr(torch, "default_generator") and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    process = stash.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading = stash.get("threading")
    if threading is not None and hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()
    logging = stash.get("logging")
    if logging is not None:
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()
