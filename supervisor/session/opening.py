"""Finding the job: which one, on which hosts, and what to say when it is not there.

In: a session whose links come up one after the other. Out: its job, the moment at which it can be used, or its failure.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from supervisor.errors import HostFailure, SupervisorError, Unreachable
from supervisor.session.jobs import choose_job

if TYPE_CHECKING:
    from supervisor.session.session import Session

# Once one host has answered, the others are waited for this long, seconds.
GRACE = 2.0


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
