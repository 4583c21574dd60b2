"""The engine's side of its waiting process (waiting.py): what it loads, when it is started, when it becomes ranks.

In: what a node's ranks have imported, or what the script names, and orders. Out: forked ranks, or `Cold` with the
reason why they must be started like any process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.machinery
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from remote_agent.base.files import atomic_write, read_json
from remote_agent.base.tasks import within
from remote_agent.engine import boot_dir
from remote_agent.vitals.host import HostUsage
from remote_agent.wire.documents import Count
from remote_agent.wire.gate import Misfit, reader

if TYPE_CHECKING:
    from remote_agent.engine.order import Order
    from remote_agent.engine.processes import Orphans
    from remote_agent.wire.answers import ForkedRank, ForkOrder, LoadedModules, LoadOrder
    from remote_agent.wire.documents import StandbyStatus

log = logging.getLogger(__name__)

# From the order to the pids of the ranks it takes milliseconds, on a node that swaps more.
FORK_S = 3.0
# On a busy node, loading may take this long; then the process is given up.
LOAD_S = 600.0
# The ranks of a launch wait this long for the process, which has already begun to load what they need.
LAUNCH_S = 45.0
# The process may take this share of the node's free memory; before its size is known, this size is expected.
MEMORY_SHARE = 0.1
EXPECTED_KB = 400 * 1024
# An entry is a module, with an attribute that the script takes from it: lazy packages load only what is requested.
MODULE = re.compile(r"\w+(\.\w+)*(:\w+)?")
# This matches a statement that sets a variable, as ast.unparse writes it.
SETS = re.compile(r"(?:os\.)?environ(?:\[|\.setdefault\()'(\w+)'(?:\] = |, )'([^'\\]*)'\)?")
# A node keeps at most this many lists, one for each script and interpreter.
MAX_LISTS = 64
# A package imports this only when a training script uses it: for torch, that is an optimizer's first step.
LOADED_LATE = {"torch": "torch._dynamo"}
# Each rank has its own values. The waiting process has none; a module that asks for one on import is left out.
PER_RANK = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "SUPERVISOR_METRICS"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    )
)
# Libraries read these when a group is formed, not when they are loaded.
LATE = ("NCCL_", "GLOO_")
# The login of the next job has its own values.
LOGIN = ("SSH_", "XDG_SESSION_")
InThread = Callable[..., Awaitable[Any]]


class Cold(Exception):
    """The ranks must be started like any process; the text says why."""


def varies(name: str) -> bool:
    """Return whether a variable may differ between the waiting process and a rank."""
    return name in PER_RANK or name.startswith((*LATE, *LOGIN))


def refusal(order: Order, env: Mapping[str, str]) -> str:
    """Return why an order's ranks can never be forked; empty if they can."""
    if order.kind == "binary":
        return "the program is not run by Python"
    if order.numa_binding:
        return "numa_binding starts each rank with a command of its own"
    if order.rendezvous is not None:
        return "torch's own agent starts the ranks"
    return "PYTHON_EXEC names another interpreter" if env.get("PYTHON_EXEC") else ""


@dataclasses.dataclass(frozen=True)
class LastStart:
    """How the newest ranks were started: a waiting process is started in the same way."""

    order: Order
    env: dict[str, str]
    """All variables of local rank 0."""
    boot: Path | None
    """The generation's own directory; None where nothing was started yet."""


KnownScript = TypedDict("KnownScript", {"modules": list[str], "left_out": dict[str, str], "pss_kb": Count}, total=False)
_read_script = reader(KnownScript)


def _read_known(path: Path) -> KnownScript:
    """Return what a file says; nothing if it is damaged."""
    with contextlib.suppress(Misfit):
        return _read_script(read_json(path))
    return {}


class Memory:
    """What is known of a script on this node, in one file: the modules that its ranks load, and what not to load."""

    def __init__(self, started: LastStart) -> None:
        self._started = started
        order, folder = started.order, Path(started.order.standby)
        script = _digest([order.kind, order.script, sys.executable, sys.version])
        self._path = folder / f"{script}-{_digest([order.cwd])}.json"
        # A tree that is new here begins with what this script has loaded in the newest other tree.
        others = _newest_first(folder, f"{script}-*.json")
        nothing: KnownScript = {}
        self._known = next((known for path in (self._path, *others) if (known := _read_known(path))), nothing)

    @property
    def modules(self) -> list[str]:
        """The modules to load, in their order: those that ranks have loaded, before the first ranks what it names."""
        left_out = self.left_out
        return [name for name in self._names() if package_of(name) not in left_out]

    def _names(self) -> list[str]:
        known = [name for name in self._known.get("modules", ()) if MODULE.fullmatch(name)]
        return known or named_by(self._started)

    @property
    def left_out(self) -> dict[str, str]:
        """Packages that are not loaded, with the reason."""
        return self._known.get("left_out", {})

    @property
    def pss_kb(self) -> int:
        """The memory that the waiting process took last time, or an estimate."""
        return self._known.get("pss_kb") or EXPECTED_KB

    def note(self, facts: KnownScript) -> None:
        """Remember facts for the next time."""
        self._known.update(facts)
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(self._path, json.dumps(self._known).encode())
            for path in _newest_first(self._path.parent, "*.json")[MAX_LISTS:]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remember what %s loads: %s", self._path, error)

    def add(self, text: str) -> None:
        """Add the modules that a rank has noted, one a line: name, tab, file. What was loaded for it is not noted."""
        noted = [line.partition("\t") for line in text.splitlines()]
        outside = {package_of(name) for name, _, file in noted if not is_installed(file)}
        known = self._names()
        names = dict.fromkeys([*known, *(name for name, _, _ in noted if MODULE.fullmatch(name))])
        modules = [name for name in names if package_of(name) not in outside]
        if modules != known:
            self.note({"modules": modules})


def package_of(name: str) -> str:
    """Return the package of a MODULE."""
    return name.partition(":")[0].partition(".")[0]


def _digest(key: list[str]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    times = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


def is_installed(file: str) -> bool:
    """Return whether a module's file belongs to Python or an installed package, not to anybody's work tree."""
    return _is_in_packages(Path(file)) or file.startswith((os.path.dirname(os.__file__) + os.sep, "<frozen "))


def _is_in_packages(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def named_by(started: LastStart) -> list[str]:
    """Return the installed packages, and their modules, that a script imports when it is run, in its order."""
    names = []
    for one in _statements(started.order, _run_at_import):
        if isinstance(one, ast.Import):
            names += [alias.name for alias in one.names]
        elif isinstance(one, ast.ImportFrom) and one.level == 0 and one.module:
            names += [one.module, *(f"{one.module}:{alias.name}" for alias in one.names if alias.name != "*")]
    folders = [
        os.path.dirname(os.path.join(started.order.cwd, started.order.script)),
        *started.env.get("PYTHONPATH", "").split(os.pathsep),
        *sys.path,
    ]
    packages = {name for name in map(package_of, names) if _is_package(name, folders)}
    modules = [name for name in dict.fromkeys(names) if package_of(name) in packages]
    return [*modules, *(late for name, late in LOADED_LATE.items() if name in packages)]


def set_by(order: Order) -> dict[str, str]:
    """Return the variables to which a script gives a constant value in any case: packages may read them."""
    simple = (
        ast.unparse(one) for one in _statements(order, lambda body: body) if isinstance(one, (ast.Assign, ast.Expr))
    )
    return {match[1]: match[2] for text in simple if (match := SETS.fullmatch(text))}


def _statements(order: Order, choose: Callable[[list[ast.stmt]], Iterable[ast.stmt]]) -> list[ast.stmt]:
    """Return the chosen statements of a script; none if it cannot be read."""
    if order.kind != "script":
        return []
    try:
        return list(choose(ast.parse(Path(order.cwd, order.script).read_bytes()).body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # Python reports the error to the ranks too


def _run_at_import(statements: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Find the statements that are not in a function or a class."""
    for one in statements:
        if isinstance(one, ast.stmt):
            yield one
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _run_at_import(list(ast.iter_child_nodes(one)))


def _is_package(name: str, folders: Sequence[str]) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    return spec is not None and spec.origin is not None and _is_in_packages(Path(spec.origin))


class Standby:
    """The waiting process, of which there is at most one. An owner must await `close`."""

    def __init__(self, orphans: Orphans, in_thread: InThread, notify: Callable[[StandbyStatus], None]) -> None:
        self._orphans = orphans
        self._in_thread = in_thread
        self._notify = notify
        self._started: LastStart | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._made_for: LastStart | None = None
        self._names: frozenset[str] = frozenset()
        """The names that it was told to load."""
        self._set: dict[str, str] = {}
        """What the script sets before it imports them."""
        self._folder: Path | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[list[int]] | None = None
        self._is_ready = False
        self._settled = asyncio.Event()
        """Set unless ranks should wait for a process that still loads."""
        self._settled.set()
        self._ending = asyncio.Lock()
        self._limit: asyncio.TimerHandle | None = None
        self._why = "nothing was loaded before"

    # When it is started

    def note_start(self, order: Order, env: dict[str, str], boot: Path | None) -> None:
        """Note how ranks were started, or will be."""
        self._started = LastStart(order, env, boot)

    def learn(self) -> None:
        """Remember which modules the newest ranks have loaded so far."""
        started = self._started
        if started is not None and started.boot is not None and started.order.standby:
            with contextlib.suppress(OSError):
                noted = (started.boot / boot_dir.IMPORTS).read_text(encoding="utf-8", errors="replace")
                Memory(started).add(noted)

    async def begin(self, is_urgent: bool = False) -> None:
        """Start the waiting process, if there is none, for ranks like the newest ones; `is_urgent`: they come soon."""
        started = self._started
        if started is None or refusal(started.order, started.env):
            return None
        self.learn()
        memory = Memory(started)
        made = self._made_for
        if self._process is not None and is_urgent and made is not None:
            # An earlier job has left this process.
            why = self._differs(made, started.order, {0: started.env})
            if why:
                await self._end(why)
        if self._process is not None:
            if self._is_ready and self._writer is not None and not self._names.issuperset(memory.modules):
                # By now the ranks have imported more than their script names.
                self._is_ready = False
                self._writer.write(json.dumps(self._to_load(started.order, memory, is_urgent)).encode() + b"\n")
                self._say("loading", "")
            return None
        if not memory.modules:
            # Before a launch, this is no failure.
            return None if is_urgent else self._fail("no modules to load are known")
        short = shortage(memory.pss_kb, Path(started.order.cwd))
        if short:
            return self._fail(short)
        try:
            await self._start(started, memory, is_urgent)
        except OSError as error:
            self._fail(f"the waiting process does not start: {error}")

    async def _start(self, started: LastStart, memory: Memory, is_urgent: bool) -> None:
        order = started.order
        ours, theirs = socket.socketpair()
        try:
            self._folder = boot_dir.waiting_directory(order.log_dir.parent)
            self._set = set_by(order)
            env = {name: value for name, value in {**started.env, **self._set}.items() if not varies(name)}
            boot_dir.add_bootstrap(env, self._folder)
            # This variable shows the next agent what processes its ranks have started.
            env["TORCHELASTIC_ERROR_FILE"] = f"{self._folder}/"
            document = {"descriptor": theirs.fileno(), **self._to_load(order, memory, is_urgent)}
            (self._folder / boot_dir.WAIT_ORDER).write_text(json.dumps(document), encoding="utf-8")
            words = boot_dir.command(order, self._folder, env)
            self._made_for = started
            self._process = await self._in_thread(_popen, words, env, order.cwd, self._folder, theirs.fileno())
        except BaseException:
            ours.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self._orphans.spared.add(self._process.pid)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 22)
        self._reader = asyncio.ensure_future(self._hear(reader, is_urgent))
        self._limit = asyncio.get_running_loop().call_later(LOAD_S, self._too_slow)
        if is_urgent:
            self._settled.clear()
        self._say("loading", "")

    def _to_load(self, order: Order, memory: Memory, is_urgent: bool) -> LoadOrder:
        """Return the order to load modules, which is noted."""
        self._names = frozenset(memory.modules)
        return {
            "modules": memory.modules,
            "left_out": sorted(memory.left_out),
            "varying": sorted(PER_RANK),
            "prefixes": [*LATE, *LOGIN],
            "is_urgent": is_urgent,
            "tree": _script_directory(order),
            "stamp": sorted({sys.executable, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
        }

    def stop_waiting(self) -> None:
        """Have ranks that wait for the process started cold."""
        self._settled.set()

    def _too_slow(self) -> None:
        if self._process is not None and not self._is_ready:
            self._why = f"the modules were not loaded within {LOAD_S:.0f} s"
            self._process.kill()

    # Its messages

    async def _hear(self, reader: asyncio.StreamReader, is_urgent: bool) -> None:
        why, package = "the waiting process has died", ""
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                document = json.loads(line)
                if "ready" in document:
                    self._ready(document["ready"])
                elif "failed" in document:
                    why, package = str(document["failed"]), str(document["package"])
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result([int(pid) for pid in document["pids"]])
        assert self._made_for is not None
        memory = Memory(self._made_for)
        begins_again = bool(package) and package not in memory.left_out
        await self._end(why, begins_again)
        if begins_again:
            memory.note({"left_out": {**memory.left_out, package: why}})
            await self.begin(is_urgent)

    def _ready(self, facts: LoadedModules) -> None:
        made_for = self._made_for
        assert made_for is not None
        memory = Memory(made_for)
        memory.note({"pss_kb": facts["pss_kb"]})
        self._is_ready = True
        self._settled.set()
        short = shortage(0, Path(made_for.order.cwd), facts["pss_kb"])
        if short and self._process is not None:
            self._why = short
            self._process.kill()
            return
        left_out = [*memory.left_out.values(), *facts["without"]]
        self._say("ready", "", facts["modules"], facts["pss_kb"] // 1024, left_out)

    def _say(self, state: str, why: str, modules: int = 0, mb: int = 0, left_out: Iterable[str] = ()) -> None:
        self._why = why
        pid = self._process.pid if self._process is not None else None
        known = list(left_out)
        self._notify({"state": state, "pid": pid, "why": why, "modules": modules, "mb": mb, "left_out": known})

    def _fail(self, why: str) -> None:
        log.info("no waiting process: %s", why)
        self._settled.set()
        self._say("failed", why)

    # Orders

    async def fork(
        self, order: Order, envs: dict[int, dict[str, str]], directories: Mapping[int, Path], boot: Path
    ) -> dict[int, int]:
        """Fork the ranks of an order; returns their pids by local rank. Raises Cold."""
        await self._finish_loading(order, envs)
        why = await self._why_not(order, envs)
        if why:
            raise Cold(why)
        assert self._writer is not None
        assert self._made_for is not None
        ranks: list[ForkedRank] = [
            {
                "env": envs[local_rank],
                "boot": str(boot),
                "stdout": str(directory / "stdout.log"),
                "stderr": str(directory / "stderr.log"),
            }
            for local_rank, directory in directories.items()
        ]
        request: ForkOrder = {
            "ranks": ranks,
            "cwd": order.cwd,
            "tree": _script_directory(order),
            "arguments": list(order.args),
            "replaced": len(self._made_for.order.args),
        }
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            pids = await asyncio.wait_for(self._answer, FORK_S)
        except asyncio.TimeoutError:
            await self._end(f"the waiting process did not answer within {FORK_S:.0f} s")
            raise Cold(self._why) from None
        except BaseException:
            # Nobody waits for these ranks any more: those that it has begun are swept, and it must not begin others.
            await self._end("its order was cancelled")
            raise
        finally:
            self._answer = None
        return dict(zip(directories, pids))

    async def _why_not(self, order: Order, envs: dict[int, dict[str, str]]) -> str:
        """Return why the ranks must be started cold; a waiting process that cannot be used any more is ended."""
        refused = refusal(order, envs[0])
        if refused:
            return refused
        if self._process is None or self._made_for is None:
            return self._why
        why = self._differs(self._made_for, order, envs)
        if why:
            await self._end(why)
        elif not self._is_ready:
            why = "the waiting process was still loading modules"
        return why

    async def _finish_loading(self, order: Order, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Wait for a process that loads for these ranks: it has begun before them what each of them would do."""
        made = self._made_for
        if self._settled.is_set() or made is None or refusal(order, envs[0]) or self._differs(made, order, envs):
            return
        if not await within(self._settled, LAUNCH_S):
            await self._end(f"the modules were not loaded within {LAUNCH_S:.0f} s")

    def _differs(self, made: LastStart, order: Order, envs: Mapping[int, Mapping[str, str]]) -> str:
        """Return why these ranks are not those that the process was made for; empty if they are."""
        if (made.order.cwd, made.order.kind, made.order.script) != (order.cwd, order.kind, order.script):
            return "another script is started"
        if set_by(order) != self._set:
            return "the script sets other variables than when its modules were loaded"
        return next((why for env in envs.values() if (why := self._unlike(env))), "")

    def _unlike(self, env: Mapping[str, str]) -> str:
        """Return which variable keeps a rank from being forked; empty if none."""
        assert self._made_for is not None
        before = self._made_for.env
        for name in sorted({name for name, _ in before.items() ^ env.items()}):
            if not varies(name):
                return f"{name} has changed since the modules were loaded"
        return ""

    # Its end

    async def _end(self, why: str, begins_again: bool = False) -> None:
        """End the process and all that it has begun; the reason of a failure that is known already stays."""
        async with self._ending:
            if self._process is not None:
                await self._end_process(self._process, self._why or why)
                if begins_again:
                    # Ranks that wait for it go on waiting.
                    self._say("loading", "")
                else:
                    self._fail(self._why or why)

    async def _end_process(self, process: subprocess.Popen[bytes], why: str) -> None:
        self._process = None
        self._is_ready = False
        if self._limit is not None:
            self._limit.cancel()
        await self._orphans.end_spared(process, "the waiting process")
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        self._reader = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Cold(why))

    async def close(self) -> None:
        """End the waiting process."""
        await self._end("the engine ends")


def _popen(words: list[str], env: dict[str, str], cwd: str, folder: Path, descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process, in the thread that lives as long as the engine, with descriptors like those of a rank."""
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        return subprocess.Popen(
            words, env=env, cwd=cwd, stdout=out, stderr=err, start_new_session=True, pass_fds=(descriptor,)
        )


def _script_directory(order: Order) -> str:
    """Return the directory in which Python looks for modules first."""
    return os.path.dirname(os.path.join(order.cwd, order.script)) if order.kind == "script" else order.cwd


def shortage(expected_kb: int, folder: Path, taken_kb: int = 0) -> str:
    """Return why this node has no memory for a waiting process; empty if it has."""
    used, total = HostUsage(folder).memory()
    if used is None or total is None:
        return ""
    free_kb = (total - used) // 1024 + taken_kb
    needed = expected_kb or taken_kb
    if needed > MEMORY_SHARE * free_kb:
        return f"not enough memory: {needed // 1024} MB needed, {free_kb // 1024} MB free"
    return ""
