"""Who holds a group up, on made-up pulses; when it is told and when it is over, on the pure coordinator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remote_agent.coordinator import inputs
from remote_agent.coordinator import state as s
from remote_agent.diagnose.evidence import JobContext
from remote_agent.diagnose.hang.loops import find_loops
from remote_agent.diagnose.hang.stalls import Stall, find_stall, is_suspect, stall_incident
from remote_agent.engine.inspect.pulse import read_flight
from remote_agent.wire.documents import read_incident
from tests.fast.test_flight import call, done
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


def waiting(seq: int = 5, name: str = "0", **more: Any) -> Any:
    return {**IDLE, "groups": {name: group(seq, **more)}}


def came(seq: int, **more: Any) -> Any:
    return {**IDLE, "groups": {"0": group(seq, waits=False)}, **more}


def stall(*pulses: Any, left: frozenset[int] = frozenset(), **later: Any) -> Stall | None:
    """Judge ranks 0, 1, … of these pulses, ten seconds apart; `later`: what changes by then, by `rN`."""
    before = {rank: pulse for rank, pulse in enumerate(pulses) if rank not in left}
    now = {rank: {**pulse, "t": 10.0, **later.get(f"r{rank}", {})} for rank, pulse in before.items()}
    return find_stall(before, now, left)


def test_an_idle_rank_that_others_wait_for() -> None:
    found = stall(waiting(5), came(4), waiting(5))
    assert found is not None
    assert (found.kind, dict(found.missing), found.where) == ("missing", {1: "idle"}, {1: "train.py:9 in load"})
    assert (found.first.op, found.first.seq, found.first.timeout_s) == ("all_reduce", 5, 600.0)


def test_an_incident_has_who_waits_where_and_the_lines_at_which_the_missing_are() -> None:
    code = {"first": 8, "text": "def load():\n    ready.wait()"}
    found = stall(waiting(5), came(4), waiting(5, "7"), waiting(5), r1={"source": code}, r0={"source": {}})
    assert found is not None
    reported: Any = stall_incident(found, JobContext(world_size=4)).to_json()
    assert read_incident(reported)["missing"] == reported["missing"]
    assert reported["missing"]["calls"] == [
        {"collective": "all_reduce", "seq": 5, "group": "0", "ranks": [0, 3]},
        {"collective": "all_reduce", "seq": 5, "group": "7", "ranks": [2]},
    ]
    assert reported["missing"]["sources"] == {"train.py:9 in load": code}


def test_reports_of_nccl_ras_are_in_the_evidence_once() -> None:
    said = ["#0-0 (fa93) MISMATCH: 3 ranks have launched up to operation 640"]
    found = stall(waiting(5), came(4), waiting(5), r0={"ras": said}, r2={"ras": said})
    assert found is not None
    reported = [line.text for line in stall_incident(found, JobContext(world_size=3)).evidence]
    assert [text for text in reported if "RAS" in text] == [f"NCCL RAS: {said[0]}"]


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
            [dialling(number=1), dialling(STORE, number=2), dialling(number=3, reached=(STORE,))], (), "n2",
            ("rank 1 (n2): no answer from 10.0.0.1:4000 (n1): packets dropped by a firewall or route on n2; "
            "ranks 0,2 waiting in init_process_group"),
        ),
        # Nobody has reached n1.
        (
            [dialling(number=1), dialling(STORE, PORT, number=2), dialling(PORT, number=3)], (), "n1",
            "ranks 1-2 (n2, n3): no answer from 10.0.0.1:4000 (n1), 10.0.0.1:5000 (n1): packets",
        ),
        # Of two nodes it may be either; and nobody knows whose 172.17.0.1 is.
        ([dialling(number=1), dialling(STORE, number=2)], (), None, "a firewall or route on n1 or n2, or between them"),
        ([dialling(number=1), dialling("172.17.0.1:1", number=2)], (), "n2", "no answer from 172.17.0.1:1: "),
        # A wrong MASTER_ADDR.
        (
            [dialling(number=1, reached=(STORE,)), dialling("10.255.255.1:4000", number=2)], (1,), "n2",
            "no answer from 10.255.255.1:4000: no node of the job has this address; rank 0 waiting in",
        ),
        (
            [dialling(number=1, reached=(STORE,)), dialling("[fd00::1]:4000", number=2)], (1,), "n2",
            "no answer from [fd00::1]:4000: ",
        ),
    ],
)  # fmt: skip
def test_a_port_that_does_not_answer_names_the_node_that_drops_it(
    pulses: list[Any], ranks: tuple[int, ...], node: str | None, says: str
) -> None:
    found = stall(*pulses)
    assert found is not None
    context = JobContext(ranks_per_node={f"n{rank + 1}": [rank] for rank in range(len(pulses))})
    incident = stall_incident(found, context)
    assert (incident.category, incident.culprit_ranks, incident.culprit_node) == ("rendezvous_timeout", ranks, node)
    assert says in incident.summary
    assert incident.missing is not None
    assert incident.missing["missing"] == list(ranks)
    assert "SYN" in incident.evidence[0].text


def test_a_connection_that_is_answered_later_or_leaves_the_job_is_no_stall() -> None:
    elsewhere = stall(dialling(number=1, reached=(STORE, "9.9.9.9:443")), dialling("9.9.9.8:443", number=2))
    assert elsewhere is not None
    assert elsewhere.kind == "network"
    both = [dialling(number=1), dialling(STORE, number=2)]
    found = stall(*both, r1={"unanswered": [PORT]})
    assert found is not None
    assert found.kind == "network"
    # NCCL connects in the first collective.
    inside = {**waiting(1), **{key: both[1][key] for key in ("unanswered", "addresses")}}
    found = stall({**waiting(1), "addresses": ["10.0.0.1"]}, inside)
    assert found is not None
    assert stall_incident(found, JobContext()).category == "nccl_network"


@pytest.mark.parametrize(
    "does",
    [
        {"cpu_s": 2.0},
        {"io": 10_000_000},
        {"net": 10_000_000},
        {"net": 50_000},
        {"step": [7, None]},
        {"stack": "b"},
        {"state": "D"},
        {"deaf": True, "stack": ""},
        {"stack": ""},
    ],
    ids=["computes", "writes", "sends", "asks", "steps", "moves", "in the kernel", "deaf once", "no stack"],
)
def test_a_busy_rank_is_no_stall(does: Any) -> None:
    assert stall(waiting(5), came(4), waiting(5), r1=does) is None


def test_a_loop_with_the_same_stack_in_each_pulse_makes_progress() -> None:
    slow = {"stack": "sleep", "where": "train.py:8 in <module>"}
    held = {**waiting(5), "stack": "all_reduce", "inside": "all_reduce"}
    assert stall(held, came(4, **slow), r0={"groups": {"0": group(25)}}, r1={"groups": {"0": group(24, False)}}) is None
    assert not is_suspect({1: came(4, **slow)}, {1: {**came(24, **slow), "t": 10.0}})
    found = stall({**held, "groups": {}}, {**came(4, **slow), "groups": {}})
    assert found is not None
    assert dict(found.missing) == {1: "idle"}


INSIDE: Any = {**IDLE, "stack": "all_reduce", "inside": "all_reduce"}


@pytest.mark.parametrize(
    ("rank", "does"),
    [("r0", {"sleeps": 6}), ("r2", {"step": [7, None]}), ("r0", {"stack": "b"})],
    ids=["wakes", "any makes steps", "moves"],
)
def test_without_a_flight_record_progress_is_no_hang(rank: str, does: Any) -> None:
    slow = {**IDLE, "where": "train.py:8 in <module>"}
    later: Any = {rank: does}
    assert stall(INSIDE, slow) is not None
    assert stall(INSIDE, slow, {**IDLE, "stack": ""}, r0={"sleeps": 5}) is not None
    assert stall(INSIDE, slow, {**IDLE, "stack": ""}, **later) is None
    # Of what is recorded nobody needs to guess.
    assert stall(waiting(5), came(4), came(5), **later) is not None


def test_new_groups_are_progress() -> None:
    loops = {"groups": {"0": group(4, False), "8": group(1, False)}}
    assert stall(waiting(5), came(4), r1=loops) is None
    assert stall(waiting(5), came(4), r1={"groups": {"0": group(2, False)}}) is None
    # A record that was not told once says nothing.
    assert stall(waiting(5), {**came(4), "groups": {}}, r1={"groups": {"0": group(4, False)}}) is not None


def test_an_idle_rank_may_wait_for_a_busy_missing_one() -> None:
    assert stall(waiting(5), came(4), came(4), r2={"cpu_s": 9.0}) is None
    assert stall(waiting(5), came(4), came(4), r2={"stack": "b"}) is None
    ways: list[Any] = [{"state": "T"}, {"deaf": True, "stack": ""}]
    for sure in ways:
        found = stall(waiting(5), came(4, **sure), came(4), r2={"cpu_s": 9.0})
        assert found is not None
        assert list(found.missing) == [1]
    # A pair waits for the one alone.
    pair = {name: group(1, False) for name in ("0", "7")}
    found = stall({**IDLE, "groups": {**pair, "7": group(2)}}, {**IDLE, "groups": pair}, came(1), r2={"cpu_s": 9.0})
    assert found is not None
    assert list(found.missing) == [1]


@pytest.mark.parametrize(
    "ranks",
    [
        (waiting(5), waiting(5)),
        (waiting(6), waiting(6), waiting(5)),
        (waiting(5), waiting(5), waiting(2, "7"), waiting(2, "7")),
    ],
    ids=["all", "the last one", "two groups"],
)
def test_a_slow_transfer_is_no_stall(ranks: tuple[Any, ...]) -> None:
    later: Any = {f"r{len(ranks) - 1}": {"net": 1_000_000}}
    assert stall(*ranks) is not None
    assert stall(*ranks, **later) is None
    # Where nobody has looked closely yet, it may be so.
    assert stall(*ranks[:-1], {**ranks[-1], "stack": "", "net": None}) is None


def test_setting_the_clock_makes_no_wait_older() -> None:
    found = stall(waiting(5), came(4), r0={"groups": {"0": group(5, age_s=7200.0)}})
    assert found is not None
    assert found.first.age_s == 50.0


def test_nobody_waits_and_nothing_is_wrong() -> None:
    assert stall(came(5), came(5), came(5)) is None
    assert stall(waiting(5), came(4), r0={"groups": {"0": group(6)}}) is None
    assert find_stall({}, {0: waiting(5)}, frozenset()) is None


def test_a_rank_whose_thread_failed_is_the_cause() -> None:
    children = [{"count": 2, "name": "pt_data_worker", "doing": "sleeps in pipe_read", "where": "data.py:3 in get"}]
    found = stall(waiting(5), came(4, ended=ENDED, children=children), came(4), waiting(5))
    assert found is not None
    incident = stall_incident(found, JobContext(ranks_per_node={"n1": [0, 1], "n2": [2, 3]}))
    assert (incident.category, incident.culprit_ranks, incident.culprit_node) == ("user_exception", (1,), "n1")
    assert incident.missing is not None
    assert incident.missing["missing"] == [1, 2]
    assert "a thread failed with KeyError: 'x' in train.py:7 feed; the main thread waiting at" in incident.summary
    assert incident.traceback == "Traceback …"
    lines = [(line.file, line.line, line.text) for line in incident.evidence]
    assert lines[0] == ("generation_0/rank_1/stderr.log", 12, "KeyError: 'x'")
    assert lines[-1][2] == "2 x child process pt_data_worker sleeps in pipe_read at data.py:3 in get"
    late = stall(waiting(5), came(4, ended={**ENDED, "age_s": 3600.0}), waiting(5))
    assert late is not None
    assert (dict(late.missing), dict(late.failures)) == ({1: "idle"}, {})


@pytest.mark.parametrize(("line", "file"), [(12, "stderr.log"), (None, "error.json")])
def test_a_script_that_is_over_while_a_thread_keeps_its_process(line: int | None, file: str) -> None:
    over = {**ENDED, "part": "the script", "line": line, "age_s": 86400.0}
    found = stall(waiting(5), came(4, ended=over, where="threading.py:9 in _shutdown"), waiting(5))
    assert found is not None
    reported = stall_incident(found, JobContext(world_size=3))
    assert (reported.category, reported.traceback, reported.evidence[0].line) == ("user_exception", "Traceback …", line)
    assert "rank 1: the script failed with KeyError: 'x' in train.py:7 feed; Python waiting for its" in reported.summary
    assert ("daemon" in reported.hint, reported.evidence[0].file) == (True, f"generation_0/rank_1/{file}")


def test_the_evidence_of_many_ranks_is_bounded() -> None:
    children = [{"count": 1, "name": "x", "doing": "sleeps", "where": ""}]
    found = stall(waiting(5), *(came(4, ended=ENDED, children=children) for _ in range(500)))
    assert found is not None
    incident = stall_incident(found, JobContext())
    assert (len(incident.culprit_ranks), len(incident.evidence)) == (500, 36)


def test_all_wait_for_threads_that_ended() -> None:
    orphaned = came(5, ended=ENDED, parked=True)
    found = stall(orphaned, orphaned, came(5))
    assert found is not None
    assert (dict(found.waits), sorted(found.missing)) == ({}, [0, 1])
    incident = stall_incident(found, JobContext(ranks_per_node={"n1": [0, 1, 2]}))
    assert (incident.category, incident.culprit_ranks, incident.victims) == ("user_exception", (0, 1), ())
    assert stall(orphaned, came(5), r1={"cpu_s": 5.0}) is None
    assert stall(came(5, ended=ENDED), came(5)) is None


def test_stopped_unresponsive_and_exited() -> None:
    stopped = stall(waiting(5), came(4, state="T"))
    deaf = stall(waiting(5), came(4, deaf=True, cpu_s=0.0), r1={"cpu_s": 10.0})
    gone = stall(waiting(5), waiting(5), came(4), left=frozenset({2}))
    found = [dict(one.missing) for one in (stopped, deaf, gone) if one is not None]
    assert found == [{1: "stopped"}, {1: "unresponsive"}, {2: "exited"}]
    # What limits its processor time stops it most of the time, and it gets on.
    assert stall(waiting(5), came(4, state="T"), r1={"cpu_s": 1.0}) is None


def test_a_rank_that_waits_for_another_is_a_victim_itself() -> None:
    # 0 waits for 1 in the world's group; 1 waits for 2 in a pair's.
    middle = {**IDLE, "groups": {"0": group(4, waits=False), "7": group(2)}}
    last = {**IDLE, "groups": {"0": group(5), "7": group(1, waits=False)}}
    first = waiting(5)
    found = stall(first, middle, {**last, "groups": {"0": group(4, waits=False), "7": group(1, waits=False)}})
    assert found is not None
    assert dict(found.missing) == {2: "idle"}


def test_a_rank_alone_in_an_older_collective_is_behind() -> None:
    found = stall(waiting(6), waiting(6), waiting(5))
    assert found is not None
    assert dict(found.missing) == {2: "behind"}


def test_all_ranks_reached_a_collective_that_does_not_finish() -> None:
    found = stall(waiting(5), waiting(5))
    assert found is not None
    assert (found.kind, dict(found.missing)) == ("network", {})


def test_different_collectives_under_the_same_number() -> None:
    found = stall(waiting(5), waiting(5, op="broadcast"), waiting(5))
    assert found is not None
    assert (found.kind, sorted(found.missing)) == ("mismatch", [1])
    even = stall(waiting(5), waiting(5, op="broadcast"))
    assert even is not None
    assert (even.kind, dict(even.missing)) == ("mismatch", {})


def recorded(*entries: Any, where: str = "train.py:9 in step") -> Any:
    """A pulse with what a rank's flight record has, after the JSON of the wire."""
    groups = read_flight({"entries": [{**entry, "frames": None} for entry in entries]}, call(1)["time_created_ns"])
    return {**IDLE, "where": where, "inside": "all_reduce", "groups": json.loads(json.dumps(groups))}


def test_a_live_mismatch_is_read_as_its_flight_records_are() -> None:
    usual = recorded(done(1), call(2, "all_reduce", 4))
    found = stall(usual, recorded(done(1), call(2, "all_reduce", 5), where="train.py:7 in f"), usual)
    assert found is not None
    incident = stall_incident(found, JobContext(world_size=3))
    assert (incident.category, incident.culprit_ranks) == ("collective_desync", (1,))
    assert incident.summary == (
        "rank 1: called all_reduce 2 with 5 elements [5] at train.py:7 in f, ranks 0,2 with 4 [4] at train.py:9 in step"
    )
    assert [line.text for line in incident.evidence][1] == "all_reduce 2 [5] Float, not ended at train.py:7 in f"
    # Another call long before leads to the wait; of two ranks neither is known to be right.
    found = stall(recorded(done(1, "a"), done(2, "b"), call(3)), recorded(done(1, "b"), done(2, "a"), call(3, "b")))
    assert found is not None
    assert (found.kind, dict(found.missing)) == ("mismatch", {})
    assert stall_incident(found, JobContext()).summary == "rank 0 called a [4] before b [4], rank 1 in the other order"


def test_without_records_a_rank_in_backward_waits_unless_it_computes() -> None:
    backward = {**IDLE, "stack": "b", "where": "train.py:20 in <module>", "inside": "backward"}
    found = stall(backward, IDLE, backward)
    assert found is not None
    assert (found.kind, dict(found.missing), found.first.op) == ("missing", {1: "idle"}, "backward")
    assert stall(backward, IDLE, backward, r0={"cpu_s": 9.0}, r2={"cpu_s": 9.0}) is None
    assert stall(backward, backward, r0={"cpu_s": 9.0}, r1={"cpu_s": 9.0}) is None


def test_stacks_are_asked_for_on_suspicion_alone() -> None:
    works = {"t": 10.0, "cpu_s": 9.0}
    assert not is_suspect({0: IDLE, 1: IDLE}, {0: {**IDLE, **works}, 1: {**IDLE, "t": 10.0}})
    assert is_suspect({0: IDLE, 1: IDLE}, {0: {**IDLE, "t": 10.0}, 1: {**IDLE, "t": 10.0}})
    assert is_suspect({0: waiting(5), 1: came(4)}, {0: {**waiting(5), **works}, 1: {**came(4), **works}})


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


def test_a_hang_and_its_end_are_recorded_once() -> None:
    world = Watched()
    world.live(25)
    assert world.reported("incident") == []
    world.live(120)
    (incident,) = world.reported("incident")
    assert (incident["culprit_ranks"], incident["culprit_node"], incident["ongoing"]) == ([1], "n2", True)
    assert world.state.phase == s.RUNNING
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(6)}
    world.live(20)
    assert len(world.reported("hang_over")) == 1
    assert world.state.restarts == 0


def test_a_timeout_that_torch_raises_before_hang_after_names_who_was_missing_at_the_last_look() -> None:
    world = Watched()
    world.live(25)
    assert world.reported("incident") == []
    world.fail(0, "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")
    world.settle()
    (incident,) = world.reported("incident")
    assert (incident["category"], incident["culprit_ranks"]) == ("hang_no_output", [1])
    assert "; rank 0 was waiting" in incident["summary"]


def looping(world: Watched, *lines: int, helper: bool = False) -> None:
    """Rank 1 computes in spin, for ten seconds at each of these lines."""
    calls = [["train.py", 7, "one"]] if helper else []
    for line in lines:
        script = [["train.py", 60, "<module>"], ["train.py", line, "spin"], *calls]
        for _ in range(10):
            world.pulses["n2"] = came(4, state="R", cpu_s=world.now, stack=f"spin {line}", script=script)
            world.live(1)


def test_a_rank_that_computes_in_one_function_while_others_wait_is_no_hang_and_is_named() -> None:
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
    assert find_loops(rounds[1], {**rounds[2], 1: {**rounds[2][1], **does}}, frozenset(), loops) == {}


def test_after_a_false_alarm_the_next_wait_may_be_longer() -> None:
    world = Watched()
    world.live(100)
    world.pulses = {"n1": came(5), "n2": came(5)}
    world.live(10)
    (over,) = world.reported("hang_over")
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(5)}
    world.live(2 * over["waited_s"] - 10)
    assert len(world.reported("incident")) == 1
    world.live(60)
    assert len(world.reported("incident")) == 2


def test_nobody_looks_where_the_job_says_so_and_a_hang_restarts_where_it_says_so() -> None:
    quiet = Watched(hang_after=0.0)
    quiet.live(100)
    assert quiet.asked == 0
    eager = Watched(hang_after=10.0, hang_restart=20.0)
    eager.live(25)
    assert (len(eager.reported("incident")), eager.state.generation) == (1, 0)
    eager.live(20)
    assert (eager.state.generation, eager.state.restarts) == (1, 1)
    assert [one["culprit_ranks"] for one in eager.reported("incident")] == [[1], [1]]


def test_a_round_that_is_not_complete_is_not_judged() -> None:
    world = Watched()
    for _ in range(100):
        world.pass_time(1.0)
        for orders in world.orders.values():
            orders.clear()
        if world.state.watch.asked:
            world.feed(inputs.Pulses("n1", 0, {0: {**waiting(5), "t": world.now}}))
    assert world.reported("incident") == []
