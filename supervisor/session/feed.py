"""What an attached session is told: status documents, the journal without gaps, incidents.

In: `watch`, `events` and `incidents` of the best agent; another agent takes over where a link breaks.
Out: the session's `status`, `events`, `incidents`, `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from remote_agent.wire import Answer, CallFailed, WireError
from supervisor.session.tasks import cancel_all
from supervisor.session.view import ENDED_EVENTS, ENDED_STATES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from supervisor.session.link import Link
    from supervisor.session.session import Session

log = logging.getLogger(__name__)

# An agent that has had nothing to say for this long is asked whether it is there, seconds.
SILENCE = 6.0
# Before the same source is asked again, seconds.
REST = 0.5


class Feed:
    """Keeps one session's picture of the job up to date. `run` is owned by the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def run(self) -> None:
        """Follow the best agent; change over when it ends, falls silent, or a better one is there."""
        session = self._session
        while True:
            link = await self._best()
            try:
                await self._follow(link)
            except (CallFailed, WireError, asyncio.TimeoutError) as error:
                log.debug("feed from %s ends: %s", link.view.name, error)
                await self._doubt(link)
            if session.ended:
                return
            await asyncio.sleep(REST)

    async def _best(self) -> Link:
        while True:
            links = self._session.opened_links()
            # Before its agents have been assigned, a job has nothing to tell.
            if links and not self._session.launching:
                return links[0]
            await self._session.wait_change(1.0)

    async def _doubt(self, link: Link) -> None:
        """Ask again who this agent is: after a change of coordinator another link may be the better source."""
        try:
            link.learn((await link.call("identity", timeout_s=SILENCE)).data)
        except (CallFailed, WireError, asyncio.TimeoutError):
            link.reopen()

    async def _follow(self, link: Link) -> None:
        watch = asyncio.ensure_future(self._watch(link))
        events = asyncio.ensure_future(self._events(link))
        try:
            await asyncio.wait((watch, events), return_when=asyncio.FIRST_COMPLETED)
            if self._session.state in ENDED_STATES or not watch.done():
                # The journal's last records may still be on their way.
                await asyncio.wait((events,), timeout=SILENCE)
        finally:
            await cancel_all((watch, events))
        errors = [task.exception() for task in (watch, events) if not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    async def _watch(self, link: Link) -> None:
        session = self._session
        stream = link.stream("watch")
        try:
            while True:
                answer = await self._next(link, stream)
                if answer is None:
                    return
                status = answer.data["status"]
                link.learn({key: status[key] for key in ("term", "last_seq", "coordinator_reachable") if key in status})
                session.set_status(status)
                if self._is_second_best(link):
                    return
        finally:
            await stream.aclose()

    async def _next(self, link: Link, stream: AsyncGenerator[Answer, None]) -> Answer | None:
        """Return the next status, None at the end; while nothing changes, make sure that the agent is still there."""

        async def pull() -> Answer | None:
            try:
                return await stream.__anext__()
            except StopAsyncIteration:
                return None

        item = asyncio.ensure_future(pull())
        try:
            while True:
                await asyncio.wait((item,), timeout=SILENCE)
                if item.done():
                    return await item
                link.learn((await link.call("identity", timeout_s=SILENCE)).data)
                self._session.confirm_status()
                if self._is_second_best(link):
                    return None
        finally:
            if not item.done():
                await cancel_all((item,))

    def _is_second_best(self, link: Link) -> bool:
        best = self._session.opened_links()[:1]
        if not best or best[0] is link:
            return False
        # A longer journal alone is no reason: both grow all the time.
        return best[0].rank_as_source()[:-1] > link.rank_as_source()[:-1]

    async def _events(self, link: Link) -> None:
        session = self._session
        since = int(session.events[-1]["seq"]) if session.events else 0
        stream = link.stream("events", {"since": since, "follow": True})
        try:
            async for answer in stream:
                event = answer.data["event"]
                await self._take(link, event)
                if event.get("type") in ENDED_EVENTS:
                    await self._finish(link)
                    return
        finally:
            await stream.aclose()

    async def _take(self, link: Link, event: dict[str, Any]) -> None:
        session = self._session
        last = int(session.events[-1]["seq"]) if session.events else 0
        if int(event["seq"]) <= last:
            return
        session.events.append(event)
        session.touch()
        if event.get("type") == "incident":
            await self._load_incidents(link)

    async def _load_incidents(self, link: Link) -> None:
        self._session.incidents = (await link.call("incidents")).data["incidents"]
        self._session.touch()

    async def _finish(self, link: Link) -> None:
        session = self._session
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            await self._load_incidents(link)
            session.set_status((await link.call("status")).data)
        session.ended = True
        session.touch()
