"""The waiting process of a node: a rank's own interpreter, stopped before its script, with modules loaded.

In: wait.json beside this file, which names the modules, and orders on an inherited socket. Out: ranks, forked from
this process; each returns from the bootstrap as a process that Python has just started.

It is `python -u SCRIPT`, started like a rank but without the variables that vary. Our bootstrap (worker.py) calls
`wait` there; only ranks return from it. A script finds the modules in sys.modules, as if something had imported them
before it; what else they do when they are imported has been done.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from remote_agent.wire.answers import ForkedRank, ForkOrder, LoadOrder

ORDER = "wait.json"
PR_SET_PDEATHSIG = 1
PR_SET_MM, PR_SET_MM_MAP = 35, 14
# Where torch does not seed its generator from the system, it begins with this.
TORCH_SEED = 67280421310721
# While ranks compute it uses this share of a core, by pausing between two modules.
SHARE = 0.5
# These threads survive a fork: jemalloc starts its own again (background_thread_postfork_child).
FORKABLE = frozenset({b"jemalloc_bg_thd"})
# Without torch, waiting saves nothing.
NEVER_LEFT_OUT = "torch"


_shown: Any = None


class NotForkable(Exception):
    """This process cannot become ranks; `package`: what should not be loaded next time, if that helps."""

    def __init__(self, why: str, package: str = "") -> None:
        super().__init__(why)
        self.package = "" if package == NEVER_LEFT_OUT else package


class LeftOut(BaseException):
    """A module needs a package that is left out; no `except Exception` of that module may hide it."""


def wait(here: str, known: set[str]) -> str:
    """Load the modules and wait; returns, in each rank that is forked here, its boot directory.

    `known`: what sys.modules had before this module was imported.
    """
    engine = os.getppid()
    with open(os.path.join(here, ORDER), encoding="utf-8") as file:
        order = json.load(file)
    wire = EnginePipe(int(order["descriptor"]))
    # If memory runs out, this process is killed first.
    oom = _read("/proc/self/oom_score_adj")
    _write("/proc/self/oom_score_adj", b"1000")
    # /proc shows by this variable whose process this is; nobody else may see it.
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    first = dict(os.environ)
    stamp = Stamp([])
    while True:
        try:
            if "modules" in order:
                needs = load(order)
                look_at_self(order["tree"], known)
                stamp = Stamp(order["stamp"])
                without = [f"{one} needs {what}" for one, what in needs.items() if one not in sys.modules]
                wire.send({"ready": {"modules": len(sys.modules), "pss_kb": memory_kb(), "without": without}})
            else:
                stamp.check()
                check_names(order["tree"], known)
                rank = fork_ranks(order["ranks"], wire)
                if rank is not None:
                    become(rank, order, engine, changed_since(first), oom)
                    return str(rank["boot"])
        except NotForkable as odd:
            wire.send({"failed": str(odd), "package": odd.package})
            os._exit(1)
        order = wire.receive()
        if order is None:
            os._exit(0)


class EnginePipe:
    """Documents to and from the engine, one a line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_inheritable(descriptor, False)
        self._rest = b""

    def send(self, document: Mapping[str, object]) -> None:
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


def in_fork(ask: Any) -> bool:
    """Return the answer of a question that is asked in a copy of this process; False if that fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if ask() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


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


class Environ(dict):  # type: ignore[type-arg]
    """The dictionary below os.environ while modules load: it reports which module asks for a variable.

    Variables that vary by rank are missing, so code that looks at all variables does not see them.
    """

    def __init__(self, data: dict[bytes, bytes], asked: Callable[[str], None]) -> None:
        super().__init__(data)
        self._asked = asked

    def __getitem__(self, key: bytes) -> Any:
        self._asked(os.fsdecode(key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked(os.fsdecode(key))  # type: ignore[arg-type]
        return super().__contains__(key)


class Loading:
    """The first finder while modules load: it refuses packages that are left out, and sees which module is odd.

    If modules import each other, the innermost is to blame; a package that is left out can still be found.
    """

    def __init__(self, order: LoadOrder) -> None:
        self._left_out = frozenset(order["left_out"])
        self._varying, self._prefixes = frozenset(order["varying"]), tuple(order["prefixes"])
        self.needs: dict[str, str] = {}
        """The package that is left out and that a module of a package imports, by the latter."""
        self._running: list[str] = []
        self._descriptors = _descriptors()
        self._by: dict[str, str] = {}
        """The package that was being loaded when a descriptor or thread first existed."""
        self._asked: NotForkable | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the usual spec, whose loader calls us."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return None

        def exec_module(module: Any) -> None:
            del spec.loader.exec_module  # type: ignore[union-attr]
            if name in self._left_out:
                self.needs.update(dict.fromkeys(map(_package, self._running), name))
                raise LeftOut(name)
            self._running.append(name)
            try:
                execute(module)
            finally:
                self._look()
                self._running.pop()

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec

    def asked(self, variable: str) -> None:
        """Note who asks for a variable that varies."""
        if self._asked is None and (variable in self._varying or variable.startswith(self._prefixes)):
            package = self._innermost()
            if package != NEVER_LEFT_OUT:
                self._asked = NotForkable(f"{package} reads {variable} when it is imported", package)

    def _innermost(self) -> str:
        return _package(self._running[-1]) if self._running else ""

    def _look(self) -> None:
        """Note what is open and what runs; a module around this one may close it again."""
        for name in (*(_descriptors() - self._descriptors), *os.listdir("/proc/self/task")):
            self._by.setdefault(name, self._innermost())

    def check(self) -> None:
        """Raise NotForkable if a module that has been loaded must be left out."""
        if self._asked is not None:
            raise self._asked
        for entry in sorted(_descriptors() - self._descriptors):
            package = self._by.get(entry, "")
            raise NotForkable(f"{package} opens {entry.partition(' ')[2]} when it is imported", package)
        for task in left_threads():
            package = self._by.get(task, "")
            raise NotForkable(f"{package} starts a thread when it is imported", package)


def _package(module: str) -> str:
    return module.partition(".")[0]


def load(order: LoadOrder) -> dict[str, str]:
    """Import modules by name, without those that cannot be; returns `Loading.needs`, raises NotForkable."""
    main = sys.modules["__main__"]
    before = _state()
    loading = Loading(order)
    real = os.environ._data  # type: ignore[attr-defined]
    watched = Environ(real, loading.asked)
    gc.disable()
    # Modules ask it whether Python is interactive.
    main.__file__ = sys.argv[0]
    os.environ._data = watched  # type: ignore[attr-defined]
    sys.meta_path.insert(0, loading)
    try:
        for name in order["modules"]:
            used = time.process_time()
            _load_one(name)
            loading.check()
            if not order["is_urgent"]:
                time.sleep((time.process_time() - used) * (1.0 / SHARE - 1.0))
    finally:
        sys.meta_path.remove(loading)
        real.clear()
        real.update(watched)
        os.environ._data = real  # type: ignore[attr-defined]
        del main.__file__
    gc.enable()
    gc.collect()
    # The collector skips what is loaded: otherwise it would copy all of it into each rank, at the latest at its end.
    gc.freeze()
    now = _state()
    changed = [what for what, value in before.items() if now[what] != value]
    if changed:
        raise NotForkable(f"loading modules has changed this process: {', '.join(changed)}")
    return loading.needs


def _load_one(name: str) -> None:
    name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(name)
        # Packages such as transformers load what is asked of them.
        if attribute:
            getattr(module, attribute, None)
    except (Exception, SystemExit, LeftOut):  # noqa: BLE001  whatever a module raises: the script gets it itself
        # The package would lack a module that was imported before it failed.
        for one in list(sys.modules):
            package = one.rpartition(".")[0]
            if package and package not in sys.modules:
                del sys.modules[one]


def _state() -> dict[str, object]:
    """Return what imports should leave as it was."""
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "working directory": os.getcwd(),
        "umask": umask,
        "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "affinity": os.sched_getaffinity(0),
        "descriptors": _descriptors(),
    }


def _descriptors() -> set[str]:
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{name} {os.readlink('/proc/self/fd/' + name)}")
        except OSError:
            continue  # this descriptor lists the others
    return descriptors


def look_at_self(directory: str, known: set[str]) -> None:
    """Raise NotForkable when a fork of this process would not be a sound rank; `directory`: the script's."""
    check_names(directory, known)
    ask = getattr(sys.modules.get("torch._C"), "_cuda_isInBadFork", None)
    if ask is not None and in_fork(ask):
        raise NotForkable("a module has asked CUDA for its devices while it was loaded")


def left_threads() -> list[str]:
    """Return the numbers of the threads besides this one that are left when the process is about to fork."""
    found = _threads()
    if found:
        # A library that can be forked (OpenBLAS) ends its threads at a fork, and starts them when they are needed.
        in_fork(bool)
    return _threads() if found else []


def _threads() -> list[str]:
    tasks = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    return sorted(task for task in tasks if _read(f"/proc/self/task/{task}/comm").strip() not in FORKABLE)


class Stamp:
    """Sizes and times of the files of installed packages, and of other paths."""

    def __init__(self, paths: list[str]) -> None:
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        # Files of a package in /tmp are gone when the first rank ends.
        installed = {file for file in files if isinstance(file, str) and "-packages" in file}
        self._seen = {path: _stat(path) for path in (*installed, *paths)}

    def check(self) -> None:
        """Raise NotForkable if a file is not as it was."""
        for path, before in self._seen.items():
            if _stat(path) != before:
                raise NotForkable(f"{path} has changed")


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return (0 if os.path.isdir(path) else status.st_size), status.st_mtime_ns


def check_names(directory: str, known: set[str]) -> None:
    """Raise NotForkable if a module of a script's directory has the name of one that is loaded early."""
    try:
        entries = {entry.partition(".")[0] for entry in os.listdir(directory)} if directory else set()
    except OSError:
        entries = set()
    both = sorted(entries & {name.partition(".")[0] for name in sys.modules.keys() - known})
    if both:
        raise NotForkable(f"{both[0]} is a module of the work tree too")


def changed_since(first: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that modules have set; None for those that they have removed."""
    now = dict(os.environ)
    return {name: now.get(name) for name in {**first, **now} if now.get(name) != first.get(name)}


def fork_ranks(ranks: list[ForkedRank], wire: EnginePipe) -> ForkedRank | None:
    """Fork these ranks as children of the engine; returns None here, and each rank its own part of the order."""
    pids, tell = os.pipe()
    begin, let_begin = os.pipe()
    middle = os.fork()
    if middle == 0:
        number = _fork_each(len(ranks))
        os.setsid()
        # From now on, this process can be killed with all that it starts.
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
        wire.send({"failed": "the ranks could not be forked", "package": ""})
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


def become(rank: ForkedRank, request: ForkOrder, engine: int, changes: dict[str, str | None], oom: bytes) -> None:
    """Turn this process into a rank that Python has just started."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != engine:
        os._exit(1)
    try:
        _write("/proc/self/oom_score_adj", oom)
        for number, path in ((1, rank["stdout"]), (2, rank["stderr"])):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["cwd"])
        env = {**rank["env"], **changes}
        os.environ.clear()
        os.environ.update({name: value for name, value in env.items() if value is not None})
        show_variables()
        for words in (sys.argv, getattr(sys, "orig_argv", [])):
            words[len(words) - request["replaced"] :] = request["arguments"]
        make_new()
    except BaseException as error:  # noqa: BLE001  a rank that is not set up must not run the script
        os.write(2, f"the rank does not start: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def show_variables() -> None:
    """Have /proc/PID/environ show the variables of this process as they are now: shells and tools read them there.

    See prctl(2), PR_SET_MM_MAP, which needs no rights; a kernel without it (CONFIG_CHECKPOINT_RESTORE) shows those of
    the waiting process.
    """
    global _shown
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        # The first two fields are the pid and the name, which may contain spaces and parentheses.
        fields = ["", "", "", *file.read().rpartition(")")[2].split()]
    start_code, end_code, start_stack = (int(fields[number]) for number in (26, 27, 28))
    start_data, end_data, start_brk, arg_start, arg_end = (int(fields[number]) for number in range(45, 50))
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    text = b"".join(b"%s=%s\0" % pair for pair in os.environb.items())
    # The kernel reads this memory as long as the process lives.
    _shown = ctypes.create_string_buffer(text, len(text))
    begin = ctypes.addressof(_shown)
    data = (start_code, end_code, start_data, end_data, start_brk, library.sbrk(0), start_stack)
    # No auxiliary vector and no program file are set.
    layout = (ctypes.c_uint64 * 13)(*data, arg_start, arg_end, begin, begin + len(text), 0, 0xFFFFFFFF << 32)
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    library.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), size, ctypes.c_ulong(0))


def make_new() -> None:
    """Give this process its own random state, and what else each process has of its own."""
    loaded = sys.modules.get
    if (numpy := loaded("numpy.random.mtrand")) is not None:
        numpy._rand.seed()
    torch = loaded("torch")
    if torch is not None and hasattr(torch, "default_generator") and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if (process := loaded("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    threading = loaded("threading")
    if threading is not None and hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()
    logging: Any = loaded("logging")
    if logging is not None:
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()
