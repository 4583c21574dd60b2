"""`supervisor jobs` and `supervisor clean`: list the jobs on the hosts, and remove the files of finished ones.

In: argv. Out: tables or JSON; names of hosts that do not answer on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from remote_agent.text.names import size_text
from remote_agent.wire import CallFailed, WireError
from remote_agent.wire.events import ENDED_STATES
from supervisor import known
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, split_target
from supervisor.cli.output import is_rich, write_json, write_lines, write_table
from supervisor.errors import HostError, RequestFailed, SupervisorError, Unreachable, UsageError, why
from supervisor.link.jobs import group_jobs
from supervisor.ssh.openssh import end_logins
from supervisor.wording.status import job_rows

if TYPE_CHECKING:
    from remote_agent.wire.answers import JobRow
    from supervisor.inventory import Host, Inventory
    from supervisor.ssh import NodeLink
    from supervisor.ssh.answers import Cleaned, JobList

CONNECT_DEADLINE = 15.0
# Removing gigabytes of logs takes a while.
CALL_DEADLINE = 300.0
LIMIT = 64
# Agents stay for some seconds after the end of their job, seconds.
LINGER = 10.0
T = TypeVar("T")


async def list_jobs(node: NodeLink) -> JobList:
    """Return the host's jobs; raises CallFailed, WireError."""
    answer: JobList = (await node.channel.call("jobs", timeout=CALL_DEADLINE)).data
    return answer


async def clean(node: NodeLink, jobs: Sequence[str]) -> Cleaned:
    """Remove these jobs from the host; waits for agents of jobs that have just ended."""
    removed: list[str] = []
    size = 0
    end = time.monotonic() + LINGER
    while True:
        kept: list[str] = []
        for job in jobs:
            try:
                answer: Cleaned = (await node.channel.call("clean", {"job": job}, timeout=CALL_DEADLINE)).data
            except CallFailed as refused:
                if refused.kind != "no_such_job":
                    raise
                # Another operator has removed it in the meantime.
                continue
            removed += answer["removed"]
            kept += answer["kept"]
            size += int(answer["bytes"])
        if not kept or time.monotonic() > end:
            return {"removed": removed, "bytes": size, "kept": kept}
        jobs = kept
        await asyncio.sleep(LINGER / 20)


class Links:
    """A link to each host that can be reached: `async with Links(inventory) as links`."""

    def __init__(self, inventory: Inventory) -> None:
        self.failures: dict[str, str] = {}
        """Why hosts have given no answer."""
        self._hosts = inventory.hosts
        self._links: dict[str, NodeLink] = {}
        self._limit = asyncio.Semaphore(LIMIT)

    async def __aenter__(self) -> Links:
        from supervisor.ssh import AgentFile, connect

        agent = await asyncio.to_thread(AgentFile.build)

        async def one(host: Host) -> None:
            async with self._try(host.name):
                self._links[host.name] = await connect(
                    host, agent=agent, progress=lambda step, text: None, deadline_s=CONNECT_DEADLINE
                )

        try:
            await asyncio.gather(*map(one, self._hosts))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def ask(self, work: Callable[[NodeLink], Awaitable[T]]) -> dict[str, T]:
        """Do the work on each host that has not failed yet; returns the answers, in the inventory's order."""
        answers: dict[str, T] = {}

        async def one(name: str, link: NodeLink) -> None:
            async with self._try(name):
                answers[name] = await work(link)

        await asyncio.gather(*(one(name, link) for name, link in self._links.items() if name not in self.failures))
        return {host.name: answers[host.name] for host in self._hosts if host.name in answers}

    @contextlib.asynccontextmanager
    async def _try(self, name: str) -> AsyncIterator[None]:
        async with self._limit:
            try:
                yield
            except HostError as error:
                self.failures[name] = f"{error.step}: {error.reason}" + (f" ({error.hint})" if error.hint else "")
            except CallFailed as error:
                self.failures[name] = error.message
            except (WireError, asyncio.TimeoutError) as error:
                self.failures[name] = why(error)


def run(verb: str, argv: Sequence[str]) -> int:
    """List or clean jobs; returns the exit code."""
    parser = make_parser(verb, "[HOSTS]" if verb == "jobs" else "[HOSTS] [JOB]")
    add_json(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    if verb == "jobs" and job is not None:
        raise UsageError(f"jobs takes no JOB: {job}", f"supervisor status {job}")
    inventory = load_inventory(hosts, options)
    return asyncio.run((_list if verb == "jobs" else _clean_and_log_out)(inventory, job, options.json))


async def _list(inventory: Inventory, _: str | None, as_json: bool) -> int:
    async with Links(inventory) as links:
        answers, failures = await links.ask(list_jobs), links.failures
    _require(answers, failures)
    rows = group_jobs({name: answer["jobs"] for name, answer in answers.items()})
    known.note(inventory, rows, complete=not failures)
    if as_json:
        write_json({"jobs": rows, "unreachable": failures})
        return 0
    if rows:
        write_table(job_rows(rows), rich=is_rich())
    else:
        write_lines(["no jobs"])
    for name, reason in failures.items():
        say(f"{name}: {reason}")
    return 0


async def _clean_and_log_out(inventory: Inventory, job: str | None, as_json: bool) -> int:
    try:
        async with Links(inventory) as links:
            return await _clean(inventory, links, job, as_json)
    finally:
        await end_logins(inventory.hosts)


async def _clean(inventory: Inventory, links: Links, job: str | None, as_json: bool) -> int:
    answered, silent = await links.ask(list_jobs), dict(links.failures)
    _require(answered, silent)
    here = {host: [str(one["job"]) for one in answer["jobs"]] for host, answer in answered.items()}
    rows = {row["job"]: row for row in group_jobs({host: answer["jobs"] for host, answer in answered.items()})}
    chosen = list(rows) if job is None else [job]
    if job is not None and job not in rows:
        unknown = f"no job named {job} on these hosts"
        lines = [f"{host}: {reason}" for host, reason in silent.items()]
        raise Unreachable("\n".join([*lines, unknown]), "`supervisor jobs` lists them")
    spared = {name: reason for name in chosen if (reason := _may_be_running(rows[name], answered, silent))}
    if job in spared:
        raise RequestFailed(f"job {job} has not ended: {spared[job]}", f"stop it first: supervisor stop {job}", "live")
    for name in chosen:
        if rows[name]["state"] in ENDED_STATES and any(_is_unaware(answer, name) for answer in answered.values()):
            await _end_cut_off(inventory, name)

    def remove(node: NodeLink) -> Awaitable[Cleaned]:
        return clean(node, [name for name in here[node.host.name] if name in chosen and name not in spared])

    answers, failures = await links.ask(remove), links.failures
    _require(answers, failures)
    removed = _by_job({host: answer["removed"] for host, answer in answers.items()})
    kept = _by_job({host: answer["kept"] for host, answer in answers.items()})
    known.note(inventory, [row for name, row in rows.items() if name not in removed], complete=not failures)
    freed = sum(int(answer["bytes"]) for answer in answers.values())
    if as_json:
        all_kept = sorted({*kept, *spared})
        write_json({"removed": sorted(removed), "kept": all_kept, "bytes": freed, "unreachable": failures})
    else:
        lines = [f"removed {name} on {' '.join(on)}" for name, on in sorted(removed.items())]
        lines += [f"kept {name} on {' '.join(on)}: its agent is still running" for name, on in sorted(kept.items())]
        lines += [f"kept {name}: {reason}" for name, reason in sorted(spared.items())]
        write_lines([*(lines or ["nothing to remove"]), *([f"freed {size_text(freed)}"] if removed else [])])
        for name, reason in failures.items():
            say(f"{name}: {reason}")
    return 1 if failures or (job is not None and kept) else 0


def _is_unaware(answer: JobList, job: str) -> bool:
    """Return whether an agent of the job runs on that host and does not know that the job has ended."""
    return any(one["job"] == job and one["live"] and one["state"] not in ENDED_STATES for one in answer["jobs"])


async def _end_cut_off(inventory: Inventory, job: str) -> None:
    """Tell the agents that were cut off when the job ended that it has ended."""
    from supervisor.control.promotion import end_cut_off
    from supervisor.session import Session

    try:
        async with Session(inventory, job) as session:
            await session.ready()
            await end_cut_off(session)
    except SupervisorError as error:
        # Its agent keeps the files there, and the output says so.
        say(str(error))


def _may_be_running(row: JobRow, known: Mapping[str, JobList], silent: dict[str, str]) -> str:
    """Return why a job may not have ended yet, "" if it has: then no host needs its files."""
    if row["live"]:
        name = row["job"]
        on = [host for host in known if any(one["job"] == name and one["live"] for one in known[host]["jobs"])]
        return f"its agent is still running on {' '.join(on)}"
    if silent and row["state"] not in ENDED_STATES:
        return f"it may still run on {' '.join(silent)}, which does not answer"
    return ""


def _by_job(answers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the hosts by job: those that removed it, or kept it."""
    jobs: dict[str, list[str]] = {}
    for host, names in answers.items():
        for job in names:
            jobs.setdefault(job, []).append(host)
    return jobs


def _require(answers: Mapping[str, object], failures: dict[str, str]) -> None:
    if not answers:
        raise Unreachable("\n".join([*(f"{name}: {text}" for name, text in failures.items()), "no host answers"]))
