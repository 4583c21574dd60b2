"""Who holds a group up, on made-up pulses; when it is told and when it is over, on the pure coordinator."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from remote_agent.coordinator import inputs, policy, replay
from remote_agent.coordinator.status import condition, document
from remote_agent.diagnose.evidence import JobContext
from remote_agent.diagnose.hang.loops import find_loops
from remote_agent.diagnose.hang.stalls import Stall, find_stall, is_suspect, stall_incident
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.engine.inspect.pulse import read_flight
from remote_agent.wire.documents import IncidentDocument
from remote_agent.wire.gate import reader
from supervisor.inventory import Inventory, JobDefaults
from supervisor.session import Session
from tests.fast.cases import DATA
from tests.fast.test_flight import call, done
from tests.fast.waiting import some
from tests.fast.world import World, spec

IDLE: Any = {
    "t": 0.0, "state": "S", "cpu_s": 0.0, "io": 0, "net": 0, "deaf": False, "stack": "a", "where": "train.py:9 in load",
    "calls": "", "script": [], "parked": False, "inside": None, "groups": {}, "ended": None, "children": [],
    "ras": [], "unanswered": [], "reached": [], "addresses": [], "sleeps": 0, "step": None,
}  # fmt: skip
ENDED: Any = {
    "part": "a thread", "type": "KeyError", "headline": "KeyError: 'x'", "place": "train.py:7 feed",
    "traceback": "Traceback …", "line": 12, "age_s": 60.0,
}  # fmt: skip


def group(last: int, waits: bool = True, op: str = "all_reduce", age_s: float = 40.0) -> Any:
    """A flight record's word on one group: `last` is the newest collective, which is not done if it waits."""
    found: Any = {"ranks": None, "last": last}
    if waits:
        found.update(seq=last, op=op, sizes="[[4]]", age_s=age_s, timeout_s=600.0, backend="gloo")
    return found


def but(pulse: Any, **changes: Any) -> Any:
    """Return a pulse with other values in these fields."""
    return {**pulse, **changes}


def waiting(seq: int = 5, name: str = "0", **more: Any) -> Any:
    return {**IDLE, "groups": {name: group(seq, **more)}}


def came(seq: int, **more: Any) -> Any:
    return {**IDLE, "groups": {"0": group(seq, waits=False)}, **more}


def stall(*pulses: Any, left: frozenset[int] = frozenset(), **later: Any) -> Stall | None:
    """Judge ranks 0, 1, … of these pulses, ten seconds apart; `later`: what changes by then, by `rN`."""
    before = {rank: pulse for rank, pulse in enumerate(pulses) if rank not in left}
    now = {rank: but(pulse, **{"t": 10.0, **later.get(f"r{rank}", {})}) for rank, pulse in before.items()}
    return find_stall(before, now, left)


def stalled(*pulses: Any, **later: Any) -> Stall:
    """Judge ranks that a stall is seen in."""
    return some(stall(*pulses, **later))


def pulse(word: str) -> Any:
    """Read `wait:5,state="T"` or `came:4+wait:2:7`."""
    head, *fields = re.split(r",(?=\w+=)", word)
    groups = {}
    for each in head.split("+"):
        kind, *numbers = each.split(":")
        if kind != "idle":
            last, name, age_s = [*numbers, "0", "40"][:3] if len(numbers) < 2 else [*numbers, "40"][:3]
            groups[name] = group(int(last), waits=kind == "wait", age_s=float(age_s))
    return {**IDLE, "groups": groups, **changes(fields)}


def changes(fields: list[str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in (field.split("=") for field in fields)}


STALLS = [line.split(" -> ") for line in (DATA / "stalls.txt").read_text().splitlines() if " -> " in line]


@pytest.mark.parametrize(("seen", "outcome"), STALLS)
def test_who_holds_a_group_up(seen: str, outcome: str) -> None:
    ranks, _, rest = seen.partition(" / ")
    words = rest.split()
    later: dict[str, Any] = {}
    for name, what in zip(words[::2], words[1::2], strict=True):
        if name == "left":
            later["left"] = frozenset({int(what)})
        else:
            later[name] = {"groups": pulse(what)["groups"]} if ":" in what else changes(re.split(r",(?=\w+=)", what))
    found = stall(*map(pulse, ranks.split()), **later)
    missing = [f"{rank}:{why}" for rank, why in found.missing.items()] if found else []
    assert (" ".join([found.kind, *missing]) if found else "none") == outcome


def test_a_missing_rank_has_a_place_and_the_wait_its_collective() -> None:
    found = stalled(waiting(5), came(4), waiting(5))
    assert found.where == {1: "train.py:9 in load"}
    assert (found.first.op, found.first.seq, found.first.timeout_s) == ("all_reduce", 5, 600.0)
    backward = {**IDLE, "inside": "backward"}
    assert stalled(backward, IDLE, backward).first.op == "backward"
    odd = stalled(waiting(5), waiting(5, op="broadcast"), waiting(5))
    assert (odd.kind, sorted(odd.missing)) == ("mismatch", [1])


def test_an_incident_has_who_waits_where_and_the_lines_at_which_the_missing_are() -> None:
    code = {"first": 8, "text": "def load():\n    ready.wait()"}
    found = stalled(waiting(5), came(4), waiting(5, "7"), waiting(5), r1={"source": code}, r0={"source": {}})
    reported: Any = stall_incident(found, JobContext(world_size=4))
    assert reader(IncidentDocument)(reported)["missing"] == reported["missing"]
    assert reported["missing"]["calls"] == [
        {"collective": "all_reduce", "seq": 5, "group": "0", "ranks": [0, 3]},
        {"collective": "all_reduce", "seq": 5, "group": "7", "ranks": [2]},
    ]
    assert reported["missing"]["sources"] == {"train.py:9 in load": code}


STORE, PORT = "10.0.0.1:4000", "10.0.0.1:5000"


def dialling(*ends: str, number: int, reached: tuple[str, ...] = ()) -> Any:
    """A rank of node `number` that waits in init_process_group and dials these in vain."""
    own = ["127.0.0.1", f"10.0.0.{number}", "172.17.0.1"]
    init = {**IDLE, "inside": "init_process_group", "unanswered": list(ends), "reached": list(reached)}
    return {**init, "addresses": own}


@pytest.mark.parametrize(
    ("pulses", "ranks", "node", "says"),
    [
        # n3 has reached what n2 has not.
        (
            [dialling(number=1), dialling(STORE, number=2), dialling(number=3, reached=(STORE,))], [], "n2",
            ("rank 1 (n2): no answer from 10.0.0.1:4000 (n1): packets dropped by a firewall or route on n2; "
            "ranks 0,2 waiting in init_process_group"),
        ),
        # Nobody has reached n1.
        (
            [dialling(number=1), dialling(STORE, PORT, number=2), dialling(PORT, number=3)], [], "n1",
            "ranks 1-2 (n2, n3): no answer from 10.0.0.1:4000 (n1), 10.0.0.1:5000 (n1): packets",
        ),
        # Of two nodes it may be either; and nobody knows whose 172.17.0.1 is.
        ([dialling(number=1), dialling(STORE, number=2)], [], None, "a firewall or route on n1 or n2, or between them"),
        ([dialling(number=1), dialling("172.17.0.1:1", number=2)], [], "n2", "no answer from 172.17.0.1:1: "),
        # A wrong MASTER_ADDR.
        (
            [dialling(number=1, reached=(STORE,)), dialling("10.255.255.1:4000", number=2)], [1], "n2",
            "no answer from 10.255.255.1:4000: no node of the job has this address; rank 0 waiting in",
        ),
        (
            [dialling(number=1, reached=(STORE,)), dialling("[fd00::1]:4000", number=2)], [1], "n2",
            "no answer from [fd00::1]:4000: ",
        ),
    ],
)  # fmt: skip
def test_the_node_that_drops_packets_is_named(pulses: list[Any], ranks: list[int], node: str | None, says: str) -> None:
    found = stalled(*pulses)
    context = JobContext(ranks_per_node={f"n{rank + 1}": [rank] for rank in range(len(pulses))})
    incident = stall_incident(found, context)
    assert (incident["category"], incident["culprit_ranks"], incident["culprit_node"]) == (
        "rendezvous_timeout",
        ranks,
        node,
    )
    assert says in incident["summary"]
    assert incident["missing"] is not None
    assert incident["missing"]["missing"] == ranks
    assert "SYN" in incident["evidence"][0]["text"]


def test_a_connection_that_is_answered_later_or_leaves_the_job_is_no_stall() -> None:
    elsewhere = stalled(dialling(number=1, reached=(STORE, "9.9.9.9:443")), dialling("9.9.9.8:443", number=2))
    assert elsewhere.kind == "network"
    both = [dialling(number=1), dialling(STORE, number=2)]
    found = stalled(*both, r1={"unanswered": [PORT]})
    assert found.kind == "network"
    # NCCL connects in the first collective.
    inside = {**waiting(1), **{key: both[1][key] for key in ("unanswered", "addresses")}}
    found = stalled({**waiting(1), "addresses": ["10.0.0.1"]}, inside)
    assert stall_incident(found, JobContext())["category"] == "nccl_network"


def test_a_loop_with_the_same_stack_in_each_pulse_is_not_looked_at() -> None:
    assert not is_suspect({1: came(4, stack="sleep")}, {1: came(24, stack="sleep", t=10.0)})


def test_a_rank_whose_thread_failed_is_the_cause() -> None:
    children = [{"count": 2, "name": "pt_data_worker", "doing": "sleeps in pipe_read", "where": "data.py:3 in get"}]
    found = stalled(waiting(5), came(4, ended=ENDED, children=children), came(4), waiting(5))
    incident = stall_incident(found, JobContext(ranks_per_node={"n1": [0, 1], "n2": [2, 3]}))
    assert (incident["category"], incident["culprit_ranks"], incident["culprit_node"]) == ("user_exception", [1], "n1")
    assert incident["missing"] is not None
    assert incident["missing"]["missing"] == [1, 2]
    assert "a thread failed with KeyError: 'x' in train.py:7 feed; the main thread waiting at" in incident["summary"]
    assert incident["traceback"] == "Traceback …"
    lines = [(line["file"], line["line"], line["text"]) for line in incident["evidence"]]
    assert lines[0] == ("generation_0/rank_1/stderr.log", 12, "KeyError: 'x'")
    assert lines[-1][2] == "2 x child process pt_data_worker sleeps in pipe_read at data.py:3 in get"
    late = stalled(waiting(5), came(4, ended={**ENDED, "age_s": 3600.0}), waiting(5))
    assert (dict(late.missing), dict(late.failures)) == ({1: "idle"}, {})


@pytest.mark.parametrize(("line", "file"), [(12, "stderr.log"), (None, "error.json")])
def test_a_script_that_is_over_while_a_thread_keeps_its_process(line: int | None, file: str) -> None:
    over = {**ENDED, "part": "the script", "line": line, "age_s": 86400.0}
    found = stalled(waiting(5), came(4, ended=over, where="threading.py:9 in _shutdown"), waiting(5))
    reported = stall_incident(found, JobContext(world_size=3))
    assert (reported["category"], reported["traceback"], reported["evidence"][0]["line"]) == (
        "user_exception",
        "Traceback …",
        line,
    )
    assert (
        "rank 1: the script failed with KeyError: 'x' in train.py:7 feed; Python waiting for its" in reported["summary"]
    )
    assert ("daemon" in reported["hint"], reported["evidence"][0]["file"]) == (True, f"generation_0/rank_1/{file}")


def test_the_evidence_of_many_ranks_is_bounded() -> None:
    children = [{"count": 1, "name": "x", "doing": "sleeps", "where": ""}]
    found = stalled(waiting(5), *(came(4, ended=ENDED, children=children) for _ in range(500)))
    incident = stall_incident(found, JobContext())
    assert (len(incident["culprit_ranks"]), len(incident["evidence"])) == (500, 36)


def test_all_wait_for_threads_that_ended() -> None:
    orphaned = came(5, ended=ENDED, parked=True)
    found = stalled(orphaned, orphaned, came(5))
    assert (dict(found.waits), sorted(found.missing)) == ({}, [0, 1])
    incident = stall_incident(found, JobContext(ranks_per_node={"n1": [0, 1, 2]}))
    assert (incident["category"], incident["culprit_ranks"], incident["victims"]) == ("user_exception", [0, 1], [])
    assert stall(orphaned, came(5), r1={"cpu_s": 5.0}) is None
    assert stall(came(5, ended=ENDED), came(5)) is None


def recorded(*entries: Any, where: str = "train.py:9 in step") -> Any:
    """A pulse with what a rank's flight record has, after the JSON of the wire."""
    record: Any = {"entries": [{**entry, "frames": None} for entry in entries]}
    groups = read_flight(record, call(1)["time_created_ns"])
    return {**IDLE, "where": where, "inside": "all_reduce", "groups": json.loads(json.dumps(groups))}


def test_a_live_mismatch_is_read_as_its_flight_records_are() -> None:
    usual = recorded(done(1), call(2, "all_reduce", 4))
    found = stalled(usual, recorded(done(1), call(2, "all_reduce", 5), where="train.py:7 in f"), usual)
    incident = stall_incident(found, JobContext(world_size=3))
    assert (incident["category"], incident["culprit_ranks"]) == ("collective_desync", [1])
    assert incident["summary"] == (
        "rank 1: called all_reduce 2 with 5 elements [5] at train.py:7 in f, ranks 0,2 with 4 [4] at train.py:9 in step"
    )
    assert incident["evidence"][1]["text"] == "all_reduce 2 [5] Float, not ended at train.py:7 in f"
    # Another call long before leads to the wait; of two ranks neither is known to be right.
    other = recorded(done(1, "b"), done(2, "a"), call(3, "b"))
    found = stalled(recorded(done(1, "a"), done(2, "b"), call(3)), other)
    assert (found.kind, dict(found.missing)) == ("mismatch", {})
    assert (
        stall_incident(found, JobContext())["summary"] == "rank 0 called a [4] before b [4], rank 1 in the other order"
    )


def test_stacks_are_asked_for_on_suspicion_alone() -> None:
    works = {"t": 10.0, "cpu_s": 9.0}
    assert not is_suspect({0: IDLE, 1: IDLE}, {0: but(IDLE, **works), 1: but(IDLE, t=10.0)})
    assert is_suspect({0: IDLE, 1: IDLE}, {0: but(IDLE, t=10.0), 1: but(IDLE, t=10.0)})
    assert is_suspect({0: waiting(5), 1: came(4)}, {0: but(waiting(5), **works), 1: but(came(4), **works)})


class Watched(World):
    """A world whose nodes answer what their ranks are doing."""

    def __init__(self, nproc: int = 1, **changes: Any) -> None:
        super().__init__(spec(2, nproc=nproc, **changes))
        self.pulses = {"n1": waiting(5, age_s=0.0), "n2": came(4)}
        self.asked = 0

    def answer(self, name: str) -> dict[int, Any]:
        """What the ranks of a node are doing now."""
        return {0 if name == "n1" else 1: {**self.pulses[name], "t": self.now}}

    def live(self, seconds: float) -> None:
        """Let time pass; every order for a pulse is answered at once."""
        until = self.now + seconds
        while self.now < until:
            self.pass_time(1.0)
            for name, orders in self.orders.items():
                for order in [order for order in orders if order.op == "pulse"]:
                    orders.remove(order)
                    self.asked += 1
                    self.feed(inputs.Pulses(name, int(order.args["generation"]), self.answer(name)))
            self.settle()

    def reported(self, kind: str) -> list[Any]:
        return [dict(event.detail) for event in self.events if event.type == kind]


def looping(world: Watched, *lines: int, helper: bool = False) -> None:
    """Rank 1 computes in spin, for ten seconds at each of these lines."""
    calls = [["train.py", 7, "one"]] if helper else []
    for line in lines:
        script = [["train.py", 60, "<module>"], ["train.py", line, "spin"], *calls]
        for _ in range(10):
            world.pulses["n2"] = came(4, state="R", cpu_s=world.now, stack=f"spin {line}", script=script)
            world.live(1)


def test_a_rank_busy_in_one_function_is_named() -> None:
    world = Watched(hang_after=30.0)
    looping(world, 41, 42, 42)
    assert world.reported("warning") == []
    looping(world, 43)
    looping(world, 42, 42, 42, helper=True)
    (warning,) = world.reported("warning")
    assert warning["kind"] == "busy"
    seconds = warning["message"].split()[2]
    assert 30 <= int(seconds) < 50
    assert warning["message"] == f"busy for {seconds} s at train.py:41-43 in spin; rank 0 waiting in all_reduce 5"
    assert world.reported("incident") == []
    # What torch calls a timeout later has its cause.
    world.fail(0, "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")
    world.settle()
    (incident,) = world.reported("incident")
    assert (incident["culprit_ranks"], incident["missing"]["waiting"]) == ([1], [0])
    assert "never reached all_reduce number 5, last seen at train.py:41-43 in spin, busy for " in incident["summary"]


@pytest.mark.parametrize(
    "does",
    [{"state": "S"}, {"io": 10_000_000}, {"step": [7, None]}, {"script": []}, {"script": [["other.py", 1, "main"]]}],
    ids=["sleeps", "writes", "steps", "in a library", "elsewhere"],
)
def test_who_does_something_else_meanwhile_is_in_no_loop(does: Any) -> None:
    busy: Any = {"state": "R", "script": [["train.py", 60, "<module>"]]}
    rounds = [{0: waiting(5, age_s=99.0), 1: came(4, **busy)}]
    for number in (1, 2):
        spent = {"t": 10.0 * number, "cpu_s": 9.0 * number}
        rounds.append({rank: {**rounds[0][rank], **spent} for rank in (0, 1)})
    loops = find_loops(rounds[0], rounds[1], frozenset(), {})
    assert (loops[1].seconds, loops[1].place) == (10.0, "train.py:60 in <module>")
    assert find_loops(rounds[1], rounds[2], frozenset(), loops)[1].seconds == 20.0
    assert find_loops(rounds[1], {**rounds[2], 1: but(rounds[2][1], **does)}, frozenset(), loops) == {}


def test_a_round_that_is_not_complete_is_not_judged() -> None:
    world = Watched()
    for _ in range(100):
        world.pass_time(1.0)
        for orders in world.orders.values():
            orders.clear()
        if world.state.watch.asked:
            world.feed(inputs.Pulses("n1", 0, {0: but(waiting(5), t=world.now)}))
    assert world.reported("incident") == []


# What a job is doing, in one word, at every point of its life; and what becomes of its incidents.


def incident_of(world: World) -> Any:
    return document(world.state, {}, "n1")["incident"]


def doing(world: World) -> str:
    return str(document(world.state, {}, "n1")["condition"])


def trains(world: World) -> None:
    """The ranks print steps."""
    world.feed(inputs.Heartbeat("n1", stepped=True, moved=True))


def test_a_slow_stop_has_its_incident_at_once() -> None:
    world = World(spec(2))
    trains(world)
    world.fail(3, "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
    world.deliver("report", "n2")
    # Its SIGTERM handler takes its time: no order to stop is carried out here.
    world.pass_time(0.25)
    assert "incident" not in world.types(), "most groups have stopped by then"
    world.pass_time(2)
    assert world.types().count("incident") == 1
    first = incident_of(world)
    assert (first["id"], first["state"], first["preliminary"], first["confidence"]) == (1, "open", True, "unknown")
    assert "Connection closed by peer" in first["summary"]
    world.fail(0, "KeyError: 'labels'")
    world.deliver("report", "n1")
    world.pass_time(2)
    cause = incident_of(world)
    assert (cause["id"], cause["culprit_ranks"], cause["preliminary"]) == (1, [0], True)
    assert (cause["exit"]["code"], incidents_in(world.records())) == (1, [cause])
    world.settle()
    [verdict] = incidents_in(world.records())
    assert world.types().count("incident") == 3
    assert (verdict["id"], verdict["culprit_ranks"], verdict["victims"][0]["ranks"]) == (1, [0], [3])
    assert "preliminary" not in verdict
    replayed = replay.fold(world.state.spec, world.records())
    assert (replayed.incidents, replayed.incident, world.state.incident) == (1, verdict, verdict)


def test_a_preliminary_incident_ends_with_its_group() -> None:
    world = World(spec(2))
    world.fail(0, "KeyError: 'labels'")
    world.deliver("report", "n1")
    world.pass_time(1)
    world.feed(inputs.Stop())
    world.settle()
    [incident] = incidents_in(world.records())
    assert (incident["culprit_ranks"], incident["state"], "preliminary" in incident) == ([0], "over", False)
    # The next coordinator begins with another number.
    assert replay.take_over(world.state.spec, "n2", 2, world.records(), 0.0).preliminary is None


def test_who_follows_a_journal_knows_what_became_of_an_incident() -> None:
    """A screen that had the hang on it must not need to ask again when it is over."""
    world = Watched()
    world.live(60)
    session = Session(Inventory(None, (), JobDefaults(Path())), "any")
    records: Any = world.records()
    for event in records:
        session.add_event(event)
    assert [(each["state"], each["ongoing"]) for each in session.incidents] == [("open", True)]
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(6)}
    world.live(20)
    records = world.records()
    for event in records:
        session.add_event(event)
    assert [(each["state"], each["ongoing"]) for each in session.incidents] == [("healed", False)]


def test_the_journal_gives_back_condition_and_incident() -> None:
    world = Watched()
    world.live(60)
    for change in (None, inputs.Restart("me"), inputs.Stop()):
        if change is not None:
            world.feed(change)
        world.settle()
        read = replay.fold(world.state.spec, world.records())
        kept = {"ended_at"}
        live = {key: value for key, value in (world.state.incident or {}).items() if key not in kept}
        assert {key: value for key, value in (read.incident or {}).items() if key not in kept} == live
        expected = {"importing": "running"}.get(condition(world.state), condition(world.state))
        assert condition(read) == expected


def test_a_verdict_takes_its_time_and_the_coordinator_goes_on() -> None:
    """What comes while the verdict is made counts; a verdict that is not wanted any more changes nothing."""
    world = World(spec(2))
    world.judges = False
    world.fail(0, "KeyError: 'labels'")
    world.deliver("report", "n1")
    world.pass_time(1)
    world.settle()
    # Two were ordered: one while the group was stopping, and the final one, which does not wait for it.
    early, final = map(policy.judged, world.verdicts)
    assert "generation_stopped" not in world.types(), "what follows depends on the verdict"
    world.pass_time(60)
    assert len(world.verdicts) == 2, "it is ordered once"
    for late in (early, dataclasses.replace(final, generation=7)):
        world.feed(late)
    assert "incident" not in world.types()
    world.feed(final)
    world.settle()
    assert world.state.generation == 1
    assert [one["culprit_ranks"] for one in incidents_in(world.records())] == [[0]]
    world.fail(1, "KeyError: 'labels'")
    world.settle()
    world.feed(inputs.Stop())
    assert world.types()[-2:] == ["generation_stopped", "job_stopped"], "an end does not wait for it"
    before = world.state
    world.feed(policy.judged(world.verdicts[-1]))
    assert world.state == before
