"""A job that is over: who knows its end, what is refused then, and agents that were cut off as it came.

In: a session's links. Out: the end as files tell it, RequestFailed, agents that are told.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import RequestFailed
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

log = logging.getLogger(__name__)

# How long an agent may take to hear that its job is over, and then to end, seconds.
OVER_DEADLINE = 5.0
GONE_DEADLINE = 10.0


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
