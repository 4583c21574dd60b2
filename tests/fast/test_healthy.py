"""An hour of a healthy run: no alarm, no warning; and a hang after it is told all the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from remote_agent.base.clocks import Clock
from remote_agent.coordinator import inputs
from remote_agent.coordinator.output_watch import Losses
from remote_agent.engine.inspect.pulse import MAX_CAME
from tests.fast.test_stalls import IDLE, Watched, group

WORK, SAVE, SEND, READ, MOVE, WAIT, SLEEP, STEP = "work", "save", "send", "read", "move", "wait", "sleep", "step"
# Short steps that nothing is printed of: one sleeps in each, and the others wait for it.
NAP, MEET = "nap", "meet"
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
    (100, {1: NAP}, MEET),
    (60, {}, STEP),
]


class Training(Watched):
    """Four ranks on two nodes; with and without torch's flight recorder."""

    def __init__(self, recorder: bool) -> None:
        super().__init__(nproc=2)
        self.recorder = recorder
        self.newest = dict.fromkeys(ALL, 0)
        self.held = 0.0
        self.ranks = {rank: {**IDLE, "stack": "step"} for rank in ALL}
        self.came: dict[int, list[int]] = {rank: [] for rank in ALL}
        """When each came to each collective, in us."""
        self.losses, self.dice = Losses(), random.Random(1)

    def go_on(self, seconds: int, some: dict[int, str], others: str) -> None:
        """Do this for so long; who waited has what it waited for afterwards."""
        doing = {rank: some.get(rank, others) for rank in ALL}
        newest = max(self.newest.values())
        self.newest = {rank: newest + (doing[rank] == WAIT) for rank in ALL}
        self.held = self.now
        for _ in range(seconds):
            for rank, what in doing.items():
                self._second(rank, what)
                self.came[rank] += [int(self.now * 1e6)] * (self.newest[rank] - len(self.came[rank]))
            if STEP in doing.values():
                for name in self.machines:
                    self.feed(inputs.Heartbeat(name, stepped=True, moved=True, warnings=self._losses(name)))
            self.live(1)

    def _second(self, rank: int, what: str) -> None:
        pulse = self.ranks[rank]
        pulse.update(stack=what, inside=None, state="D" if what == SAVE else "S", groups={})
        pulse["cpu_s"] += {WORK: 1.0, STEP: 0.9}.get(what, 0.01)
        pulse["io"] += 500_000 if what == READ else 500
        pulse["net"] = None if what == WAIT else (pulse["net"] or 0) + 1_000_000 * (what == SEND)
        if what == MOVE:
            pulse["stack"] += str(self.now)
        pulse["sleeps"] += 20 * (what in (NAP, MEET))
        self.newest[rank] += {STEP: 5, NAP: 20, MEET: 20}.get(what, 0)
        if not self.recorder:
            pulse["inside"] = "all_reduce" if what in (WAIT, MEET) else None
        elif self.newest[rank]:
            age_s = self.now - self.held
            pulse["groups"] = {"0": group(self.newest[rank], waits=what in (WAIT, MEET), age_s=age_s)}

    def _losses(self, name: str) -> dict[tuple[int, str], str]:
        """Each rank has a batch of its own."""
        ranks = self.machines[name].ranks
        reported = {str(rank): {"losses": [(self.newest[rank], f"{self.dice.gauss(2, 0.01):.2f}")]} for rank in ranks}
        return self.losses.read(0, reported)

    def answer(self, name: str) -> dict[int, dict[str, Any]]:
        return {rank: self._pulse(rank) for rank in self.machines[name].ranks}

    def _pulse(self, rank: int) -> dict[str, Any]:
        pulse = {**self.ranks[rank], "t": self.now, "clock": Clock(0, 0)}
        own = self.came[rank]
        if own and pulse["groups"]:
            first = max(0, len(own) - MAX_CAME)
            came = {"first": first + 1, "t_us": own[first], "later_us": [t_us - own[first] for t_us in own[first:]]}
            pulse["groups"] = {"0": {**pulse["groups"]["0"], "came": came}}
        return pulse


@pytest.mark.parametrize("recorder", [True, False], ids=["recorder", "stacks alone"])
def test_an_hour_of_a_healthy_run_raises_no_alarm_and_a_later_hang_is_named_within_a_minute(recorder: bool) -> None:
    run = Training(recorder)
    for phase in HOUR:
        run.go_on(*phase)
    assert sum(seconds for seconds, _, _ in HOUR) == 3600
    assert run.asked > 100
    assert (run.reported("incident"), run.reported("warning")) == ([], [])
    run.go_on(60, {2: SLEEP}, WAIT)
    (incident,) = run.reported("incident")
    assert (incident["culprit_ranks"], incident["culprit_node"]) == ([2], "n2")
