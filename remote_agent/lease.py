"""A member's lease, looked at all the time: workers die when it is over, and a new coordinator is sought.

In: a follower, time. Out: a stop of its workers, an election; on the coordinator's own node its heartbeat; to the
engine, word that this agent lives: the workers of one that stands still are ended by their engine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from remote_agent import clocks, election, heartbeat, member
from remote_agent.formation import HELD_SHARE

if TYPE_CHECKING:
    from remote_agent.follower import Follower
    from remote_agent.tasks import Tasks

log = logging.getLogger(__name__)

LEASE_CHECK_S = 0.1
# How often the coordinator looks at its own ranks: as often as the others tell of theirs.
OWN_BEAT_S = 1.0
ELECTION_PAUSE_S = 1.0
# What an engine has to stop its workers: less than what lies between the end of a lease and the next group.
MARGIN_S = 2.5
# How often the engine is told that we live; of node_timeout.
WORD_SHARE = 1 / 30
# A busy machine may keep us waiting for this long.
SILENCE_MIN_S = 2.0


def is_over(follower: Follower) -> bool:
    """Whether no worker of this node may live by now; the coordinator's own node has no lease."""
    view = follower.member
    return follower.agent.role is None and view.term > 0 and member.lease_over(view, clocks.now())


class Lease:
    """One follower's lease; `keep` must be run by an owner, elections run beside it."""

    def __init__(self, follower: Follower, tasks: Tasks) -> None:
        self._follower = follower
        self._tasks = tasks
        self._election: asyncio.Task[None] | None = None
        self._no_election_before = 0.0
        self._own_beat = 0.0
        self._refusal = ""

    async def keep(self) -> None:
        """Look at the lease until cancelled: whatever fails, the next look comes."""
        self._tasks.spawn(self._grant(), "the engine's lease")
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            try:
                await self._look(clocks.now())
            except Exception:
                log.exception("lease")

    async def _grant(self) -> None:
        """Tell the engine again and again for how long it may go on without us."""
        follower = self._follower
        timeout_s = follower.agent.spec.node_timeout
        while True:
            share = member.LEASE_SHARE if follower.agent.role is None else HELD_SHARE
            await follower.engine.renew(max(SILENCE_MIN_S, share * timeout_s))
            await asyncio.sleep(min(OWN_BEAT_S, WORD_SHARE * timeout_s))

    async def _look(self, now: float) -> None:
        follower = self._follower
        role = follower.agent.role
        if role is not None:
            follower.member = member.heard(follower.member, now)
            if now - self._own_beat >= OWN_BEAT_S:
                self._own_beat = now
                role.beat(follower.agent.node, heartbeat.beat(follower))
            return
        if follower.running is not None and is_over(follower):
            away_s = now - follower.member.contact
            log.warning("the coordinator has not answered for %.1f s: stopping the workers", away_s)
            await follower.stop({"generation": follower.running, "grace_s": 0.0, "collect": False}, MARGIN_S)
        self._elect_if_due(clocks.now())

    def _elect_if_due(self, now: float) -> None:
        view = self._follower.member
        running = self._election is not None and not self._election.done()
        if running or now <= self._no_election_before or not member.leaderless(view, now):
            return
        # The order is a fold over the whole journal: only where it may matter.
        if member.election_due(view, election.order(self._follower.agent), now):
            self._election = self._tasks.spawn(self._elect(), "election")

    async def _elect(self) -> None:
        """Ask for votes; without them, not again for a while, and not in step with another candidate."""
        agent = self._follower.agent
        order = election.base(agent)
        place = 1 + (order.index(agent.node) if agent.node in order else 0)
        try:
            refusal = await election.stand(self._follower)
            if refusal:
                hint = "if they are dead: `supervisor promote` goes on without them"
                self._follower.trouble = f"not elected: {refusal}; {hint}"
            if refusal and refusal != self._refusal:
                log.info("not elected: %s", refusal)
            self._refusal = refusal
        finally:
            self._no_election_before = clocks.now() + ELECTION_PAUSE_S * place
