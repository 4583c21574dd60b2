"""Home: the jobs of all inventories that were used on this machine, for the screen that switches between them.

In: the known inventories; what their hosts answer. Out: a `HomeSource`; the screens of one job after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from remote_agent.wire import CallFailed, WireError
from supervisor import known
from supervisor.cli.entry import say
from supervisor.cli.jobs import CONNECT_DEADLINE, list_jobs
from supervisor.cli.options import open_known
from supervisor.errors import HostError, UsageError, why
from supervisor.inventory import Inventory, JobDefaults
from supervisor.inventory.sources import SOURCES
from supervisor.launch.specs import is_of_launch
from supervisor.link.jobs import group_jobs
from supervisor.session import Session
from supervisor.ssh import AgentFile, connect

if TYPE_CHECKING:
    from remote_agent.wire.answers import JobRow, ListedJob
    from remote_agent.wire.documents import IncidentDocument, Status
    from supervisor.inventory import Host
    from supervisor.ssh import NodeLink
    from supervisor.tui.source import HomeJob

# A host is asked for its jobs this often; one that does not answer is tried again after the second time, seconds.
EVERY: Final = 3.0
AGAIN: Final = 15.0
# This many ended jobs of an inventory are read in full, and this many at a time: each needs a connection.
ENDED_READ: Final = 20
AT_ONCE: Final = 4
# This many hosts of a job are connected to for its status.
HOSTS_OF_JOB: Final = 2
JobKey = tuple[str, str]


class KnownJobs:
    """The jobs of all known inventories; hosts are asked while `run` runs."""

    version = 0

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self._inventories: dict[str, Inventory] = {}
        for words in _words():
            try:
                self._inventories[words] = open_known(words)
            except UsageError as error:
                self.troubles.append(f"{place_of(words)}: {error.message}")
        self._broken = list(self.troubles)
        self._answers: dict[str, dict[str, Sequence[ListedJob]]] = {words: {} for words in self._inventories}
        self._failures: dict[tuple[str, str], str] = {}
        self._read: dict[JobKey, tuple[Status, IncidentDocument | None]] = {}
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._rows: list[HomeJob] = []

    @property
    def jobs(self) -> Sequence[HomeJob]:
        """The jobs, live ones first, then the newest."""
        return self._rows

    @property
    def asked(self) -> tuple[int, int]:
        """How many hosts have answered or failed, and how many there are; one in several inventories counts once."""
        answered = {(words, name) for words, jobs in self._answers.items() for name in jobs} | set(self._failures)
        hosts = [(words, host) for words, inventory in self._inventories.items() for host in inventory.hosts]
        places = {(host.ssh, host.user, host.port, host.local) for _, host in hosts}
        waiting = {
            (host.ssh, host.user, host.port, host.local) for words, host in hosts if (words, host.name) not in answered
        }
        return len(places - waiting), len(places)

    async def run(self) -> None:
        """Keep asking all hosts, until cancelled."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._agent = await asyncio.to_thread(AgentFile.build)
        try:
            for words, inventory in self._inventories.items():
                for host in inventory.hosts:
                    self._own((words, host.name, ""), self._watch(words, host))
            await asyncio.Event().wait()
        finally:
            tasks = list(self._tasks.values())
            self._tasks.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _own(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = asyncio.create_task(work)

    async def _watch(self, words: str, host: Host) -> None:
        while True:
            try:
                node = await connect(
                    host,
                    agent=self._agent,
                    progress=lambda step, text: None,
                    deadline_s=CONNECT_DEADLINE,
                    # The user looks at all jobs, not at this host.
                    may_ask=False,
                )
                try:
                    await self._ask(words, node)
                finally:
                    await node.close()
            except HostError as error:
                self._fail(words, host, f"{error.step}: {error.reason}")
            except CallFailed as error:
                self._fail(words, host, error.message)
            except (WireError, asyncio.TimeoutError) as error:
                self._fail(words, host, why(error))
            await asyncio.sleep(AGAIN)

    async def _ask(self, words: str, node: NodeLink) -> None:
        while True:
            jobs = (await list_jobs(node))["jobs"]
            self._failures.pop((words, node.host.name), None)
            self._answers[words][node.host.name] = jobs
            self._changed()
            self._read_new(words)
            await asyncio.sleep(EVERY)

    def _fail(self, words: str, host: Host, reason: str) -> None:
        self._failures[words, host.name] = f"{place_of(words)}: {host.name}: {reason}"
        self._answers[words].pop(host.name, None)
        self._changed()

    def _read_new(self, words: str) -> None:
        """Read the status of live jobs from now on, and that of ended ones once."""
        ended = 0
        for row in group_jobs(self._answers[words]):
            key = (words, str(row["job"]))
            ended += not row["live"]
            task = self._tasks.get(key)
            if (task is None or task.done()) and (row["live"] or (key not in self._read and ended <= ENDED_READ)):
                self._own(key, self._read_job(key, row))

    async def _read_job(self, key: JobKey, row: JobRow) -> None:
        inventory = self._inventories[key[0]]
        hosts = tuple(host for host in inventory.hosts if host.name in row["hosts"])[:HOSTS_OF_JOB]
        if row["live"]:
            await self._follow(key, dataclasses.replace(inventory, hosts=hosts))
        else:
            async with self._slots:
                await self._follow(key, dataclasses.replace(inventory, hosts=hosts))

    async def _follow(self, key: JobKey, inventory: Inventory) -> None:
        async with Session(inventory, key[1], follow=True) as session:
            version = 0
            while session.failure is None and not session.ended:
                version = await session.wait_change(1.0, version)
                if session.status:
                    self._read[key] = session.status, session.incidents[-1] if session.incidents else None
                    self._changed()

    def _changed(self) -> None:
        from supervisor.tui.source import HomeJob

        # The same hosts may be in several inventories: the one of the job's directory stands for it, else the first.
        rows: dict[tuple[str, object], tuple[bool, HomeJob]] = {}
        for words, answers in self._answers.items():
            for listed in group_jobs(answers):
                status, incident = self._read.get((words, listed["job"]), ({}, None))
                job = HomeJob(words, place_of(words), listed, status, incident)
                row = is_of_launch(self._inventories[words], listed["job"], listed["script"] or "", listed["tree"]), job
                key = listed["job"], listed.get("created_ns")
                rows[key] = max(rows.get(key, row), row, key=lambda one: one[0])
        self._rows = sorted((job for _, job in rows.values()), key=_order)
        self.troubles = [*self._broken, *self._failures.values()]
        self.version += 1


def _order(job: HomeJob) -> tuple[bool, int]:
    return not job.listed["live"], -(job.listed.get("created_ns") or 0)


def _words() -> list[str]:
    """Return the inventories: the one that was used last first, this machine, the allocation that we are in."""
    # Somebody else may have launched a job here. Where there was none, nothing is installed.
    here = Path(os.environ.get("SUPERVISOR_HOME") or "~/.supervisor").expanduser() / "jobs"
    elsewhere = {source.option for source in SOURCES if source.variable and source.variable not in os.environ}
    # The first source of an allocation stands for the others.
    inside = {source.variable: source.option for source in reversed(SOURCES) if source.variable in os.environ}
    words = [one.words for one in known.recall()] + ([""] if here.is_dir() else []) + list(inside.values())
    return list(dict.fromkeys(one for one in words if one not in elsewhere))


def place_of(words: str) -> str:
    """Return an inventory in short: a file with its directory unless that is the current one."""
    if not words.startswith("/"):
        return words or "this machine"
    path = Path(words)
    return path.name if path.parent == Path.cwd() else f"{path.parent.name}/{path.name}"


# --- the screens of one job after the other


def run() -> int:
    """Show all jobs until the user leaves; returns the exit code."""
    return show(None, None)


def show(
    session: Callable[[], Session] | None,
    hosts: str | None,
    *,
    read_only: bool = False,
    theme: str | None = None,
    ascii_only: bool = False,
    job_stays: bool = True,
) -> int:
    """Show a job, or without one all jobs, until the user leaves; returns the exit code.

    The job to which the user switches follows. `hosts`: the arguments that name the inventory. Without `job_stays` the
    job ends with this program, so there is no switching and no command to attach.
    """
    from supervisor.tui.app import run_tui

    home = KnownJobs() if job_stays else None
    while True:
        on_exit = partial(print_next_steps, hosts, job_stays=job_stays) if session is not None else lambda source: None
        result = run_tui(
            _no_job if session is None else session,
            theme=theme,
            read_only=read_only,
            ascii_only=ascii_only,
            on_exit=on_exit,
            home=home,
            has_job=session is not None,
            job_stays=job_stays,
        )
        if isinstance(result, int):
            return result
        hosts = result.words or None
        mode = "watch" if read_only else "control"
        session = partial(Session, open_known(result.words), result.job, attach=mode, read_only=read_only)


def print_next_steps(hosts: str | None, source: Session, *, job_stays: bool) -> None:
    """Leave on the terminal what the user of a screen needs next: the error of a launch, the command to attach."""
    from supervisor.cli.headless import attach_command
    from supervisor.wording.values import one_line

    status, failure = source.status, source.failure
    job = str(status.get("job") or "")
    if failure is not None and not status:
        say(str(failure))
    elif not job_stays or source.made_s is not None:
        return
    elif not source.ended:
        say(f"job {job} continues; watch it with: {attach_command(hosts, job)}")
    elif status.get("state") == "failed":
        why = one_line(status.get("failure") or "")
        say(f"job {job} failed: {why}\n  hint: {attach_command(hosts, job).replace('attach', 'incidents', 1)}")


def _no_job() -> AbstractAsyncContextManager[Session]:
    """Return a session that connects to nothing."""
    nothing = Inventory(None, (), JobDefaults(Path.cwd()))
    return contextlib.nullcontext(Session(nothing))
