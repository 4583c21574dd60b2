"""A node that was cut off as its job ended: what it does not change, who tells it, when it believes that."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import supervisor.inventory
from remote_agent.agent import agent as agent_module
from remote_agent.agent.agent import Agent
from remote_agent.agent.requests import AgentRequests
from remote_agent.base import clocks
from remote_agent.base.paths import Home
from remote_agent.bridge import starting
from remote_agent.coordinator import state as s
from remote_agent.wire import CallFailed, Problem
from supervisor.cli import main
from supervisor.errors import RequestFailed
from supervisor.session import Session
from tests.agents.engine_process import await_death
from tests.agents.test_agent_parts import agents, coordinate, record
from tests.agents.test_session import ALL, collect, has, planned, until
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts


async def test_only_an_agent_that_is_alone_believes_that_its_job_is_over_elsewhere(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):

        async def tell(agent: Agent, term: int, seq: int) -> str:
            try:
                await AgentRequests(agent.context, agent.member).over({"term": term, "seq": seq})
            except Problem as problem:
                return problem.kind
            return ""

        one.context.ballot.follow(1, "n3")
        one.context.journal.take([record(1), record(2)])
        assert await tell(one, 2, 9) == "running", "its lease holds"
        view = one.context.ballot.view
        one.context.ballot.view = dataclasses.replace(view, contact=view.contact - view.node_timeout)
        assert [await tell(one, *end) for end in ((0, 9), (1, 2))] == ["stale", "stale"]
        assert await tell(one, 1, 3) == ""
        assert one.life.finished.is_set()
        assert await tell(one, 1, 3) == "running", "who reads the end from it is not hurried"
        # A coordinator has no lease; it counts as alone while it waits for its group.
        coordinator = coordinate(two)
        for since, kind in ((None, "running"), (clocks.now(), "")):
            coordinator.state = dataclasses.replace(coordinator.state, phase=s.FORMING, alone_since=since)
            assert await tell(two, 2, 99) == kind


async def test_an_agent_whose_launch_was_given_up_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` was killed before it named a coordinator: nobody will ever need this agent."""
    monkeypatch.setattr(agent_module, "LOOK_S", 0.01)
    monkeypatch.setattr(agent_module, "GIVEN_UP_S", 0.1)
    async with agents(tmp_path, "n1") as (one,):
        channel: Any = object()
        watch = asyncio.ensure_future(one.watch_assignment())
        try:
            await asyncio.sleep(0.3)
            assert not one.life.finished.is_set(), "its operator is on the way"
            one.life.attach(channel)
            await asyncio.sleep(0.3)
            assert not one.life.finished.is_set()
            one.life.detach(channel)
            await asyncio.wait_for(one.life.finished.wait(), 60)
        finally:
            watch.cancel()


async def let_it_be_alone(session: Session, node: str) -> None:
    """Wait until an agent hears no coordinator and its lease is over: what it is told then is too old."""
    await until(session, lambda: session.links[node].opened and bool(session.links[node].view.live))
    while True:
        with pytest.raises(CallFailed) as refused:
            await session.links[node].call("over", {"term": 0, "seq": 0})
        if refused.value.kind == "stale":
            return
        await asyncio.sleep(0.1)


# It goes on until the test lets it end.
UNTIL_TOLD = (
    "import os, sys, time\nprint('begun', flush=True)\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n"
)


async def start_again(made: Hosts, node: str) -> None:
    """Start the agent of a job that is over as it was when it was cut off."""
    files = Home(made.home(node)).job("job-t")
    assert starting._read_pid(starting._spawn(files, "--detach"))
    while not files.sock.exists():
        await asyncio.sleep(0.05)


def test_an_agent_that_was_cut_off_as_the_job_ended_does_not_change_the_end_and_learns_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: Hosts) -> None:
        (made.work / "talk.py").write_text(UNTIL_TOLD)
        async with planned(made.inventory(), made, str(tmp_path / "over")) as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            with pytest.raises(CallFailed, match="from its coordinator"):
                await session.links["n2"].call("over", {"term": 9, "seq": 999})
        agent = made.agents()["n2/job-t"]
        os.kill(agent, signal.SIGSTOP)
        (tmp_path / "over").touch()
        try:
            events = made.home("n1") / "jobs/job-t/events.jsonl"
            while '"job_succeeded"' not in events.read_text():
                await asyncio.sleep(0.1)
            other = made.agents()["n1/job-t"]
            os.kill(other, signal.SIGKILL)
            await asyncio.to_thread(await_death, other)
        finally:
            os.kill(agent, signal.SIGCONT)
        async with Session(made.inventory(), "job-t", follow=True) as later:
            await later.ready()
            await later.settle()
            await let_it_be_alone(later, "n2")
            # Its own stream has no end.
            await asyncio.wait_for(collect(later, ALL, "begin"), WAIT_S / 2)
            async with Session(made.inventory()) as outside:
                await outside.ready()
                assert (await outside.call("status"))["state"] == "succeeded"
            assert made.agents() == {"n2/job-t": agent}
            for verb, reported in (
                ("promote", "; agents that were cut off and have been ended now: n2"),
                ("stop", ""),
                ("restart", ""),
            ):
                with pytest.raises(RequestFailed, match=f"job job-t is over: succeeded{reported}$"):
                    await later.request(verb)
            await gone(later)
            await start_again(made, "n2")
        async with Session(made.inventory(), "job-t", attach="control") as attached:
            await until(attached, lambda: any("it ends now" in one.text for one in attached.notices))
            await gone(attached)
            await start_again(made, "n2")
        async with Session(made.inventory(), "job-t") as later:
            await let_it_be_alone(later, "n2")

    async def gone(session: Session) -> None:
        await until(session, lambda: not made.agents())

    with hosts(tmp_path, 2, min_nodes=1, node_timeout=3.0) as made:
        asyncio.run(asyncio.wait_for(scenario(made), 3 * WAIT_S))
        monkeypatch.setattr(supervisor.inventory, "load", lambda path: made.inventory())
        assert list(made.agents()) == ["n2/job-t"]
        assert main(["clean", "h.toml", "job-t"]) == 0
        assert not list(made.root.glob("n*/jobs/job-t"))


def test_clean_logs_in_as_often_as_any_other_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho "$*" >>{started}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with hosts(tmp_path, 2) as made:
        inventory = made.inventory(n1={"python": str(python)}, n2={"python": str(python)})
        monkeypatch.setattr(supervisor.inventory, "load", lambda path: inventory)
        starts = []
        for verb in ("jobs", "clean"):
            started.write_text("")
            assert main([verb, "h.toml"]) == 0
            starts.append(len(started.read_text().splitlines()))
    assert starts[0] == starts[1] >= 2
