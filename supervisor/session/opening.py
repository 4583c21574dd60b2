"""Finding the job: which one, on which hosts, and what to say when it is not there or over.

In: a session whose links come up one after the other. Out: its job, the moment at which it can be used, or its failure;
its end, told to agents that were cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import HostFailure, RequestFailed, SupervisorError, Unreachable
from supervisor.session.jobs import choose_job
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

log = logging.getLogger(__name__)

# Once one host has answered, the others are waited for this long, seconds.
GRACE = 2.0
# How long an agent may take to hear that its job is over, and then to end, seconds.
OVER_DEADLINE = 5.0
GONE_DEADLINE = 10.0


def unreachable(session: Session, last: str = "") -> Unreachable:
    """Return the error that names every host and why it does not answer."""
    views = session.hosts.values()
    lines = [str(HostFailure(view.name, view.step, view.error, view.hint)) for view in views if view.error]
    lines += [last] if last else []
    what = f"job {session.job}" if session.job else "any job"
    return Unreachable("\n".join([*lines, f"cannot reach {what}"]))


def is_reached(session: Session) -> bool:
    """Tell whether the job can be used: its coordinator answers, or all that will answer soon has."""
    opened = session.opened_links()
    if not opened:
        return False
    best = opened[0].view
    if best.live and best.identity.get("role") == "coordinator":
        return True
    if all(link.tried for link in session.links.values() if link.active):
        return True
    return time.monotonic() - min(link.opened_at for link in opened) > GRACE


def find_failure(session: Session) -> SupervisorError | None:
    """Return why the job cannot be used, once every host has answered or failed and none knows it."""
    links = [link for link in session.links.values() if link.active]
    if not session.job_known.is_set() or not all(link.tried for link in links):
        return None
    # A host whose connection was lost a moment ago is being tried again: wait for it.
    if any(link.opened or link.opened_at for link in links):
        return None
    missing = [link.view.name for link in links if link.missing]
    if not missing:
        return unreachable(session)
    error = unreachable(session, f"{', '.join(missing)}: no job named {session.job} there")
    error.hint = "`supervisor jobs` lists the jobs that these hosts know"
    return error


def end_in_files(session: Session) -> dict[str, Any] | None:
    """Return the identity of the best source where that is files with the job's end: no agent knows more."""
    best = next((link.view.identity for link in session.opened_links()), None)
    return best if best is not None and best.get("ended") else None


async def refuse_over(session: Session) -> None:
    """Raise RequestFailed where the job is over, as this session has heard or as the files of a host tell."""
    if end_in_files(session) is not None:
        session.set_status(await session.call("status"))
    if session.state in ENDED_STATES:
        told = await end_cut_off(session)
        also = f"; cut off as it ended, and told now: {' '.join(told)}" if told else ""
        raise RequestFailed(f"job {session.job} is over: {session.state}{also}", kind="ended")


async def end_cut_off(session: Session) -> list[str]:
    """End the agents that were cut off as the job ended, where files tell the end; returns their hosts.

    The coordinator has gone with the job: nobody else tells them. They refuse where they hear of one.
    """
    end = end_in_files(session)
    if end is None:
        return []
    wish = {"term": end["term"], "seq": end["last_seq"]}

    async def tell(link: Link) -> bool:
        try:
            await link.call("over", wish, timeout_s=OVER_DEADLINE)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            log.info("%s: %s", link.view.name, error)
            return False
        return True

    links = session.opened_links(live=True)
    answers = await asyncio.gather(*map(tell, links))
    told = [link for link, ends in zip(links, answers, strict=True) if ends]
    for link in told:
        session.notice(f"{link.view.name}: cut off as the job ended; its agent is told", "info", link.view.name)
    await session.wait_until(lambda: not any(link.opened and link.view.live for link in told), GONE_DEADLINE)
    return [link.view.name for link in told]


async def seek(session: Session) -> None:
    """Set the failure of a session whose job, named by the operator, is on none of its hosts: all have said so."""
    while session.failure is None and not session.opened_links():
        if all(link.missing for link in session.links.values() if link.active):
            session.failure = find_failure(session)
            session.touch()
        await session.wait_change(1.0)


async def choose(session: Session) -> None:
    """Set the session's job, or its failure, from what the hosts know."""
    since: float | None = None
    while True:
        links = [link for link in session.links.values() if link.active]
        answered = [link for link in links if link.jobs is not None]
        if answered and since is None:
            since = time.monotonic()
        if all(link.tried or link.jobs is not None for link in links):
            break
        # Those that know no job say nothing of the hosts that have not answered yet; nor does one that knows a job
        # say that it is the only one.
        patient = session.live_only or not any(link.jobs for link in answered)
        if not patient and since is not None and time.monotonic() - since > GRACE:
            break
        await session.wait_change(0.1)
    try:
        if not answered:
            raise unreachable(session)
        silent = any(link.jobs is None for link in links)
        if silent and not any(link.jobs for link in answered):
            raise unreachable(session, f"{' '.join(link.view.name for link in answered)}: no job known there")
        known = {link.view.name: link.jobs or [] for link in answered}
        session.job = choose_job(known, live_only=session.live_only)
        session.job_known.set()
    except SupervisorError as error:
        session.failure = error
    session.touch()
