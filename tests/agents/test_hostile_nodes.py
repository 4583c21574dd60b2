"""No node can hurt the others: whatever one of them sends, the job and what others see of it go on.

The rule: a message with one field that no agent of ours sends is refused, or its field counts as unknown; the node's
row says so; the documents of the job can still be made and read, its journal too; the other nodes' rows do not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509

from remote_agent.agent import metrics
from remote_agent.agent.agent import Agent
from remote_agent.agent.coordinator_shell import Coordinator
from remote_agent.agent.snapshot_copies import MOST_TOLD, Notices
from remote_agent.base import clocks
from remote_agent.coordinator import inputs
from remote_agent.coordinator.journal import read_records
from remote_agent.election.peers import PeerUnreachable, Tls, connect
from remote_agent.wire import Answer, Channel, Problem
from remote_agent.wire.channel import refuse
from remote_agent.wire.documents import read_event, read_status
from supervisor.launch.certificates import make_authority, sign_with
from tests.agents.test_agent_parts import agents, coordinate, running, until
from tests.agents.test_peers import files_for

STRANGE: tuple[Any, ...] = (
    None, True, -1, 1.5, 10**30, "", "x", "9" * 40, "\ud800", [], [[]], ["x"], {}, {"x": {}}, {"1": None},
)  # fmt: skip
MISSING = object()
GPU = {"index": 0, "age_s": 0.1, "use": 90.0, "mem_used": 1e9, "mem_total": 8e10, "name": "H100"}
PROGRESS = {"loss": 0.5, "lr": 1e-4, "grad_norm": 1.0, "rate": 5.0, "unit": "it/s", "steps_s": 5.0, "saved": 10,
            "total": 100}  # fmt: skip
FACTS: dict[str, Any] = {
    "generation": 0,
    "agent_pid": 7,
    "vitals": {"age_s": 0.1, "every_s": 2.0, "cpu": 5.0, "mem_used": 1e9, "mem_total": 1e11, "gpus": [GPU]},
    "standby": {"state": "ready", "pid": 9, "why": "", "modules": 3, "mb": 90, "left_out": ["x"]},
    "ranks": {
        "1": {
            "step": 7, "last_output_age_s": 0.2, "first_step_age_s": 3.0, "warning": None, "losses": [[7, "0.5"]],
            "progress": PROGRESS, "vitals": {"age_s": 0.1, "cpu": 99.0, "rss": 1e9, "gpu": 0},
        }
    },
    "snapshots": [{"id": "a", "path": "x.pt", "bytes": 3, "time_ns": 10**18, "step": 3}],
}  # fmt: skip
BEAT: dict[str, Any] = {"heard_age": 0.1, "offset_ns": 5, "clock_error_ns": 7, "facts": FACTS}
STEPS: dict[str, Any] = {**BEAT, "steps": {"generation": 0, "ranks": {"1": [8, 0.1]}}}
del STEPS["facts"]
EXIT = {
    "rank": 1, "local_rank": 0, "pid": 21, "code": 1, "signal": None, "core": False, "t_ns": 10**18, "over_ns": None,
    "asked_ns": None, "sent": None, "stopped_by_us": False, "notes": ["x"], "tail": "boom", "stderr_lines": 1,
    "error": {"message": "boom", "callstack": None, "timestamp_ns": 10**18}, "said": None, "nccl": "",
}  # fmt: skip
PULSE: dict[str, Any] = {
    "t": 1.0, "state": "S", "cpu_s": 1.0, "io": 5, "sleeps": 3, "stack": "h", "where": "a.py:1 in f", "calls": "",
    "script": [["a.py", 1, "f"]], "parked": False, "over": False, "inside": None, "frame": None, "deaf": False,
    "groups": {"0": {"ranks": [0, 1, 2], "last": 4, "calls": [[4, "allreduce", "[1]", 1, "f", False, False, "", 0]],
                     "came": {"first": 4, "t_us": 1, "later_us": [0], "done_us": [None]}, "seq": 4, "op": "allreduce",
                     "sizes": "[]", "age_s": 1.0, "timeout_s": 600.0, "backend": "nccl"}},
    "source": None, "net": None, "ended": None, "children": [], "ras": [], "unanswered": [], "reached": [],
    "addresses": [], "step": [7, 0.5],
}  # fmt: skip
REPORTS: dict[str, dict[str, Any]] = {
    "ready": {"nproc": 1, "versions": {"torch": "2.13.0"}, "trees": ["d"]},
    "unfit": {"reason": "no GPU"},
    "notice": {"kind": "x", "message": "y"},
    "held": {"generation": 0, "snapshots": FACTS["snapshots"]},
    "placed": {"generation": 0, "ids": ["a"], "seconds": 1.0, "bytes": 3, "placed": {"a": "n1"}, "aside": ["b"]},
    "gone": {"reason": "x"},
    "recorded": {"generation": 0, "term": 1},
    "prepared": {"generation": 0, "port": 29500},
    "order_failed": {"generation": 7, "message": "x"},
    "started": {"generation": 0, "ranks": [{"rank": 1, "local_rank": 0, "pid": 21}], "cold": "",
                "notice": {"kind": "interface", "message": "eth1"}},
    "grouping": {"generation": 0, "rank": 1},
    "grouped": {"generation": 0, "rank": 1, "t_ns": 10**18, "took_s": 1.0},
    "assigned": {"generation": 7, "ranks": [{"rank": 1, "local_rank": 0, "pid": 21}], "world_size": 3},
    "main": {"generation": 0, "rank": 1},
    "pulse": {"generation": 0, "ranks": {"1": PULSE}},
    "exited": {"generation": 7, "exit": EXIT},
    "idle": {"generation": -1, "exits": [EXIT]},
}  # fmt: skip
# They take a node out of the job, which is its own to say.
LEAVES = ("unfit", "gone")
VOTE = {
    "granted": True, "reason": "", "disk": "d", "newest": [1, 2], "reset": False, "records": [],
    "groups": [{"generation": 0, "term": 1, "members": {"n1": "d"}, "author": ["n1", "d"], "formed": True}],
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "vote": {"term": 2, "candidate": "n2", "sounding": True, "journal": {"term": 1, "seq": 1, "digest": ""},
             "where": {"address": "127.0.0.1", "port": 9}},
    "who": {"term": 1, "where": {"address": "127.0.0.1", "port": 9}},
    "announce": {"term": 1, "coordinator": "n2", "members": {"n2": {"address": "127.0.0.1", "port": 9}}},
    "time": {"answered": 1.0, "since_answer": 0.1},
    "report": {"op": "main", "args": {"generation": 0, "rank": 1}},
    "request": {"op": "operators", "args": {"somebody@far": "watch"}},
    "take_over": {"term": 1},
    "moved": {"successor": "n2"},
    "members": {"members": {"n2": {"address": "127.0.0.1", "port": 9}}},
    "journal": {"records": [], "reset": False, "more": False},
    "order": {"op": "stop", "term": 1, "args": {}},
}  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field, however deep."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the document with one field that is strange or missing, for every field, as it comes from a wire."""
    for path in places(document):
        for strange in (*STRANGE, MISSING):
            broken = copy.deepcopy(document)
            holder: Any = broken
            for key in path[:-1]:
                holder = holder[key]
            if strange is not MISSING:
                holder[path[-1]] = strange
            elif isinstance(holder, dict):
                del holder[path[-1]]
            yield f"{path} = {strange!r}", json.loads(json.dumps(broken))


@contextlib.asynccontextmanager
async def job(root: Path) -> AsyncIterator[tuple[Agent, Coordinator]]:
    """A job of three nodes whose group runs, as its coordinator n1 knows it."""
    async with agents(root, "n1", node_timeout=600.0, min_nodes=3, max_nodes=3) as (one,):
        role = coordinate(one)
        role.receive("n1", "ready", REPORTS["ready"])
        for name in ("n2", "n3"):
            role.hear_join(name, introduction(name))
        await until(lambda: role.state.phase == "preparing")
        for name in ("n1", "n2", "n3"):
            role.receive(name, "recorded", REPORTS["recorded"])
        role.receive("n1", "prepared", REPORTS["prepared"])
        await until(lambda: role.state.phase == "starting")
        for number, name in enumerate(("n1", "n2", "n3")):
            pid = {"rank": number, "local_rank": 0, "pid": 20 + number}
            role.receive(name, "started", {"generation": 0, "ranks": [pid]})
            role.receive(name, "main", {"generation": 0, "rank": number})
        await until(lambda: role.state.phase == "running")
        role.beat("n2", BEAT)
        role.beat("n3", {**BEAT, "facts": {**FACTS, "ranks": {}}})
        yield one, role


def introduction(name: str) -> dict[str, Any]:
    return {
        "term": 1, "incarnation": f"{name}-0", "journal": {"term": 0, "seq": 0, "digest": ""}, "disk": f"{name}-d",
        "running": None, "reason": "", "address": "127.0.0.1", "port": 9, "offset_ns": 0, "clock_error_ns": 0,
        "reports": [{"op": "ready", "args": REPORTS["ready"]}], "operators": {},
    }  # fmt: skip


def row(role: Coordinator, name: str) -> dict[str, Any]:
    """Return a node's row of the status, whose ages are left out; the whole status must be readable."""
    status = read_status(json.loads(json.dumps(role.status())))
    metrics.render(role.status())
    found: dict[str, Any] = next(dict(node) for node in status["nodes"] if node["name"] == name)
    found["vitals"] = found["ranks"] = None
    return found


def check_whole(one: Agent, role: Coordinator, what: str) -> None:
    """The coordinator still decides, and its journal can be read to its end."""
    role.feed(inputs.Tick())
    assert role.state.phase == "running", what
    assert len(read_records(one.context.files.events)) == one.context.journal.last_seq, what


@pytest.mark.parametrize("beat", [BEAT, STEPS], ids=["facts", "steps"])
async def test_a_malformed_heartbeat_is_the_nodes_own_trouble(tmp_path: Path, beat: dict[str, Any]) -> None:
    async with job(tmp_path) as (one, role):
        handle = one.member.handler("n2")
        others, taken, said = row(role, "n3"), 0, 0
        for what, broken in damaged(beat):
            with contextlib.suppress(Problem):
                await handle("beat", broken, b"")
                taken += 1
            said += "malformed report" in str(row(role, "n2")["reason"])
            assert row(role, "n3") == others, what
        check_whole(one, role, "all heartbeats")
        assert taken > 20
        assert said > 20
        await handle("beat", BEAT, b"")
        assert row(role, "n2")["reason"] is None


@pytest.mark.parametrize("op", list(REPORTS))
async def test_a_malformed_report_is_the_nodes_own_trouble(tmp_path: Path, op: str) -> None:
    async with job(tmp_path) as (one, role):
        before = {name: row(role, name) for name in ("n1", "n3")}
        for what, broken in damaged(REPORTS[op]):
            role.receive("n2", op, broken)
            # Reports that came together are taken together.
            await asyncio.sleep(0)
            if op not in LEAVES:
                check_whole(one, role, what)
            if role.state.phase == "running":
                assert {name: row(role, name) for name in before} == before, what


async def test_a_malformed_introduction_or_request_is_refused(tmp_path: Path) -> None:
    async with job(tmp_path) as (one, role):
        handle = one.member.handler("n2")
        for op, request in {**REQUESTS, "join": introduction("n2")}.items():
            for what, broken in damaged(request):
                with contextlib.suppress(Problem):
                    # A join that is well-formed needs a connection, which this one lacks.
                    with contextlib.suppress(AssertionError):
                        answer = await handle(op, broken, b"")
                    if not isinstance(answer, Answer):
                        async for _ in answer:
                            pass
                row(role, "n3")
                check_whole(one, role, f"{op} {what}")
        assert one.context.ballot.view.term == 1


async def test_a_record_that_nobody_could_read_is_neither_taken_nor_written(tmp_path: Path) -> None:
    async with job(tmp_path) as (one, role), agents(tmp_path / "member", "n2") as (two,):
        two.context.ballot.follow(1, "n1")
        handle = two.member.handler("n1")
        whole = one.context.journal.records
        await handle("journal", {"records": whole[:1], "reset": False, "more": False}, b"")
        for what, broken in damaged(whole[1]):  # type: ignore[arg-type]
            with contextlib.suppress(Problem):
                await handle("journal", {"records": [broken], "reset": False, "more": False}, b"")
            taken = two.context.journal.records
            assert all(read_event(json.loads(json.dumps(record))) for record in taken), what
            two.context.journal.take(whole[:1], reset=True)
        # Its own agent does not write what it could not read, either.
        seq = one.context.journal.last_seq
        role.record("signal_sent", "n2", ranks="all of them")  # type: ignore[arg-type]
        assert one.context.journal.last_seq == seq


async def test_no_node_says_who_sent_a_signal(tmp_path: Path) -> None:
    """It reports for its own ranks; an operator is named who is attached to the coordinator's own node."""
    async with job(tmp_path) as (one, role):
        fact = {"node": "n1", "ranks": [0, 1, 2], "signal": "SIGUSR1", "operator": "ann@laptop"}
        role.request("n2", "operators", {"ann@laptop": "control"})
        role.request("n2", "signalled", fact)
        role.request("n1", "operators", {"ann@laptop": "control", "guest": "watch"})
        role.request("n2", "signalled", fact)
        role.request("n2", "signalled", {**fact, "operator": "guest"})
        role.request("n1", "signalled", {**fact, "operator": "bob"})
        for ranks in ([0, 2], [], [77]):
            with pytest.raises(Problem, match="n2 does not have these ranks"):
                role.request("n2", "signalled", {**fact, "ranks": ranks})
        sent = [record for record in one.context.journal.records if record["type"] == "signal_sent"]
        assert [(one["node"], one["detail"]["ranks"], one["detail"]["operator"]) for one in sent] == [
            ("n2", [1], None), ("n2", [1], "ann@laptop"), ("n2", [1], None), ("n1", [0], "bob")
        ]  # fmt: skip


async def test_a_malformed_vote_is_no_vote_and_costs_no_other(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        for what, broken in damaged(VOTE):

            async def vote(_node: str, _channel: Channel | None, _args: dict[str, Any], data: Any = broken) -> Answer:
                return Answer(data)

            two.member.serve("vote", vote)
            with contextlib.suppress(AttributeError):
                answer = await one.context.peers.ask("n2", "vote", REQUESTS["vote"] | {"candidate": "n1"})
            if answer is not None and answer["granted"]:
                assert isinstance(answer["newest"][1], int), what
                assert all(isinstance(group["members"], dict) for group in answer["groups"]), what


async def test_no_node_raises_the_term_beyond_what_others_can_follow(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        one.context.ballot.follow(5, "n3")
        handle = one.member.handler("n2")
        huge = 2**62
        await handle("announce", {"term": huge, "coordinator": "n2", "members": {}}, b"")
        assert one.context.ballot.view.term == 5
        answers = await handle("vote", REQUESTS["vote"] | {"term": huge, "sounding": False}, b"")
        assert not isinstance(answers, Answer)
        granted = [answer.data["granted"] async for answer in answers]
        await one.context.ballot.save()
        assert granted == [False]
        assert json.loads(one.context.files.term.read_text())["term"] == 5
        # A coordinator does not outbid it, either.
        two.context.ballot.follow(1, "n2")
        role = coordinate(two)
        assert not two.member.role.needs_term_above(huge)
        assert role.state.term == 1


async def test_addresses_are_learned_only_with_a_term_that_is_followed(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n2") as (one, two):
        one.context.ballot.follow(5, "n2")
        known, wrong = dict(one.context.peers.members), {"n2": {"address": "127.0.0.9", "port": 9}}

        async def answer(_node: str, _channel: Channel | None, _args: dict[str, Any]) -> Answer:
            return Answer({"term": 2**62, "coordinator": "n2", "members": wrong})

        for term in (4, 2**62):
            await one.member.handler("n2")("announce", {"term": term, "coordinator": "n2", "members": wrong}, b"")
            assert one.context.peers.members == known
        one.context.ballot.follow(5, "n9")
        two.member.serve("who", answer)
        await one.member.election.ask_around()
        assert (one.context.ballot.view.term, one.context.peers.members) == (5, known)
        await one.member.handler("n2")("announce", {"term": 6, "coordinator": "n2", "members": wrong}, b"")
        assert one.context.peers.members["n2"] == wrong["n2"]


async def test_nothing_grows_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pause of a node that loses elections for weeks, nor the names that others announce."""
    async with agents(tmp_path, "n1") as (one,):
        peers, election, now = one.context.peers, one.member.election, clocks.now()
        for first in range(0, 60_000, 10_000):
            peers.learn({f"x{number}": {"address": "127.0.0.1", "port": 9} for number in range(first, first + 10_000)})
        assert len(peers.members) <= 30_000
        peers.learn({"x7": {"address": "127.0.0.7", "port": 9}})
        assert peers.members["x7"]["address"] == "127.0.0.7"

        warnings, said = Notices(), list[Any]()
        warnings.start(SimpleNamespace(report=lambda *each: said.append(each)))
        for number in range(1000):
            warnings.tell("x", f"snapshot {number}")
            warnings.tell("x", f"snapshot {number}")
        assert (len(said), len(warnings._told) <= MOST_TOLD) == (1000, True)

        async def refused() -> str:
            return "nobody answers"

        monkeypatch.setattr(election, "stand", refused)
        for _ in range(1100):
            await election._try()
        assert now < election._not_before < clocks.now() + 60


async def test_a_removed_node_is_refused_until_it_has_a_new_certificate(tmp_path: Path) -> None:
    authority = make_authority("job")
    async with agents(tmp_path, "n1", authority=authority) as (one,):
        role = coordinate(one)
        old = files_for(tmp_path / "old", "n3", authority)

        async def asks(who: Any) -> bool:
            try:
                channel = await connect(Tls(who), "n1", "127.0.0.1", one.context.peers.port, refuse)
            except PeerUnreachable:
                return False
            async with running(channel.run()):
                try:
                    await channel.call("announce", {"term": 9, "coordinator": "n3", "members": {}}, timeout=60.0)
                except Problem as refused:
                    return refused.kind != "removed"
                finally:
                    await channel.close()
            return True

        assert await asks(old)
        one.context.ballot.view = one.context.ballot.view.__class__("n1", 3.0, 1, coordinator="n1")
        role.record("node_removed", "n3", reason="removed by an operator")  # type: ignore[arg-type]
        assert await asks(old), "the next group may need its vote"
        plan = [{"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 1}]
        role.record("generation_started", None, members=plan, restarts=0)  # type: ignore[arg-type]
        await asyncio.sleep(0.002)
        assert not await asks(old)
        with pytest.raises(PeerUnreachable, match="removed from the job"):
            one.context.peers._certified({"subjectAltName": (("DNS", "n3"),), "serialNumber": "0"})
        assert await asks(files_for(tmp_path / "new", "n3", authority))


async def test_a_node_that_was_cut_off_when_it_was_removed_ends_when_it_hears_of_it(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1", "n3") as (one, three):
        role = coordinate(one)
        role.record("node_removed", "n3", reason="removed by an operator")  # type: ignore[arg-type]
        plan = [{"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 1}]
        role.record("generation_started", None, members=plan, restarts=0)  # type: ignore[arg-type]
        # It has a coordinator of its own, of an older term, and asks the others for a newer one.
        one.context.ballot.follow(2, "n1")
        three.context.ballot.follow(1, "n3")
        three.context.ballot.name_successor("n1")
        async with running(three.member.link.keep()):
            await asyncio.wait_for(three.context.life.finished.wait(), 60)
        assert three.context.life.reason == "it was removed from the job"


def test_a_certificate_is_newer_than_the_newest_event_whatever_the_clock_says() -> None:
    authority = make_authority("job")
    later = time.time_ns() + 3600 * 10**9
    leaf = sign_with(authority.ca, authority.ca_key, "n3", later)
    assert issued_ns(leaf.cert) == later


def issued_ns(pem: str) -> int:
    return x509.load_pem_x509_certificate(pem.encode()).serial_number >> 64


async def test_a_step_of_a_group_that_has_ended_is_none_of_the_next(tmp_path: Path) -> None:
    """Heartbeats wait for the next tick: a group may end meanwhile, and the next one has not made a step."""
    async with job(tmp_path) as (_one, role):
        role.feed(inputs.Tick())
        role._beats.clear()
        role.beat("n2", BEAT)
        role.state = dataclasses.replace(role.state, generation=1, stepped=False)
        role._run(role._heartbeats(clocks.now()), clocks.now())
        assert not role.state.stepped
        role.beat("n2", {**BEAT, "facts": {**FACTS, "generation": 1}})
        role._run(role._heartbeats(clocks.now()), clocks.now())
        assert role.state.stepped


async def test_operators_are_counted_across_coordinators(tmp_path: Path) -> None:
    async with agents(tmp_path, "n1") as (one,):
        role = coordinate(one)
        for name in ("n2", "n3"):
            role.hear_join(name, introduction(name))
        role.request("n2", "operators", {"me@far": "watch"})
        role.request("n3", "operators", {"me@far": "watch", "you@far": "control"})
        role.request("n2", "operators", {})
        # The next coordinator knows from the journal that both nodes were there.
        role.feed(inputs.Tick())
        await one.member.role.close()
        one.member.role.take(2, "n2")
        second = one.member.role.coordinator
        assert second is not None
        # n2 was the coordinator and is gone; n3 has two operators still, one of whom leaves.
        second.hear_join("n3", {**introduction("n3"), "operators": {"me@far": "watch", "you@far": "control"}})
        second.request("n3", "operators", {"you@far": "control"})

        def detached() -> int:
            return [record["type"] for record in one.context.journal.records].count("operator_detached")

        await until(lambda: detached() == 1)
        second.request("n3", "operators", {})
        await until(lambda: detached() == 2)
        kinds = ("operator_attached", "operator_detached")
        seen = [
            (record["type"], record["detail"]["operator"])
            for record in one.context.journal.records
            if record["type"] in kinds
        ]
        assert seen == [
            ("operator_attached", "me@far"), ("operator_attached", "you@far"), ("operator_detached", "me@far"),
            ("operator_detached", "you@far"),
        ]  # fmt: skip
