"""Which job is meant, and whether it can be reached.

In: a hub whose links come up one after the other; what the hosts answered to `jobs`.
Out: one row per job; the hub's job, the moment from which it can be used, or its failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.wire.events import ENDED_STATES
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, UsageError

if TYPE_CHECKING:
    from remote_agent.wire.answers import JobRow, ListedJob
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub

# Once one host has answered, further hosts are awaited this long, seconds.
GRACE = 2.0


def group_jobs(answers: Mapping[str, Sequence[ListedJob]]) -> list[JobRow]:
    """Return one row per job, newest first: the state on the host that knows most, all hosts, whether it is live."""
    rows: dict[str, JobRow] = {}
    for host, jobs in answers.items():
        for entry in jobs:
            row = rows.get(entry["job"])
            if row is None:
                row = rows[entry["job"]] = {
                    "job": entry["job"], "live": False, "tree": entry["tree"], "script": entry["script"],
                    "created_ns": entry["created_ns"], "updated_ns": entry["updated_ns"], "state": entry["state"],
                    "generation": entry["generation"], "world_size": entry["world_size"], "warm_until_ns": None,
                    "hosts": [],
                }  # fmt: skip
            elif _age(entry) > _age(row):
                row["state"], row["updated_ns"] = entry["state"], entry["updated_ns"]
                row["generation"], row["world_size"] = entry["generation"], entry["world_size"]
            row["hosts"].append(host)
            row["warm_until_ns"] = max(row["warm_until_ns"] or 0, entry["warm_until_ns"] or 0) or None
            row["live"] = row["live"] or entry["live"]
    for row in rows.values():
        # Agents stay for some seconds after the end, and longer while a supervisor is connected.
        row["live"] = row["live"] and row["state"] not in ENDED_STATES
    return sorted(rows.values(), key=lambda row: (row["created_ns"] or 0, row["job"]), reverse=True)


def _age(entry: ListedJob | JobRow) -> tuple[int, bool, int]:
    """Return the sort key of what hosts know of a job: an end is newer than anything else of its generation."""
    return entry["generation"], entry["state"] in ENDED_STATES, entry["updated_ns"] or 0


def choose_job(answers: Mapping[str, Sequence[ListedJob]], *, live_only: bool) -> str:
    """Return the one live job, else the newest; a job that has not ended is live, too, if no job has an agent.

    `live_only`: raises UsageError where several are live, RequestFailed where all are over. Unreachable: none is known.
    """
    rows = group_jobs(answers)
    live = [row for row in rows if row["live"]] or [row for row in rows if row["state"] not in ENDED_STATES]
    if len(live) == 1:
        return live[0]["job"]
    if live_only and live:
        names = " ".join(row["job"] for row in live)
        raise UsageError(f"{len(live)} jobs have not ended here: {names}", "name the one you mean")
    if not rows:
        raise Unreachable("no jobs on these hosts", "`supervisor up` starts one")
    if live_only:
        newest = f"the newest, {rows[0]['job']}, is over: {rows[0]['state']}"
        raise RequestFailed(f"no job is live on these hosts; {newest}", "`supervisor jobs` lists all of them", "ended")
    return (live or rows)[0]["job"]


def is_reached(hub: Hub) -> bool:
    """Tell whether the job can be used: its coordinator answers, or every host that answers soon has answered."""
    opened = hub.opened_links()
    if not opened:
        return False
    best = opened[0].view
    if best.live and best.identity.get("role") == "coordinator":
        return True
    if all(link.tried for link in hub.links.values() if link.direct):
        return True
    return time.monotonic() - min(link.opened_at for link in opened) > GRACE


def find_failure(hub: Hub) -> SupervisorError | None:
    """Return why the job cannot be used, once every host has answered or failed and none knows the job."""
    links = [link for link in hub.links.values() if link.direct]
    if not hub.job_known.is_set() or hub.spared or not all(link.tried for link in links):
        return None
    # A host whose connection was just lost is being retried: wait for it.
    if any(link.opened or link.opened_at for link in links):
        return None
    missing = [link.view.name for link in links if link.missing]
    if not missing:
        return hub.unreachable()
    hint = "`supervisor jobs` lists the jobs that these hosts know"
    return hub.unreachable(f"{', '.join(missing)}: no job named {hub.job} there", hint)


async def seek(hub: Hub) -> None:
    """Set the failure of a hub whose job was named by the operator, once all hosts say that they do not know it."""
    while hub.failure is None and not hub.opened_links():
        if all(link.missing for link in hub.links.values() if link.direct):
            failure = find_failure(hub)
            if failure is not None:
                hub.set_failure(failure)
        await hub.wait_change(1.0)


def _is_live(links: Sequence[HostLink]) -> bool:
    return any(job["live"] for link in links for job in link.jobs or ())


async def choose(hub: Hub) -> None:
    """Choose the job from the answers of the hosts, and set it or the failure."""
    since: float | None = None
    while True:
        links = [link for link in hub.links.values() if link.direct]
        answered = [link for link in links if link.jobs is not None]
        if answered and since is None:
            since = time.monotonic()
        waiting = [link for link in links if link.jobs is None and not link.tried]
        if hub.spared and (hub.live_only or (not waiting and not _is_live(answered))):
            # The job that is meant may be on other hosts only.
            for link in hub.spared:
                link.connect()
            continue
        if not waiting or (answered and not any(link.is_awaited for link in waiting)):
            break
        # Hosts that have not answered may know a job, or another one.
        patient = hub.live_only or not any(link.jobs for link in answered)
        if not patient and since is not None and time.monotonic() - since > GRACE:
            break
        await hub.wait_change(0.1)
    try:
        if not answered:
            raise hub.unreachable()
        silent = any(link.jobs is None for link in links)
        if silent and not any(link.jobs for link in answered):
            raise hub.unreachable(f"{' '.join(link.view.name for link in answered)}: no job known there")
        known = {link.view.name: link.jobs or [] for link in answered}
        hub.set_job(choose_job(known, live_only=hub.live_only))
    except SupervisorError as error:
        hub.set_failure(error)
