"""Where the engine of a job runs on its node: the agent's own Python, an environment, a container, behind a prefix.

In: the job's description, its place on this node. Out: whatever the ranks need, made before they start; the command and
the variables that start a process of ours there; the end of what was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.proc import own_command, run_program
from remote_agent.base.tasks import to_the_end
from remote_agent.runtime import containers
from remote_agent.runtime.containers import Container
from remote_agent.runtime.environments import Environment, Environments, Wanted
from remote_agent.tree.sync import TreeSync
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.base.paths import Home, JobFiles
    from remote_agent.wire import JobSpec

log = logging.getLogger(__name__)

PYTHON = "python3"
# A cold disk may need this long for torch.
FIRST_S = 300.0
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Start:
    """How a process of ours is started where the ranks run."""

    command: list[str]
    variables: dict[str, str]
    """All variables of that process."""
    container: Container | None = None
    is_apart: bool = False
    """A prefix stands before it: the process that we start is not the one that we talk to."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What the description of a job says about where its ranks run on one node."""

    workdir: str
    """Where the ranks run: the directory of the work tree, if it is synced."""
    tree: str | None = None
    python: str = ""
    """The interpreter that was named; empty: none was."""
    wrap: str = ""
    container: str = ""
    mounts: tuple[str, ...] = ()
    environment: str = ""
    extras: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec, node: str, workdir: str) -> Place:
        """Return it for a node of a job."""
        own = spec.node(node)
        named = {"python": own.python, "wrap": own.wrap} if own is not None else {}
        return cls(
            workdir=workdir,
            tree=spec.tree,
            container=spec.container,
            mounts=spec.mounts,
            environment=spec.environment,
            extras=spec.extras,
            **named,
        )


class Runtime:
    """The agent's own Python, which has what the ranks need."""

    def __init__(self, home: Home, place: Place, job: JobFiles | None = None) -> None:
        """`job`: whose ranks run there; None: nobody's, for a preflight."""
        self._home = home
        self._place = place
        self._job = job
        self._under_way: dict[str, asyncio.Future[str]] = {}
        """What is being made, by the version of the work tree: each once, whoever waits for it."""
        self._said: dict[str, str] = {}
        self.changed = asyncio.Event()
        """Set when one of them says something, or has ended."""

    async def name(self, version: str = "") -> str | None:
        """Return what tells this one from another: "" where no work tree changes it, None where it is not made yet.

        `version`: of a work tree that is kept; empty: as it is in place. Raises Problem.
        """
        return ""

    async def has(self, version: str) -> bool:
        """Return whether it is made for a kept version of the work tree, from which it may be impossible to make."""
        try:
            return await self.name(version) is not None
        except Problem as problem:
            log.info("work tree %s: %s", version[:8], problem.message)
            return False

    async def make(self, version: str = "") -> str:
        """Make it, unless it is there; returns its name. Raises Problem."""
        version = self._in_place(version)
        doing = self._under_way.get(version)
        if doing is None:
            doing = asyncio.ensure_future(self._make(lambda text: self._say(version, text), version))
            self._under_way[version] = doing
            doing.add_done_callback(lambda _: self._over(version))
        return await asyncio.shield(doing)

    async def _make(self, say: Say, version: str) -> str:
        return ""

    def _in_place(self, version: str) -> str:
        """Return "" for a version of the work tree that is in place."""
        return version

    def saying(self, version: str = "") -> str:
        """Return what a making says that it does; "" if it says nothing."""
        return self._said.get(self._in_place(version), "")

    def _say(self, version: str, text: str) -> None:
        self._said[version] = text
        self.changed.set()

    def _over(self, version: str) -> None:
        self._under_way.pop(version, None)
        self._said.pop(version, None)
        self.changed.set()

    async def close(self) -> None:
        """End what is being made."""
        doing = list(self._under_way.values())
        for one in doing:
            one.cancel()
        await asyncio.gather(*doing, return_exceptions=True)

    async def start(self, *words: str, more: Mapping[str, str] | None = None) -> Start:
        """Return how one of our modes is started there, once it is made; `more`: variables. Raises Problem."""
        return Start(own_command(*words), {**os.environ, **(more or {})})

    async def variables(self, login: Mapping[str, str]) -> dict[str, str] | None:
        """Return what a process there has of the variables of another login; None: its own stay."""
        return dict(login)

    async def end(self, start: Start) -> None:
        """End what a start has left behind."""

    def inherit(self, former: Runtime) -> None:
        """Learn what is known of where an engine runs that serves another job now."""

    async def digest(self) -> str:
        """Return what should be the same on all nodes, as text; empty: there is nothing to compare."""
        return ""


class InEnvironment(Runtime):
    """An environment that is built on this node from a lock file of the work tree."""

    def __init__(self, home: Home, place: Place, job: JobFiles | None = None) -> None:
        super().__init__(home, place, job)
        self._all = Environments(home)

    def _wanted(self, version: str) -> Wanted:
        place = self._place
        # The operator's own, where it was brought here.
        lent = sorted(self._home.trees.glob("uv.*/uv"), key=lambda path: path.stat().st_mtime)
        return Wanted(
            file=place.environment,
            extras=place.extras,
            place=Path(place.workdir),
            tree=place.tree,
            version=self._in_place(version),
            python=place.python,
            uv=str(lent[-1]) if lent else "",
        )

    def _in_place(self, version: str) -> str:
        tree = self._place.tree
        return "" if tree is not None and version in TreeSync(self._home).in_place(tree) else version

    async def name(self, version: str = "") -> str | None:
        found = await self._all.look(self._wanted(version))
        return None if found is None else found.digest

    async def _make(self, say: Say, version: str) -> str:
        was_here = await self._all.look(self._wanted(version)) is not None
        made = await self._all.ensure(self._wanted(version), say, self._note_use)
        if not was_here:
            say("loading torch for the first time")
            # What a first import compiles and reads is there when ranks wait for it. They report if it fails.
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await run_program([str(made.python), "-c", "import torch"], FIRST_S)
        return made.digest

    def _note_use(self, digest: str) -> None:
        """Note that the job uses an environment, which stays as long as the job's files do."""
        if self._job is not None and digest not in used_by(self._job):
            with open(self._job.uses, "a", encoding="ascii") as file:
                file.write(f"{digest}\n")

    async def start(self, *words: str, more: Mapping[str, str] | None = None) -> Start:
        made = await self._now()
        if made is None:
            raise Problem("environment", "the environment of this work tree is not built here", "supervisor restart")
        return Start(own_command(*words, python=str(made.python)), {**made.variables(os.environ), **(more or {})})

    async def variables(self, login: Mapping[str, str]) -> dict[str, str] | None:
        made = await self._now()
        return dict(login) if made is None else made.variables(login)

    async def digest(self) -> str:
        made = await self._now()
        return "" if made is None else f"environment {made.alike[:12]}"

    async def _now(self) -> Environment | None:
        """Return the environment of the work tree that is in place, if it is built."""
        return await self._all.look(self._wanted(""))


def used_by(job: JobFiles) -> list[str]:
    """Return the digests of the environments that a job has used here."""
    try:
        return job.uses.read_text(encoding="ascii").split()
    except OSError:
        return []


class Behind(Runtime):
    """Behind a prefix of the user's, such as `apptainer exec --nv train.sif`."""

    async def start(self, *words: str, more: Mapping[str, str] | None = None) -> Start:
        prefix = shlex.split(self._place.wrap)
        command = own_command(*words, python=self._place.python or PYTHON)
        return Start([*prefix, *command], {**os.environ, **(more or {})}, is_apart=True)

    async def variables(self, login: Mapping[str, str]) -> dict[str, str] | None:
        # The prefix has made its own of them.
        return None


class InContainer(Behind):
    """In a container of podman or docker."""

    def __init__(self, home: Home, place: Place, job: JobFiles | None = None) -> None:
        super().__init__(home, place, job)
        self._image = self._tool = ""

    def inherit(self, former: Runtime) -> None:
        if isinstance(former, InContainer):
            self._image, self._tool = former._image, former._tool

    async def _make(self, say: Say, version: str) -> str:
        """Pull the image unless it is here."""
        image = self._place.container
        if not self._image:
            self._tool = tool = await containers.tool_for(image)
            self._image = await containers.image_id(tool, image)
            if not self._image:
                await containers.pull(tool, image, say)
                self._image = await containers.image_id(tool, image)
        if not self._image:
            raise Problem("container", f"{image} was pulled, and is not there", "")
        return ""

    async def start(self, *words: str, more: Mapping[str, str] | None = None) -> Start:
        await self.make()
        tool, place = self._tool, self._place
        job = self._job
        container = Container.new(tool, self._image, job.root if job is not None else self._home.root)
        if job is not None:
            for name in {*await containers.left_of(tool, job.root), *containers.saved(job.container)}:
                await containers.remove(tool, name)
            container.save(job.container)
        variables = {**self._variables(), **(more or {})}
        kinds = await containers.is_rootless(tool), await containers.keeps_groups(tool)
        prefix = container.prefix(self._mounts(), place.workdir, sorted(variables), *kinds)
        python, *command = own_command(*words, python=place.python or PYTHON)
        whole = [*prefix, "--entrypoint", python, self._image, *command]
        return Start(whole, {**os.environ, **variables}, container, is_apart=True)

    def _variables(self) -> dict[str, str]:
        """Return what the engine needs from this login: a container has the image's own variables."""
        user = str(os.environ.get("USER") or os.getuid())
        # Libraries keep what they fetch below HOME, and a user without a name is an error of getpass.
        named = {"SUPERVISOR_HOME": str(self._home.root), "HOME": self._own_home(), "USER": user, "LOGNAME": user}
        return named if own_command()[1] == "-S" else {**named, "PYTHONPATH": str(_source())}

    def _own_home(self) -> str:
        """Return the user's home where it is mounted, else a directory of ours that stays."""
        home = os.path.expanduser("~")
        if any(home == path or home.startswith(f"{path}/") for path in map(_source_of, self._place.mounts)):
            return home
        own = self._home.root / "home"
        own.mkdir(mode=0o700, exist_ok=True)
        return str(own)

    def _mounts(self) -> list[str]:
        """Return what the container sees at the same paths: our files, the work tree, what the user names."""
        mounts = [str(self._home.root), *self._place.mounts]
        if self._place.tree is None:
            mounts.append(self._place.workdir)
        if own_command()[1] != "-S":
            mounts.append(f"{_source()}:ro")
        return list({_source_of(mount): mount for mount in mounts}.values())

    async def end(self, start: Start) -> None:
        if start.container is not None:
            why = await to_the_end(containers.remove(start.container.tool, start.container.name))
            if why:
                log.warning("container %s is not removed: %s", start.container.name, why)
            containers.reap_monitors()

    async def digest(self) -> str:
        return f"image {self._image[:12]}" if self._image else ""


def entering(job: JobFiles, place: Place, words: list[str]) -> list[str]:
    """Return the command that runs one of our modes beside the ranks of a job; empty where that is here.

    Raises OSError, ValueError.
    """
    command = own_command(*words, python=place.python or PYTHON)
    if place.container:
        there = json.loads(job.container.read_text(encoding="utf-8"))
        terminal = ["--interactive", *(["--tty"] if os.isatty(0) else [])]
        return [
            there["tool"],
            "exec",
            *terminal,
            "--env",
            f"TERM={os.environ.get('TERM', '')}",
            there["name"],
            *command,
        ]
    return [*shlex.split(place.wrap), *command] if place.wrap else []


def _source_of(mount: str) -> str:
    return mount.partition(":")[0].rstrip("/")


def _source() -> Path:
    """Return the directory of this package, where it runs from source."""
    return Path(__file__).resolve().parents[2]


def runtime_of(home: Home, place: Place, job: JobFiles | None = None) -> Runtime:
    """Return where the ranks of a place run; `job`: as Runtime has it."""
    kinds = ((place.container, InContainer), (place.wrap, Behind), (place.environment, InEnvironment))
    kind: type[Runtime] = next((kind for named, kind in kinds if named), Runtime)
    return kind(home, place, job)
