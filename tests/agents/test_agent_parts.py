"""Parts of an agent inside the test's process: its promises, its lease, its engine link, what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent import local_workers, requests
from remote_agent.agent.agent import Agent
from remote_agent.agent.coordinator_shell import Coordinator
from remote_agent.agent.engine_link import EngineLink, TorchrunLink
from remote_agent.agent.member_loop import MemberLoop
from remote_agent.agent.relay import Relay
from remote_agent.agent.requests import watch_pause
from remote_agent.base import clocks
from remote_agent.base.paths import JobFiles
from remote_agent.base.proc import start_ticks
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator import inputs
from remote_agent.election import peers
from remote_agent.election.ballot import Ballot
from remote_agent.election.listener import Listener
from remote_agent.election.member import Member, lease_over
from remote_agent.runtime.runtime import Place, Runtime
from remote_agent.wire import MAX_HEADER, Answer, Channel, Handler, JobSpec, NodeSpec, Problem
from supervisor.launch.certificates import Authority, make_authority
from supervisor.ssh.answers import HostChannel
from tests.agents.engine_process import alive, children_of
from tests.agents.test_peers import files_for

pytestmark = pytest.mark.usefixtures("drop_half_open")

WAIT_S = 60.0


def job_files(root: Path, name: str, authority: Authority, **changes: Any) -> JobFiles:
    """Write what `start` writes for an agent of a job on n1, n2 and n3; `changes`: to its description."""
    files = files_for(root / name, name, authority)
    nodes = tuple(NodeSpec(node, "127.0.0.1", "1") for node in ("n1", "n2", "n3"))
    files.spec.write_text(json.dumps(JobSpec("job", "train.py", nodes, **{"node_timeout": 3.0, **changes}).to_json()))
    files.node.write_text(f'{{"node": "{name}"}}')
    return files


@contextlib.asynccontextmanager
async def agents(
    root: Path, *names: str, authority: Authority | None = None, **changes: Any
) -> AsyncIterator[list[Agent]]:
    """Make agents that know each other and serve their peers, and do nothing by themselves."""
    authority = authority or make_authority("job")
    made = [Agent(job_files(root, name, authority, **changes)) for name in names]
    servers: list[Listener] = []
    try:
        servers += [one.listen(0) for one in made]
        ports = {one.context.node: one.context.peers.port for one in made}
        for one in made:
            one.context.peers.members.update({name: {"address": "127.0.0.1", "port": ports[name]} for name in ports})
        yield made
    finally:
        for server in servers:
            server.close()
        for one in made:
            await one.close()


def coordinate(agent: Agent) -> Coordinator:
    """Make an agent the coordinator of the first term, as a launch does."""
    own = {"node": agent.context.node, "address": "a", "port": 1}
    agent.member.role.assign({"term": 1, "coordinator": own, "members": {}})
    assert agent.member.role.coordinator is not None
    # What this node itself has reported is taken now.
    agent.member.role.coordinator.feed(inputs.Tick())
    return agent.member.role.coordinator


@contextlib.asynccontextmanager
async def running(*loops: Coroutine[Any, Any, Any]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Run loops of an agent, and end them."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reports(agent: Agent) -> list[dict[str, Any]]:
    """Return what an agent without an engine has to report."""
    found: list[dict[str, Any]] = agent.member.introduction()["reports"]
    return found


async def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def record(seq: int, size: int = 0) -> Any:
    head = {"seq": seq, "time": "2026-01-01T00:00:00.000Z", "type": "t", "generation": 0, "node": None, "rank": None}
    return {**head, "detail": {"text": "x" * size}, "term": 1}


PROPOSAL: Any = {**record(2), "type": "generation_proposed", "detail": {"members": {}, "disk": ""}}


async def test_what_was_agreed_to_is_known_after_a_restart_and_written_only_when_new(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(3, "n2")
        view = agent.context.ballot.view
        await agent.context.ballot.save()
        before = agent.context.files.term.stat().st_ino
        agent.context.ballot.follow(3, "n2")
        await agent.context.ballot.save()
        assert agent.context.files.term.stat().st_ino == before
        known = agent.context.peers
        known.learn({"n2": {"address": "a", "port": 1}})
        known.learn({"n2": {"address": "b", "port": 1}})

        def is_written() -> bool:
            again = peers.Peers(agent.context.files, "n1", "", Tasks())
            return again.members.get("n2") == {"address": "b", "port": 1}

        await until(is_written)
        assert Ballot(agent.context.files.term, Member("n1", 1.0)).view.term == view.term == 3


async def test_a_vote_that_cannot_be_written_down_is_not_given(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        two.context.files.term.mkdir()
        (two.context.files.term / "x").touch()
        request = {"term": 1, "candidate": "n1", "sounding": False, "journal": one.context.journal.tail()}
        found = await one.context.peers.ask("n2", "vote", request)
        assert found is not None
        assert (found["granted"], "cannot write" in found["reason"]) == (False, True)
        assert two.context.ballot.view.term == 0
        # It follows all the same.
        assert two.context.ballot.follow(2, "n1")


async def test_a_vote_brings_what_the_candidate_lacks_however_much_it_is(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        large = [record(seq, 900_000) for seq in range(1, 13)]
        two.context.journal.take(large)
        for known, sent in ((0, 12), (10, 2), (12, 0)):
            one.context.journal.take(large[:known], reset=True)
            request = {
                "term": known + 1,
                "candidate": "n1",
                "sounding": False,
                "journal": one.context.journal.tail(),
            }
            found = await one.context.peers.ask("n2", "vote", request)
            assert found is not None
            assert (found["granted"], found["reset"], len(found["records"])) == (True, False, sent)
            one.context.journal.take(found["records"], reset=found["reset"])
            assert one.context.journal.records == large


async def test_the_lease_ends_the_workers_while_an_election_waits(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,), await asyncio.start_server(hold, "127.0.0.1", 0) as mute:
        agent.context.peers.members["n2"] = {"address": "127.0.0.1", "port": mute.sockets[0].getsockname()[1]}
        agent.context.ballot.follow(1, "n3")
        async with running(agent.member.keep_lease()):
            await until(agent.member.election.standing.locked)
            agent.member.workers.running = 0
            await until(lambda: agent.member.running is None)
            assert agent.member.election.standing.locked()


async def test_a_go_that_is_read_after_the_lease_starts_nothing(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n2")
        view = agent.context.ballot.view
        agent.context.ballot.view = dataclasses.replace(view, contact=view.contact - view.node_timeout)
        agent.member.workers.order("go", {"generation": 0, "tree": None})
        async with running(agent.member.workers.carry_out_orders()):
            await until(lambda: reports(agent))
        # Without an engine a start fails, and says so.
        assert reports(agent) == [{"op": "idle", "args": {"generation": 0, "exits": []}}]
        assert agent.member.running is None


async def test_a_node_without_a_lease_asks_for_one_before_it_reports_idle(tmp_path: Path) -> None:
    """Else it is in one group after the other, and starts nothing, until its next heartbeat is answered."""
    heard: list[str] = []

    async def answer(op: str, args: Any, _body: bytes) -> Answer:
        heard.append(args.get("op", op))
        return Answer({"received_ns": time.time_ns(), "answered_ns": time.time_ns(), "now": clocks.now()})

    async with agents(tmp_path, "n1") as (agent,):
        ours, theirs = socket.socketpair()
        coordinator = Channel(*await asyncio.open_connection(sock=theirs), answer)
        channel = agent.member.link.channel = Channel(*await asyncio.open_connection(sock=ours))
        agent.context.ballot.follow(1, "n2")
        view = agent.context.ballot.view
        agent.context.ballot.view = dataclasses.replace(view, contact=view.contact - view.node_timeout)
        agent.member.workers.order("go", {"generation": 0, "tree": None})
        async with running(coordinator.run(), channel.run(), agent.member.workers.carry_out_orders()):
            await until(lambda: len(heard) == 2)
            assert heard == ["beat", "idle"]
            assert not lease_over(agent.context.ballot.view, clocks.now())
            agent.member.link.channel = None
            for one in (coordinator, channel):
                await one.close()


async def test_a_late_heartbeat_holds_its_node_only_from_when_it_was_sent(
    tmp_path: Path,
) -> None:
    """A link that was cut delivers it late; its sender was without an answer meanwhile, and may elect another one."""
    async with agents(tmp_path, "n1", "n2") as (one, two):
        coordinator = coordinate(one)
        two.context.ballot.follow(1, "n1")
        async with joined(two, one) as channel:
            echo = clocks.Echo((await channel.call("time", {}, timeout=WAIT_S)).data["now"])
            for op in ("join", "beat"):
                message = {"join": two.member.introduction(), "beat": two.member.heartbeat()}[op]
                message |= {**echo.facts(), "heard_age": 0.0}
                before = dataclasses.replace(coordinator.state.nodes["n2"], held=0.0)
                coordinator.state = dataclasses.replace(
                    coordinator.state, nodes={**coordinator.state.nodes, "n2": before}
                )
                sent = clocks.now()
                await asyncio.sleep(0.3)
                await channel.call(op, message, timeout=WAIT_S)
                await until(lambda: coordinator.state.nodes["n2"].held)
                assert sent - WAIT_S < coordinator.state.nodes["n2"].held <= sent


async def test_a_member_that_has_not_taken_all_that_the_coordinator_sent_joins_again(tmp_path: Path) -> None:
    """Nothing is sent twice on a connection: what is left out would be missing for as long as that lasts."""
    async with agents(tmp_path, "n1") as (agent,):
        member, hear = agent.member, agent.member.handler("n2")
        sent: Any = {
            "records": [record(1), PROPOSAL],
            "reset": False,
            "more": False,
        }
        await hear("journal", sent, b"")
        assert member.link.look_again.is_set(), "it follows nobody: it voted for another node"
        agent.context.ballot.follow(1, "n2")
        member.link.look_again.clear()
        await hear("journal", {**sent, "records": sent["records"][1:]}, b"")
        assert member.link.look_again.is_set(), "a record is missing before this one"
        assert (agent.context.journal.records, reports(agent)) == ([], [])
        member.link.look_again.clear()
        await hear("journal", {**sent, "records": sent["records"][:1]}, b"")
        assert not member.link.look_again.is_set()
        assert agent.context.journal.last_seq == 1


async def test_a_member_that_is_cut_off_in_the_middle_of_a_new_journal_keeps_its_old_one(tmp_path: Path) -> None:
    """A part of the coordinator's journal may lack groups that the old one of this node knows, and may not vote."""
    async with agents(tmp_path, "n1", "n2") as (one, two):
        ours = [record(1)]
        two.context.journal.take(ours)
        on_disk = two.context.files.events.read_text()
        two.context.ballot.follow(1, "n1")
        coordinate(one)
        proposal: Any = {**PROPOSAL, "detail": {**PROPOSAL["detail"], "text": "x" * 900_000}}
        one.context.journal.take([record(1, 900_000), proposal, record(3, 900_000)], reset=True)
        hear, pieces, cut = two.member.handler("n1"), asyncio.Event(), True

        async def until_cut(op: str, args: Any, body: bytes) -> Any:
            if op == "journal" and not (cut and pieces.is_set()):
                pieces.set()
                await hear(op, args, body)
            return Answer({})

        async with joined(two, one, until_cut):
            await asyncio.wait_for(pieces.wait(), WAIT_S)
        assert (two.context.journal.records, two.context.files.events.read_text()) == (ours, on_disk)
        assert not reports(two)
        cut = False
        async with joined(two, one, until_cut):
            await until(lambda: two.context.journal.records[:3] == one.context.journal.records[:3])
            await until(lambda: [report["op"] for report in reports(two)] == ["recorded"])
        assert len(two.context.files.events.read_text().splitlines()) >= 3


async def test_a_new_coordinator_of_a_job_that_is_over_adds_nothing_to_its_journal(tmp_path: Path) -> None:
    """The others have ended with the same journal; only those that were cut off need to hear of the end."""
    async with agents(tmp_path, "n1") as (agent,):
        ended: Any = {**record(1), "type": "job_stopped", "detail": {"reason": "an operator stopped the job"}}
        agent.context.journal.take([ended])
        agent.member.role.take(2, "n2")
        assert agent.context.journal.records == [ended]
        assert agent.member.role.coordinator is not None
        assert agent.member.role.coordinator.state.ended == "stopped"


async def test_an_order_that_sets_what_may_run_a_program_starts_nothing(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n2")
        evil = {"generation": 0, "tree": None, "set_env": {"PYTHONWARNINGS": "error", "BROWSER": "touch evil"}}
        await agent.member.handler("n2")("order", {"op": "go", "args": evil, "term": 1}, b"")
        async with running(agent.member.workers.carry_out_orders()):
            await until(lambda: reports(agent))
        (report,) = reports(agent)
        assert report["op"] == "order_failed"
        assert "the coordinator's order is refused: PYTHONWARNINGS" in report["args"]["message"]


async def test_no_agent_can_choose_whom_another_believes(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n2")
        for op in ("trust", "describe"):
            with pytest.raises(Problem, match="no such request between agents"):
                await agent.member.handler("n2")(op, {"ca": make_authority("job").ca}, b"")


async def test_an_agent_that_ends_waits_once_for_all_who_do_not_answer(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        ends = [socket.socketpair() for _ in range(20)]
        for ours, _theirs in ends:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(b"x" * 1_000_000)
            agent.life.operators.add(Channel(reader, writer))
        began = time.monotonic()
        await agent.close()
        assert time.monotonic() - began < 30.0
        for _ours, theirs in ends:
            theirs.close()


async def test_a_work_tree_that_cannot_be_put_in_place_is_reported_at_once(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        role = coordinate(agent)
        agent.context.tree.name = "tree"
        (agent.context.files.home.trees / ".state" / "tree" / "lock").mkdir(parents=True)
        role.state = dataclasses.replace(role.state, phase="starting", generation=0, members={"n1": 0})
        agent.member.workers.order("go", {"generation": 0, "tree": "f" * 64})
        async with running(agent.member.workers.carry_out_orders()):
            await until(lambda: "Is a directory" in role.state.troubles.get("n1", ""))


async def test_an_unsent_report_is_sent_on_the_next_connection(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n2")
        failed = {"generation": 0, "message": "go: no such directory"}
        agent.member.report("order_failed", failed)
        assert {"op": "order_failed", "args": failed} in reports(agent)


async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say nothing until the other side has gone."""
    await reader.read()
    writer.close()


async def test_the_lease_is_kept_whatever_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n3")
        # A record that no fold can read.
        unreadable: Any = {"seq": 1, "type": "node_ready"}
        agent.context.journal.append(unreadable)
        async with running(agent.member.keep_lease()) as (keeping,):
            await until(lambda: [one.message for one in caplog.records].count("lease") > 1)
            assert not keeping.done()


@pytest.mark.parametrize(("was", "makes"), [("of an earlier job", 2), ("up for this job", local_workers.ENGINE_DEATHS)])
async def test_an_engine_that_worked_and_ends_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: str, makes: int
) -> None:
    """Docker that restarts ends all containers, and starts none for some seconds."""

    class Ended(EngineLink):
        async def run(self) -> str:
            return self._over("exit code -9")

    async def hear(_op: str, _args: Any) -> None:
        """It says nothing."""

    monkeypatch.setattr(local_workers, "START_AGAIN_S", 0.0)
    async with agents(tmp_path, "n1") as (agent,):
        files, made = agent.context.files, [0]

        def make_engine(_notice: Any) -> EngineLink:
            made[0] += 1
            return Ended(files, hear, {}, agent.context.runtime)

        member = MemberLoop(agent.context, make_engine)
        if was == "of an earlier job":
            member.workers.engine.turn_to(files, hear, {}, agent.context.runtime)
        else:
            member.workers.engine.facts = {"torch": "2.13.0"}
        await asyncio.wait_for(member.workers.keep_engine(), WAIT_S)
        assert made == [makes], "the node was called unfit, although its installation works"
        await member.close()


async def test_another_coordinator_has_another_clock(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        agent.context.ballot.follow(1, "n2")
        now_ns = time.time_ns()
        agent.member.link.offset.sample(now_ns, now_ns + 10**12, now_ns + 10**12)
        agent.context.ballot.follow(2, "n2")
        assert agent.member.heartbeat()["offset_ns"] > 0
        agent.context.ballot.follow(3, "n3")
        assert agent.member.heartbeat()["offset_ns"] == 0


def test_a_big_jobs_status_is_sent_less_often_and_never_seems_old() -> None:
    assert [watch_pause(ranks) for ranks in (0, 8, 512, 100_000)] == [0.1, 0.1, 0.512, 25.0]


async def test_a_heartbeat_has_the_usage_of_node_and_ranks(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (agent,):
        folder = agent.context.files.generation(0) / "rank_4"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step=7 loss=0.5 tok/s=96,021\n")
        await agent.context.logs.start()
        member_loop = agent.member
        assert member_loop.facts()["vitals"] is None
        with subprocess.Popen(["sleep", "60"], env={"LOCAL_RANK": "0", "RANK": "4"}) as worker:
            member_loop.workers.generation = member_loop.workers.running = 0
            ranks = [{"rank": 4, "local_rank": 0, "pid": worker.pid}]
            member_loop.report("started", {"generation": 0, "ranks": ranks})
            await until(lambda: b"LOCAL_RANK" in Path(f"/proc/{worker.pid}/environ").read_bytes())
            # A process has the environment of its program a moment before it has memory of its own.
            await until(lambda: "VmRSS" in Path(f"/proc/{worker.pid}/status").read_text())
            for _ in range(2):
                agent.context.vitals.measure(member_loop.workers.pids())
            reported = member_loop.facts()
            worker.kill()
        assert 0 < reported["vitals"]["mem_used"] < reported["vitals"]["mem_total"]
        assert reported["vitals"]["disk_free"] > 0
        rank = reported["ranks"]["4"]
        known = {name: value for name, value in rank["progress"].items() if value is not None}
        assert known == {"loss": 0.5, "rate": 96021.0, "unit": "tok/s"}
        time_s, samples = member_loop.samples()
        assert abs(time_s - time.time()) < WAIT_S
        assert samples["loss", 4] == 0.5
        assert samples["step", 4] == 7
        assert samples["mem", -1] > 0
        assert rank["vitals"]["rss"] > 0
        assert rank["vitals"]["cpu"] == 0
        member_loop.workers.running = None
        assert member_loop.workers.pids() == {}


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
async def test_an_engine_that_does_not_come_up_makes_its_node_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:

    monkeypatch.setattr(sys, "executable", program)
    async with agents(tmp_path, "n1") as (agent,):
        role = coordinate(agent)
        agent.member.start()
        await until(lambda: agent.member.role.coordinator and role.state.nodes["n1"].status == "failed")
        assert "engine" in str(role.state.nodes["n1"].reason)
        assert agent.member.workers.engine.ready.is_set()


async def test_an_engine_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(local_workers, "ENGINE_DEATHS", 1)
    async with agents(tmp_path, "n1") as (agent,):
        role = coordinate(agent)
        agent.member.start()
        engine = agent.member.workers.engine
        await asyncio.wait_for(engine.ready.wait(), WAIT_S)
        await engine.kill()
        await until(lambda: agent.member.role.coordinator and role.state.nodes["n1"].status == "failed")
        # Who asks for the engine is told at once.
        assert agent.member.workers.engine.ready.is_set()
        with pytest.raises(Problem, match="died 1 times in 10 minutes, last: exit code -9"):
            agent.member.workers.nproc()


async def test_an_engine_that_does_not_end_is_killed(tmp_path: Path) -> None:
    async def ignore(op: str, args: Any) -> None:
        pass

    files = files_for(tmp_path, "n1", make_authority("job"))
    link = EngineLink(files, ignore, {}, Runtime(files.home, Place(str(tmp_path))))
    running = asyncio.ensure_future(link.run())
    await until(lambda: link.has_started)
    (engine,) = (pid for pid in children_of(os.getpid()) if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(engine, signal.SIGSTOP)
    began = clocks.now()
    await link.close()
    assert not alive(engine)
    assert clocks.now() - began < WAIT_S
    assert await asyncio.wait_for(running, WAIT_S) == "exit code -9"


async def test_workers_of_a_torchrun_that_hangs_are_killed(tmp_path: Path) -> None:
    async def ignore(op: str, args: Any) -> None:
        pass

    async def hang(op: str, args: Any, body: bytes) -> Answer:
        if op != "go":
            await asyncio.Event().wait()
        return Answer({"ranks": [{"pid": worker.pid, "started": start_ticks(worker.pid)}]})

    ours, theirs = socket.socketpair()
    torchrun = Channel(*await asyncio.open_unix_connection(sock=theirs), hang)
    serving = asyncio.ensure_future(torchrun.run())
    files = files_for(tmp_path, "n1", make_authority("job"))
    link = TorchrunLink(files, ignore, ours.detach(), Runtime(files.home, Place(str(tmp_path))))
    running = asyncio.ensure_future(link.run())
    await until(lambda: link.has_started)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as worker:
        await link.call("go", {})
        with pytest.raises(asyncio.TimeoutError):
            await link.call("stop", {}, 0.1)
        await link.kill()
        assert worker.wait() == -signal.SIGKILL
    # It sees the end of its wire, and ends as soon as it can.
    await asyncio.wait_for(serving, WAIT_S)
    assert await asyncio.wait_for(running, WAIT_S) == "its torchrun ended"


async def test_what_is_sent_to_a_member_ends_with_its_connection(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        role = coordinate(one)

        def sending() -> int:
            return [task.get_name() for task in asyncio.all_tasks()].count("orders for n2")

        async with contextlib.AsyncExitStack() as held:
            wires = [await held.enter_async_context(joined(two, one)) for _ in range(3)]
            await until(lambda: sending() == 1)
            # The newest is current; one that cannot be sent all ends as well.
            role.notify_all("order", {"text": "x" * MAX_HEADER})
            await until(lambda: sending() == 0)
            await asyncio.wait_for(wires[2].closed.wait(), WAIT_S)
            assert not role.connected


@contextlib.asynccontextmanager
async def joined(member: Agent, coordinator: Agent, handler: Handler | None = None) -> AsyncIterator[Channel]:
    """Connect as a member does."""
    node = coordinator.context.node
    channel = await member.context.peers.connect(node, handler or member.member.handler(node))
    async with running(channel.run()):
        await channel.call("join", member.member.introduction(), timeout=WAIT_S)
        yield channel
        await channel.close()


async def test_the_end_waits_only_for_operators_who_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection that was cut without a word nobody hears here for as long as TCP tries."""
    monkeypatch.setattr(requests, "ASK_S", 0.05)
    monkeypatch.setattr(requests, "ANSWER_S", 3.0)

    async with agents(tmp_path, "n1") as (one,):
        relay = Relay("n1", one.context.peers, Tasks())
        server = await requests.serve_operators(one.context, one.member, relay)
        reader, writer = await asyncio.open_unix_connection(one.context.files.sock)
        silent = await asyncio.open_unix_connection(one.context.files.sock)
        operator = HostChannel("n1", reader, writer)
        running = asyncio.ensure_future(operator.run())
        await until(lambda: len(one.life.operators) == 2)
        one.life.finish("succeeded")
        await until(lambda: len(one.life.operators) == 1)
        assert not operator.closed.is_set()
        assert (await operator.call("identity")).data["node"] == "n1"
        watched = asyncio.ensure_future(one.life.until_unwatched(0.1))
        await asyncio.sleep(0.5)
        assert not watched.done(), "this one answers"
        await operator.close()
        await asyncio.wait_for(watched, WAIT_S)
        await running
        silent[1].close()
        server.close()


async def test_an_agent_tells_that_its_node_is_on_its_way_into_the_job(tmp_path: Path) -> None:
    """Until it has been taken in: another operator who adds the node must not take it for the one that left."""
    own = {"time": "2026-01-01T00:00:00.000Z", "node": "n1", "rank": None}
    removed: Any = {**record(1), **own, "type": "node_removed", "detail": {"reason": "an operator removed it"}}
    lost = {"status": "failed", "reason": "no engine", "alive_ns": None}
    failed: Any = {**record(2), **own, "type": "node_lost", "detail": lost}

    async def joining(agent: Agent) -> bool:
        return bool((await requests.AgentRequests(agent.context, agent.member).identity({})).data["joining"])

    async with agents(tmp_path, "n1") as (one,):
        assert await joining(one), "it follows nobody"
        one.context.ballot.follow(1, "n2")
        assert not await joining(one)
        one.context.journal.take([removed])
        assert not await joining(one), "it has heard that it is out"
    async with agents(tmp_path, "n1") as (again,):
        assert again.context.ballot.view.term == 1
        assert await joining(again), "the one before was out"
        again.context.journal.take([failed])
        assert not await joining(again)
        again.life.finish("removed")
        assert not await joining(again)
