"""The environments of this node: each is built once from a lock file, is named by a digest, and never changes.

In: a lock file in a work tree, uv or pip. Out: `environments/<digest>/`, whose bin/python runs the ranks; `Problem`
with the tool's own words when it cannot be built.

A build happens in `<digest>.<token>.building` and gets its name when it is complete, so that **nobody ever sees half an
environment**. Whoever holds the lock of `<digest>.lock` may build; its descriptor goes to all processes of the build,
so that the lock of a killed build is free when these have ended. **A build never writes into the work tree**: the tool
sees a copy, and what names the copy in the environment is changed to name the tree afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.files import sync, try_lock
from remote_agent.base.proc import KILL_S, environment, runs, start_ticks
from remote_agent.base.tasks import to_the_end
from remote_agent.runtime import tools
from remote_agent.runtime.project import PYLOCK, UV_LOCK, Files, InPlace, Project, files_of, kind_of, read_project
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.base.paths import Home

# A change of how environments are built, or of what is counted here, must change this.
FORMAT = 1
DIGEST_LENGTH = 32
LOCK_POLL_S = 0.2
ORPHANS_S = 5.0
ENDED_POLL_S = 0.02
INTERPRETER_S = 30.0
REMOVALS = 3
# It marks the processes of a build, also those that left its process group and closed its descriptors. Its value is the
# pid namespace, pid and start time of the agent, device and inode of `environments/`, as another host or container may
# have its path and see these processes, and the environment's digest.
MARK = "SUPERVISOR_BUILDS"
_NAME = re.compile(r"([0-9a-f]{32})(|\.lock|\.[0-9a-f]{8}\.(?:building|project))")
# These would lead a tool to another project, to another environment, or to packages outside of this one.
_MISLEADING = {"VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"}
_MISLEADING |= {"UV_PROJECT", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY", "UV_LOCKED", "UV_FROZEN", "UV_SYSTEM_PYTHON"}
_FACTS = "import platform; print(platform.python_implementation(), platform.python_version())"
_CORRECT = "correct the list of packages, or what the node can reach (index, proxy, disk), and run it again"
_GET_UV = "pip install --user uv on the node, or have uv where supervisor runs"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """An environment that a job asks for."""

    file: str
    """The lock file, relative to the tree: uv.lock, pylock.toml or a list of requirements (*.txt)."""
    extras: tuple[str, ...]
    """Extras of the project, only for uv.lock."""
    place: Path
    """Where the work tree is, or will be, when ranks run."""
    tree: str | None = None
    """The tree's name in `Home.trees`; None if it is not synced."""
    version: str = ""
    """The digest of a kept version of the tree; empty for the tree as it is in place."""
    python: str = ""
    """The interpreter to build with; empty for this agent's own, or what a project's .python-version says."""
    uv: str = ""
    """A uv that was brought here, for a node whose PATH has none."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A complete environment on this node."""

    digest: str
    path: Path
    alike: str = ""
    """The digest of what it is made from, without paths of this node: the same on nodes that have the same packages."""

    @property
    def python(self) -> Path:
        """The interpreter that ranks are started with."""
        return self.path / "bin" / "python"

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of a process in this environment, made from those that it would have without.

        PYTHONHOME is removed, not emptied: it would make Python look for its library elsewhere.
        """
        variables = {name: value for name, value in base.items() if name != "PYTHONHOME"}
        variables["VIRTUAL_ENV"] = str(self.path)
        variables["PATH"] = os.pathsep.join((str(self.path / "bin"), base.get("PATH") or os.defpath))
        return variables


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is wanted, after the tree and the interpreter were looked at."""

    wanted: Wanted
    files: Files
    project: Project
    interpreter: str
    version: str
    digest: str
    alike: str

    def environment(self, root: Path) -> Environment:
        return Environment(self.digest, root / self.digest, self.alike)


@dataclasses.dataclass(frozen=True)
class _Build:
    """One build on its way."""

    request: _Request
    building: Path
    copy: Path
    final: Path
    lock: int

    @property
    def folder(self) -> Path:
        """Where the tool runs: the folder of the lock file in the copy."""
        return self.copy / self.request.project.folder

    def moves(self) -> dict[str, str]:
        """Return the paths that must not be named when the build is complete, and what is named instead."""
        moves: dict[str, str] = {}
        for old, new in ((self.building, self.final), (self.copy, self.request.wanted.place)):
            moves[str(old)] = str(new)
            moves[os.path.realpath(old)] = str(new)
            moves[old.as_uri()] = new.as_uri()
            moves[Path(os.path.realpath(old)).as_uri()] = new.as_uri()
        return moves


class Environments:
    """What is in `environments/`; may be used by several jobs, and by several nodes that share a home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._root = home.environments
        self._interpreters: dict[tuple[str, int], str] = {}

    async def look(self, wanted: Wanted) -> Environment | None:
        """Return the environment if it is complete; raises Problem."""
        # It may read many files of a slow disk.
        return self._complete(await asyncio.to_thread(self._request, wanted))

    async def ensure(self, wanted: Wanted, say: Callable[[str], None], claim: Callable[[str], None]) -> Environment:
        """Return the environment, which is built if it is absent; raises Problem. `say` gets short lines of progress.

        `claim` notes who uses the digest, while nobody may remove it.
        After a cancellation no process of the build is left.
        """
        request = await asyncio.to_thread(self._request, wanted)
        with _as_problem():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._root / f"{request.digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await _wait_for(lock, self._root / request.digest, say)
            claim(request.digest)
            return self._complete(request) or await self._build(request, lock, say)
        finally:
            os.close(lock)

    def end_orphans(self) -> None:
        """End what builds have started whose agent was killed: the kernel ends the tool with it, but nothing else."""
        _end_marked(self._root, "", orphans_only=True)

    def unused(self, used: Collection[str]) -> list[Path]:
        """Return the environments that no job uses, and what killed builds have left; nothing that is being built."""
        return [path for path in self._entries() if path.name not in used and not self._is_locked(path.name)]

    def remove(self, path: Path, used: Callable[[], Collection[str]]) -> bool:
        """Remove what `unused` returned; False if somebody builds that environment, or has claimed it since.

        Raises OSError, Problem.
        It loses its name first, so that nobody sees half of it.
        """
        lock = self._open_lock(path.name)
        try:
            if lock is not None and (not try_lock(lock) or path.name in used()):
                return False
            if len(path.name) == DIGEST_LENGTH:
                aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.building")
                path.rename(aside)
                path = aside
            shutil.rmtree(path)
        finally:
            if lock is not None:
                os.close(lock)
        return True

    def _entries(self) -> Iterator[Path]:
        try:
            names = sorted(os.listdir(self._root))
        except FileNotFoundError:
            return
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and match[2] != ".lock":
                yield self._root / name

    def _open_lock(self, name: str) -> int | None:
        try:
            return os.open(self._root / f"{name[:DIGEST_LENGTH]}.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def _is_locked(self, name: str) -> bool:
        lock = self._open_lock(name)
        if lock is None:
            return False
        try:
            return not try_lock(lock)
        finally:
            os.close(lock)

    def _complete(self, request: _Request) -> Environment | None:
        """Return an environment that is here, unless its base interpreter was removed."""
        ready = request.environment(self._root)
        return ready if (ready.path / "pyvenv.cfg").is_file() and os.access(ready.python, os.X_OK) else None

    def _request(self, wanted: Wanted) -> _Request:
        """Read what an environment is made from and compute its digest; raises Problem."""
        if wanted.extras and kind_of(wanted.file) != UV_LOCK:
            hint = "remove the extras, or write them into the file, as in package[extra]"
            raise Problem("environment", f"{wanted.file} has no extras: only a uv.lock has them", hint)
        with _as_problem():
            # A tree's state is where TreeSync has it.
            side = None if wanted.tree is None else self._home.tree(wanted.tree).parent / ".state" / wanted.tree
            files = files_of(wanted.place, side, wanted.version)
            project = read_project(wanted.file, files)
            interpreter, version = self._interpreter(wanted.python)
            digest = _digest(wanted, project, files, f"{version} {interpreter}", wanted.place)
            alike = _digest(wanted, project, files, version, Path("/"))
        return _Request(wanted, files, project, interpreter, version, digest, alike)

    def _interpreter(self, named: str) -> tuple[str, str]:
        """Return an interpreter's path, and its name and version; raises Problem, OSError."""
        own = f"{platform.python_implementation()} {platform.python_version()}"
        if not named or named == sys.executable:
            return sys.executable, own
        path = shutil.which(os.path.expanduser(named))
        if path is None:
            hint = "name an interpreter that every node has, or none, for the one that runs the agent"
            raise Problem("environment", f"there is no Python {named} on this node", hint)
        key = (path, os.stat(path).st_mtime_ns)
        if key not in self._interpreters:
            self._interpreters[key] = _ask(path)
        return path, self._interpreters[key]

    async def _build(self, request: _Request, lock: int, say: Callable[[str], None]) -> Environment:
        name = f"{request.digest}.{secrets.token_hex(4)}"
        final = self._root / request.digest
        build = _Build(request, self._root / f"{name}.building", self._root / f"{name}.project", final, lock)
        try:
            with _as_problem():
                await to_the_end(asyncio.to_thread(self._prepare, build))
                for tool, command in _commands(build):
                    await _run(tool, command, build, say)
                await to_the_end(asyncio.to_thread(_finish, build))
                await _run("its python", [str(build.building / "bin" / "python"), "-c", "import sys"], build, say)
                await to_the_end(asyncio.to_thread(_publish, build))
        finally:
            await to_the_end(asyncio.to_thread(self._sweep, request.digest))
        return request.environment(self._root)

    def _prepare(self, build: _Build) -> None:
        """Remove what killed builds left, and copy what the tool needs; raises OSError, Problem."""
        request = build.request
        self.end_orphans()
        self._sweep(request.digest)
        request.project.copy(request.files, build.copy)
        copied = InPlace(build.copy)
        project = read_project(request.wanted.file, copied)
        if _digest(request.wanted, project, copied, request.version, Path("/")) != request.alike:
            raise Problem("environment", "the work tree changed while its environment was being built", "run it again")

    def _sweep(self, digest: str) -> None:
        """Remove unfinished builds of an environment whose lock is held, and end what is left of their processes."""
        left = [path for path in self._entries() if path.name.startswith(f"{digest}.")]
        if left:
            _end_marked(self._root, digest, orphans_only=False)
        for path in left:
            # A process that has just been killed may add a file meanwhile. One on another node that shares this home
            # may do so for longer; then the next build removes it.
            for _ in range(REMOVALS):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break


def _digest(wanted: Wanted, project: Project, files: Files, python: str, place: Path) -> str:
    facts = {
        "format": FORMAT,
        "kind": project.kind,
        "files": project.facts(files, place),
        "extras": sorted(set(wanted.extras)),
        "python": python,
        "platform": _platform(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]


@functools.cache
def _platform() -> str:
    return " ".join((platform.machine(), *platform.libc_ver()))


def _ask(python: str) -> str:
    """Return an interpreter's name and version; raises Problem."""
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _FACTS], stdin=subprocess.DEVNULL, capture_output=True, timeout=INTERPRETER_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Problem("environment", f"{python} does not run: {error}") from error
    if done.returncode != 0:
        raise Problem("environment", f"{python} does not run: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout.decode(errors="replace").strip()


async def _wait_for(lock: int, final: Path, say: Callable[[str], None]) -> None:
    """Take a lock when it is free; raises Problem where there are no locks."""
    waiting, looked = False, 0.0
    while not try_lock(lock):
        if not waiting:
            say("another job builds this environment")
        waiting = True
        # The kernel ends the tool of a killed agent, but not what the tool has started, and that has the lock too.
        if time.monotonic() - looked >= ORPHANS_S:
            looked = time.monotonic()
            await to_the_end(asyncio.to_thread(_end_marked, final.parent, final.name, orphans_only=True))
        await asyncio.sleep(LOCK_POLL_S)


@contextlib.contextmanager
def _as_problem() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Problem("environment", f"the environment cannot be built: {error}") from error


def _commands(build: _Build) -> list[tuple[str, list[str]]]:
    """Return the tools that fill an environment and their commands; raises Problem if there is none for it."""
    request = build.request
    wanted, kind = request.wanted, request.project.kind
    uv = shutil.which("uv") or shutil.which(os.path.abspath(wanted.uv))
    name, python = Path(wanted.file).name, str(build.building / "bin" / "python")
    hashes = ["--require-hashes"] if any(b"--hash=" in data for data in request.project.inputs.values()) else []
    if uv is None:
        if kind in (UV_LOCK, PYLOCK):
            raise Problem("environment", f"{wanted.file} needs uv, which this node does not have", _GET_UV)
        pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        venv = [request.interpreter, "-m", "venv", str(build.building)]
        return [("python -m venv", venv), ("pip", [*pip, *hashes, "-r", name])]
    # The user's own choice of an interpreter comes before the project's, and that before the agent's.
    chosen = [] if request.project.pins_python and not wanted.python else ["--python", request.interpreter]
    if kind == UV_LOCK:
        extras = [word for extra in sorted(set(wanted.extras)) for word in ("--extra", extra)]
        return [("uv", [uv, "sync", "--frozen", "--no-progress", *extras, *chosen])]
    install = [uv, "pip", "install", "--no-progress", "--python", python, *hashes, "-r", name]
    return [("uv", [uv, "venv", "--no-progress", *chosen, str(build.building)]), ("uv", install)]


def _variables(build: _Build) -> dict[str, str]:
    """Return the variables of a tool: the user's, but for those that lead it elsewhere."""
    variables = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    variables["UV_PROJECT_ENVIRONMENT"] = str(build.building)
    variables[MARK] = (
        f"{_pid_namespace()}:{os.getpid()}:{start_ticks(os.getpid())}:{_place(build.final.parent)}:{build.final.name}"
    )
    # pip's configuration may say that packages go to the user's directory, which an environment does not have.
    variables["PIP_USER"] = "0"
    variables["NO_COLOR"] = "1"
    variables["PYTHONUNBUFFERED"] = "1"
    return variables


async def _run(tool: str, command: list[str], build: _Build, say: Callable[[str], None]) -> None:
    setting = tools.Setting(build.folder, _variables(build), (build.lock,), build.moves())
    try:
        await tools.run(command, say, setting)
    except tools.Failed as failed:
        raise Problem("environment", f"{tool} {failed}", _CORRECT) from failed


def _place(root: Path) -> str:
    info = os.stat(root)
    return f"{info.st_dev}:{info.st_ino}"


def _end_marked(root: Path, digest: str, *, orphans_only: bool) -> None:
    """End processes of builds of an environment, "": of any: all of them, or those whose agent is gone."""
    end = time.monotonic() + KILL_S
    while root.exists() and (pids := _marked([*_place(root).split(":"), *digest.split()], orphans_only)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # They write files until they are gone, and may have started others meanwhile.
        if time.monotonic() > end:
            return
        time.sleep(ENDED_POLL_S)


def _marked(named: list[str], orphans_only: bool) -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_marked(int(name), named, orphans_only)
    ]


def _is_marked(pid: int, named: list[str], orphans_only: bool) -> bool:
    start = f"{MARK}=".encode()
    for entry in (entry for entry in environment(pid) if entry.startswith(start)):
        fields = os.fsdecode(entry[len(start) :]).split(":")
        if fields[3 : 3 + len(named)] == named:
            # The pids of another namespace, a container's, say nothing here.
            is_ours = int(fields[0]) == _pid_namespace()
            return not orphans_only or (is_ours and not runs(int(fields[1]), int(fields[2])))
    return False


@functools.cache
def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _finish(build: _Build) -> None:
    """Make an environment name its final path and the tree, not the copies; raises Problem, OSError."""
    if build.request.project.has_editable:
        _refuse_compiled(build)
    moves = {os.fsencode(old): os.fsencode(new) for old, new in build.moves().items()}
    old = re.compile(b"|".join(re.escape(path) for path in sorted(moves, key=len, reverse=True)))
    for path in _naming_paths(build.building):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if path.parent.name == "bin" and not (data.startswith(b"#!") or path.name.startswith("activate")):
            continue
        changed = old.sub(lambda match: moves[match[0]], data)
        if changed != data:
            _replace(path, changed)


def _naming_paths(environment: Path) -> Iterator[Path]:
    """Yield the files that installers write paths into."""
    yield environment / "pyvenv.cfg"
    yield from sorted((environment / "bin").iterdir())
    for packages in environment.glob("lib/*/site-packages"):
        # Editable packages are a line of a .pth, or a module that it imports.
        for pattern in ("*.pth", "*.py", "*.egg-link", "*.dist-info/direct_url.json"):
            yield from sorted(packages.glob(pattern))


def _replace(path: Path, data: bytes) -> None:
    """Write a file anew: it may be a hard link to a file in uv's cache, which must not change."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.chmod(path.stat().st_mode & 0o777)
    os.replace(new, path)


def _refuse_compiled(build: _Build) -> None:
    """Raise Problem if a build put compiled code beside the source: the tree will not have it."""
    project = build.request.project
    copied = tuple(f"{local.path}/".lstrip("/") for local in project.locals if local.how == "directory")
    for path in sorted(build.copy.rglob("*.so")):
        relative = str(path.relative_to(build.copy))
        # What lies in build/ is a step on the way to what is installed.
        if relative.startswith(copied) or "build" in relative.split("/") or build.request.files.has(relative):
            continue
        raise Problem(
            "environment",
            f"the build compiles {relative} beside its source, but an environment never changes the work tree",
            "let that package be copied: editable = false in tool.uv.sources, or ./x instead of -e ./x",
        )


def _publish(build: _Build) -> None:
    """Give a complete environment its name, also after a loss of power; raises OSError.

    The copy goes first: nobody builds this environment again, and so would remove what an agent killed now has left.
    """
    shutil.rmtree(build.copy)
    if os.path.lexists(build.final):
        # Its base interpreter was removed, or somebody removed a part of it.
        os.rename(build.final, build.final.with_name(f"{build.final.name}.{secrets.token_hex(4)}.building"))
    _sync_disk(build.building)
    os.rename(build.building, build.final)
    sync(build.final.parent)


def _sync_disk(path: Path) -> None:
    """Write what is cached of the file system at a path: an environment has too many files to sync each."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)
