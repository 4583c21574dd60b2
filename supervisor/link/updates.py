"""Keeping a hub up to date: status documents, the journal without gaps, incidents.

In: `watch` and `events` of the best agent; another agent takes over where a link breaks.
Out: the hub's `status`, `events`, `incidents`, `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from remote_agent.wire import Answer, CallFailed, WireError
from remote_agent.wire.events import ENDED_EVENTS, ENDED_STATES
from supervisor.link.tasks import cancel_all

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from remote_agent.wire.documents import NodeStatus, RankStatus, Status
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub

log = logging.getLogger(__name__)

# An agent that sends nothing for this long is asked whether it is still there, and has as long to answer, seconds.
# Both together stay well below 10 s, so that a lost host's last status is never shown as current for longer than that.
SILENCE = 3.0
# A status has these facts about the agent that sends it.
NEWS = ("term", "journal_term", "last_seq", "coordinator_reachable")
# The pause before the same agent is asked again, seconds.
REST = 0.5


class Updates:
    """Follows the best agent of one job. The hub owns the task that runs `run`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def run(self) -> None:
        """Follow the best agent; change to another one when it ends, is silent, or another one is better."""
        hub = self._hub
        while True:
            link = await self._best()
            try:
                await self._follow(link)
            except asyncio.TimeoutError:
                # Its host may be down: the next one is asked at once, of those that have answered.
                log.debug("%s does not answer any more", link.view.name)
            except (CallFailed, WireError) as error:
                log.debug("updates from %s ended: %s", link.view.name, error)
                await self._check(link)
            if hub.ended:
                return
            await asyncio.sleep(REST)

    async def _best(self) -> HostLink:
        while True:
            links = self._hub.opened_links()
            # Before its agents have been assigned, a job has no status.
            if links and not self._hub.launching:
                return links[0]
            await self._hub.wait_change(1.0)

    async def _check(self, link: HostLink) -> None:
        """Ask an agent for its identity again: after a change of coordinator another link may be the better source."""
        try:
            link.learn((await link.call("identity", timeout_s=SILENCE)).data)
        except (CallFailed, WireError, asyncio.TimeoutError):
            link.reopen()

    async def _follow(self, link: HostLink) -> None:
        watch = asyncio.ensure_future(self._watch(link))
        events = asyncio.ensure_future(self._events(link))
        looking = asyncio.ensure_future(self._ask_for_coordinator())
        try:
            await asyncio.wait((watch, events), return_when=asyncio.FIRST_COMPLETED)
            if not self._hub.ended and (self._hub.state in ENDED_STATES or not watch.done()):
                # The journal's last records may still be on their way, or the one status of files without an agent.
                await asyncio.wait((watch, events), timeout=SILENCE)
        finally:
            await cancel_all((watch, events, looking))
        errors = [task.exception() for task in (watch, events) if not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    async def _ask_for_coordinator(self) -> None:
        """While nodes are lost, ask all agents who coordinates: they may have another coordinator and a group."""
        while True:
            await asyncio.sleep(SILENCE)
            if any(node["state"] == "lost" for node in self._hub.status.get("nodes", ())):
                await self._hub.identities()

    async def _watch(self, link: HostLink) -> None:
        hub = self._hub
        stream = link.stream("watch", {"steps": True})
        status: Status = {}
        try:
            while True:
                answer = await self._next(link, stream)
                if answer is None:
                    return
                data = answer.data
                if "steps" in data:
                    hub.set_status(with_steps(hub.status, data["generation"], data["steps"]))
                    continue
                status = (
                    data["status"]
                    if "status" in data
                    else {**status, "nodes": [*status.get("nodes", ()), *data["nodes"]]}
                )
                if data.get("more"):
                    continue
                news: Any = {key: value for key, value in status.items() if key in NEWS}
                link.learn(news)
                hub.set_status(status)
                if self._is_second_best(link):
                    return
        finally:
            await stream.aclose()

    async def _next(self, link: HostLink, stream: AsyncGenerator[Answer, None]) -> Answer | None:
        """Return the next status, None at the end; while nothing changes, check that the agent is still there."""

        async def pull() -> Answer | None:
            return await anext(stream, None)

        item = asyncio.ensure_future(pull())
        try:
            while True:
                await asyncio.wait((item,), timeout=SILENCE)
                if item.done():
                    return await item
                await self._probe(link)
                self._hub.confirm_status()
                if self._is_second_best(link):
                    return None
        finally:
            if not item.done():
                await cancel_all((item,))

    async def _probe(self, link: HostLink) -> None:
        """Return when this agent has answered; raises TimeoutError when it does not.

        All agents are asked at the same time, and the connections to all silent ones are opened again: otherwise
        several lost hosts would be waited for one after the other.
        """
        links = dict.fromkeys([link, *self._hub.opened_links()])
        asked = {one: asyncio.ensure_future(one.call("identity", timeout_s=SILENCE)) for one in links}
        try:
            link.learn((await asked[link]).data)
        except asyncio.TimeoutError:
            await asyncio.wait(asked.values())
            for one, answer in asked.items():
                error = answer.exception()
                if error is None:
                    one.learn(answer.result().data)
                elif isinstance(error, asyncio.TimeoutError):
                    one.reopen()
            raise
        finally:
            await cancel_all(asked.values())
            await asyncio.gather(*asked.values(), return_exceptions=True)

    def _is_second_best(self, link: HostLink) -> bool:
        best = self._hub.opened_links()[:1]
        if not best or best[0] is link:
            return False
        # A longer journal alone is no reason: both grow all the time.
        return best[0].rank_as_source()[:-1] > link.rank_as_source()[:-1]

    async def _events(self, link: HostLink) -> None:
        # Reading starts at the last known event: if this agent has another one there, earlier ones may differ too.
        known = max(0, len(self._hub.events) - 1)
        if not await self._follow_events(link, known) and not await self._follow_events(link, 0):
            raise WireError(f"the journal of {link.view.name} has a gap after event {len(self._hub.events)}")

    async def _follow_events(self, link: HostLink, since: int) -> bool:
        """Take the events after that number to their end; False where the next one is missing, or not the known one."""
        hub = self._hub
        known = hub.events[since] if 0 < since < len(hub.events) else None
        stream = link.stream("events", {"since": since, "follow": True})
        try:
            async for answer in stream:
                event = answer.data["event"]
                if known not in (None, event):
                    return False
                known = None
                if not hub.add_event(event):
                    return False
                if event.get("type") in ENDED_EVENTS:
                    await self._finish(link)
                    break
            if hub.made_s is not None:
                # Nothing has happened since the bundle was made.
                await self._finish(link)
        finally:
            await stream.aclose()
        return True

    async def _finish(self, link: HostLink) -> None:
        hub = self._hub
        # Hosts that were out of reach at the end may have continued: the best source knows.
        await hub.settle()
        best = hub.opened_links()[0] if self._is_second_best(link) else link
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            status = (await best.call("status")).data
            if best is not link and status["state"] not in ENDED_STATES:
                return
            hub.set_status(status)
        hub.set_ended()


def with_steps(status: Status, generation: int, steps: Mapping[str, list[Any]]) -> Status:
    """Return a status with newer steps of its ranks: step, age of the last output and lag by rank."""
    if status.get("generation") != generation:
        return status

    def newer(rank: RankStatus) -> RankStatus:
        step, age_s, lag = steps.get(str(rank["rank"]), (rank.get("step"), rank.get("last_output_age_s"), None))
        progress = rank.get("progress")
        own: RankStatus = {**rank, "step": step, "last_output_age_s": age_s}
        return {**own, "progress": {**progress, "lag": lag}} if progress else own

    nodes: list[NodeStatus] = [{**node, "ranks": [newer(rank) for rank in node["ranks"]]} for node in status["nodes"]]
    return {**status, "nodes": nodes}
