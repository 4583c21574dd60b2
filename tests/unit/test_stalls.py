"""Who holds a group up, on made-up pulses; when it is told and when it is over, on the pure coordinator."""

from __future__ import annotations

from typing import Any

import pytest

from remote_agent import inputs
from remote_agent import state as s
from remote_agent.diagnose import Context
from remote_agent.diagnose.stalls import Stall, find_stall, is_suspect, stall_incident
from tests.unit.world import World, spec

IDLE: dict[str, Any] = {
    "t": 0.0, "state": "S", "cpu_s": 0.0, "io": 0, "net": 0, "deaf": False, "stack": "a", "where": "train.py:9 in load",
    "calls": "", "parked": False, "inside": None, "groups": {}, "ended": None, "children": [],
    "ras": [],
}  # fmt: skip
ENDED: dict[str, Any] = {
    "part": "a thread", "type": "KeyError", "headline": "KeyError: 'x'", "place": "train.py:7 feed",
    "traceback": "Traceback …", "line": 12, "age_s": 60.0,
}  # fmt: skip


def group(last: int, waits: bool = True, op: str = "all_reduce", age_s: float = 40.0) -> dict[str, Any]:
    """A flight record's word on one group: `last` is the newest collective, which is not done if it waits."""
    found: dict[str, Any] = {"ranks": None, "last": last}
    if waits:
        found.update(seq=last, op=op, sizes="[[4]]", age_s=age_s, timeout_s=600.0, backend="gloo")
    return found


def waiting(seq: int = 5, name: str = "0", **more: Any) -> dict[str, Any]:
    return {**IDLE, "groups": {name: group(seq, **more)}}


def came(seq: int, **more: Any) -> dict[str, Any]:
    return {**IDLE, "groups": {"0": group(seq, waits=False)}, **more}


def stall(*pulses: dict[str, Any], left: frozenset[int] = frozenset(), **later: dict[str, Any]) -> Stall | None:
    """Judge ranks 0, 1, … of these pulses, ten seconds apart; `later`: what changes by then, by `rN`."""
    before = {rank: pulse for rank, pulse in enumerate(pulses) if rank not in left}
    now = {rank: {**pulse, "t": 10.0, **later.get(f"r{rank}", {})} for rank, pulse in before.items()}
    return find_stall(before, now, left)


def test_the_one_that_does_not_come_and_does_nothing() -> None:
    found = stall(waiting(5), came(4), waiting(5))
    assert found is not None
    assert (found.kind, dict(found.missing), found.where) == ("missing", {1: "inert"}, {1: "train.py:9 in load"})
    assert (found.first.op, found.first.seq, found.first.timeout_s) == ("all_reduce", 5, 600.0)


def test_what_nccls_own_service_complains_of_stands_in_the_evidence_once() -> None:
    said = ["#0-0 (fa93) MISMATCH: 3 ranks have launched up to operation 640"]
    found = stall(waiting(5), came(4), waiting(5), r0={"ras": said}, r2={"ras": said})
    assert found is not None
    told = [line.text for line in stall_incident(found, 10.0, Context(world_size=3)).evidence]
    assert [text for text in told if "RAS" in text] == [f"NCCL RAS: {said[0]}"]


@pytest.mark.parametrize(
    "does",
    [
        {"cpu_s": 2.0},
        {"io": 10_000_000},
        {"net": 10_000_000},
        {"stack": "b"},
        {"state": "D"},
        {"deaf": True, "stack": ""},
        {"stack": ""},
    ],
    ids=["computes", "writes", "sends", "moves", "in the kernel", "deaf once", "no stack"],
)
def test_who_does_something_is_waited_for(does: dict[str, Any]) -> None:
    assert stall(waiting(5), came(4), waiting(5), r1=does) is None


def test_nobody_waits_and_nothing_is_wrong() -> None:
    assert stall(came(5), came(5), came(5)) is None
    assert stall(waiting(5), came(4), r0={"groups": {"0": group(6)}}) is None
    assert find_stall({}, {0: waiting(5)}, frozenset()) is None


def test_whose_thread_ended_before_is_the_cause() -> None:
    children = [{"count": 2, "name": "pt_data_worker", "doing": "sleeps in pipe_read", "where": "data.py:3 in get"}]
    found = stall(waiting(5), came(4, ended=ENDED, children=children), came(4), waiting(5))
    assert found is not None
    incident = stall_incident(found, 40.0, Context(ranks_per_node={"n1": [0, 1], "n2": [2, 3]}))
    assert (incident.category, incident.culprit_ranks, incident.culprit_node) == ("user_exception", (1,), "n1")
    assert (incident.missing or {})["missing"] == [1, 2]
    assert "a thread ended with KeyError: 'x' in train.py:7 feed; the main thread waits at" in incident.summary
    assert "(gloo timeout in 09:20)" in incident.summary
    assert incident.traceback == "Traceback …"
    lines = [(line.file, line.line, line.text) for line in incident.evidence]
    assert lines[0] == ("generation_0/rank_1/stderr.log", 12, "KeyError: 'x'")
    assert lines[-1][2] == "2 x child process pt_data_worker sleeps in pipe_read at data.py:3 in get"
    late = stall(waiting(5), came(4, ended={**ENDED, "age_s": 3600.0}), waiting(5))
    assert late is not None
    assert (dict(late.missing), dict(late.ended)) == ({1: "inert"}, {})


def test_the_evidence_of_many_ranks_is_bounded() -> None:
    children = [{"count": 1, "name": "x", "doing": "sleeps", "where": ""}]
    found = stall(waiting(5), *(came(4, ended=ENDED, children=children) for _ in range(500)))
    assert found is not None
    incident = stall_incident(found, 40.0, Context())
    assert (len(incident.culprit_ranks), len(incident.evidence)) == (500, 36)


def test_all_wait_for_threads_that_ended() -> None:
    orphaned = came(5, ended=ENDED, parked=True)
    found = stall(orphaned, orphaned, came(5))
    assert found is not None
    assert (dict(found.waits), sorted(found.missing)) == ({}, [0, 1])
    incident = stall_incident(found, 30.0, Context(ranks_per_node={"n1": [0, 1, 2]}))
    assert (incident.category, incident.culprit_ranks, incident.victims) == ("user_exception", (0, 1), ())
    assert stall(orphaned, came(5), r1={"cpu_s": 5.0}) is None
    assert stall(came(5, ended=ENDED), came(5)) is None


def test_stopped_deaf_and_gone() -> None:
    stopped = stall(waiting(5), came(4, state="T"))
    deaf = stall(waiting(5), came(4, deaf=True, cpu_s=0.0), r1={"cpu_s": 10.0})
    gone = stall(waiting(5), waiting(5), came(4), left=frozenset({2}))
    found = [dict(one.missing) for one in (stopped, deaf, gone) if one is not None]
    assert found == [{1: "stopped"}, {1: "deaf"}, {2: "left"}]


def test_who_waits_for_another_is_a_victim_itself() -> None:
    # 0 waits for 1 in the world's group; 1 waits for 2 in a pair's.
    middle = {**IDLE, "groups": {"0": group(4, waits=False), "7": group(2)}}
    last = {**IDLE, "groups": {"0": group(5), "7": group(1, waits=False)}}
    first = waiting(5)
    found = stall(first, middle, {**last, "groups": {"0": group(4, waits=False), "7": group(1, waits=False)}})
    assert found is not None
    assert dict(found.missing) == {2: "inert"}


def test_who_is_left_alone_in_an_older_collective_is_behind() -> None:
    found = stall(waiting(6), waiting(6), waiting(5))
    assert found is not None
    assert dict(found.missing) == {2: "behind"}


def test_all_came_and_none_gets_on() -> None:
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

    def answer(self, name: str) -> dict[int, dict[str, Any]]:
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

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.detail) for event in self.events if event.type == kind]


def test_a_hang_is_told_once_while_it_lasts_and_its_end_too() -> None:
    world = Watched()
    world.live(25)
    assert world.told("incident") == []
    world.live(120)
    (incident,) = world.told("incident")
    assert (incident["culprit_ranks"], incident["culprit_node"], incident["ongoing"]) == ([1], "n2", True)
    assert world.state.phase == s.RUNNING
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(6)}
    world.live(20)
    assert len(world.told("hang_over")) == 1
    assert world.state.restarts == 0


def test_what_was_no_hang_before_has_longer_the_next_time() -> None:
    world = Watched()
    world.live(100)
    world.pulses = {"n1": came(5), "n2": came(5)}
    world.live(10)
    (over,) = world.told("hang_over")
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(5)}
    world.live(2 * over["waited_s"] - 10)
    assert len(world.told("incident")) == 1
    world.live(60)
    assert len(world.told("incident")) == 2


def test_nobody_looks_where_the_job_says_so_and_a_hang_restarts_where_it_says_so() -> None:
    quiet = Watched(hang_after=0.0)
    quiet.live(100)
    assert quiet.asked == 0
    eager = Watched(hang_after=10.0, hang_restart=20.0)
    eager.live(25)
    assert (len(eager.told("incident")), eager.state.generation) == (1, 0)
    eager.live(20)
    assert (eager.state.generation, eager.state.restarts) == (1, 1)
    assert [one["culprit_ranks"] for one in eager.told("incident")] == [[1], [1]]


def test_a_round_that_is_not_complete_is_not_judged() -> None:
    world = Watched()
    for _ in range(100):
        world.pass_time(1.0)
        for orders in world.orders.values():
            orders.clear()
        if world.state.watch.asked:
            world.feed(inputs.Pulses("n1", 0, {0: {**waiting(5), "t": world.now}}))
    assert world.told("incident") == []


WORK, SAVE, SEND, READ, MOVE, WAIT, SLEEP, STEP = "work", "save", "send", "read", "move", "wait", "sleep", "step"
ALL = range(4)
# An hour of a healthy run: seconds, what the ranks named do, what the others do.
HOUR: list[tuple[int, dict[int, str], str]] = [
    (60, {}, READ),  # imports from a slow file system
    (300, {}, WORK),  # first step: warm-up and compilation, everywhere
    (240, {1: WORK}, WAIT),  # one rank compiles for longer
    (400, {}, STEP),
    *[(25, {2: WORK}, WAIT), (5, {}, STEP)] * 10,  # uneven ranks
    (300, {0: WORK}, WAIT),  # evaluation on rank 0
    (300, {}, STEP),
    (300, {0: SAVE}, WAIT),  # checkpoint of rank 0: the kernel writes for it
    (100, {0: SEND}, WAIT),  # and its upload
    (100, {}, READ),  # sharded checkpoint
    (200, {}, STEP),
    (240, {}, SLEEP),  # nothing is done between two epochs, and nobody waits for anybody
    (300, {}, STEP),
    (180, {3: READ}, WAIT),  # one rank fetches data
    (120, {0: MOVE}, WAIT),  # and one looks for something in small steps
    (160, {}, STEP),
]


class Training(Watched):
    """Four ranks on two nodes; with and without torch's flight recorder."""

    def __init__(self, recorder: bool) -> None:
        super().__init__(nproc=2)
        self.recorder = recorder
        self.newest = dict.fromkeys(ALL, 0)
        self.held = 0.0
        self.ranks = {rank: {**IDLE, "stack": "step"} for rank in ALL}

    def go_on(self, seconds: int, some: dict[int, str], others: str) -> None:
        """Do this for so long; who waited has what it waited for afterwards."""
        doing = {rank: some.get(rank, others) for rank in ALL}
        newest = max(self.newest.values())
        self.newest = {rank: newest + (doing[rank] == WAIT) for rank in ALL}
        self.held = self.now
        for _ in range(seconds):
            for rank, what in doing.items():
                self._second(rank, what)
            if STEP in doing.values():
                for name in self.machines:
                    self.feed(inputs.Beat(name, stepped=True, moved=True))
            self.live(1)

    def _second(self, rank: int, what: str) -> None:
        pulse = self.ranks[rank]
        pulse.update(stack=what, inside=None, state="D" if what == SAVE else "S", groups={})
        pulse["cpu_s"] += {WORK: 1.0, STEP: 0.9}.get(what, 0.01)
        pulse["io"] += 500_000 if what == READ else 500
        pulse["net"] = None if what == WAIT else (pulse["net"] or 0) + 1_000_000 * (what == SEND)
        if what == MOVE:
            pulse["stack"] += str(self.now)
        self.newest[rank] += 5 * (what == STEP)
        if not self.recorder:
            pulse["inside"] = "all_reduce" if what == WAIT else None
        elif self.newest[rank]:
            age_s = self.now - self.held
            pulse["groups"] = {"0": group(self.newest[rank], waits=what == WAIT, age_s=age_s)}

    def answer(self, name: str) -> dict[int, dict[str, Any]]:
        return {rank: {**self.ranks[rank], "t": self.now} for rank in self.machines[name].ranks}


@pytest.mark.parametrize("recorder", [True, False], ids=["recorder", "stacks alone"])
def test_an_hour_of_a_healthy_run_raises_no_alarm_and_a_hang_after_it_is_told_within_a_minute(recorder: bool) -> None:
    run = Training(recorder)
    for phase in HOUR:
        run.go_on(*phase)
    assert sum(seconds for seconds, _, _ in HOUR) == 3600
    assert run.asked > 100
    assert run.told("incident") == []
    run.go_on(60, {2: SLEEP}, WAIT)
    (incident,) = run.told("incident")
    assert (incident["culprit_ranks"], incident["culprit_node"]) == ([2], "n2")
