"""A member's connection to its coordinator begins anew when it is told to, whatever it waits for in that moment."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remote_agent.agent.coordinator_link import CoordinatorLink
from remote_agent.election.member import Member
from remote_agent.wire import Answer, Args


class Calls:
    """A connection to a coordinator that answers heartbeats when the test says so."""

    def __init__(self) -> None:
        self.closed, self.ended = asyncio.Event(), False
        self.joined, self.waits = 0, asyncio.Event()
        self.heartbeat: asyncio.Future[Answer]

    async def run(self) -> None:
        await self.closed.wait()

    async def call(self, op: str, args: Args, timeout: float) -> Answer:
        self.joined += op == "join"
        answer = Answer({"received_ns": time.time_ns(), "answered_ns": time.time_ns()})
        if op != "beat":
            return answer
        self.heartbeat = asyncio.get_running_loop().create_future()
        self.waits.set()
        await asyncio.wait_for(self.heartbeat, timeout)
        return answer


def _link(calls: Calls) -> CoordinatorLink:
    async def connect(*args: Any) -> Calls:
        return calls

    def nothing(*args: Any) -> None:
        """Nothing listens."""

    ballot = SimpleNamespace(
        view=Member(me="n2", node_timeout=15.0, term=1, coordinator="n1"), on_change=nothing, renew_lease=nothing
    )
    context = SimpleNamespace(
        ballot=ballot, node="n2", spec=ballot.view, peers=SimpleNamespace(members={"n1": {}}, connect=connect)
    )
    node = SimpleNamespace(introduction=dict, heartbeat=dict, handler=nothing)

    async def ask_around() -> None:
        """There is nobody else."""

    election = SimpleNamespace(note_trouble=nothing, ask_around=ask_around)
    return CoordinatorLink(*cast("Any", (context, node, SimpleNamespace(coordinator=None), election)))


@pytest.mark.parametrize("turns", range(8))
async def test_a_heartbeat_that_is_answered_meanwhile_does_not_keep_a_node_from_joining_again(turns: int) -> None:
    # Before Python 3.12, `wait_for` returns an answer that comes with a cancellation, and swallows that.
    calls = Calls()
    link = _link(calls)
    keeping = asyncio.ensure_future(link.keep())
    await calls.waits.wait()
    calls.waits.clear()
    link.look_again.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if not calls.heartbeat.done():
        calls.heartbeat.set_result(Answer({}))
    await asyncio.wait_for(calls.waits.wait(), 10.0)
    assert calls.joined == 2
    keeping.cancel()
    await asyncio.wait({keeping})
