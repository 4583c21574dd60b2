"""What a job costs its coordinator and its members grows with the hosts as it should: messages and bytes are counted.

`python -m tests.bench scale` has the times, and more hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest

from tests.bench import scale

FEW, MANY = 6, 24
# What is not here takes long, and is not counted here.
SCENES = {
    name: act
    for name, act in scale.SCENES.items()
    if any(part in name for part in ("all join", "a quiet second", "is lost", "is back", "a restart", "half", "pulses"))
}


@functools.cache
def _runs() -> dict[int, scale.Run]:
    return {hosts: scale.simulate(hosts, SCENES) for hosts in (FEW, MANY)}


def _figures(scene: str, hosts: int) -> scale.Figures:
    (found,) = [figures for name, figures in _runs()[hosts].items() if scene in name]
    assert found is not None
    return found


def _coordinator(scene: str, hosts: int) -> scale.Traffic:
    return _figures(scene, hosts).traffic["n1"]


def _member(scene: str, hosts: int) -> scale.Traffic:
    return _figures(scene, hosts).traffic[f"n{hosts}"]


def test_a_quiet_job_sends_one_heartbeat_a_second_and_node() -> None:
    """And, while it is sampled, one report in ten seconds."""
    for hosts in (FEW, MANY):
        quiet = _coordinator("a quiet second", hosts)
        assert quiet.received / (hosts - 1) < 1.3
        assert quiet.sent / (hosts - 1) < 1.3
        assert quiet.received_bytes / (hosts - 1) < 2000


def test_however_many_join_each_is_sent_the_same_number_of_messages() -> None:
    for scene in ("all join", "half of the nodes"):
        few, many = (_coordinator(scene, hosts).sent / (hosts - 1) for hosts in (FEW, MANY))
        assert many <= few + 2, scene


def test_what_a_rank_says_of_itself_does_not_grow_with_the_ranks() -> None:
    few, many = (_coordinator("pulses", hosts).received_bytes / (hosts - 1) for hosts in (FEW, MANY))
    assert many < 1.2 * few


def test_a_restart_costs_the_coordinator_the_same_for_each_node() -> None:
    for hosts in (FEW, MANY):
        restart = _coordinator("a restart", hosts)
        assert restart.received / (hosts - 1) < 45
        assert restart.sent / (hosts - 1) < 13


def test_a_restart_costs_a_member_the_same_in_a_larger_job() -> None:
    few, many = (_member("a restart", hosts) for hosts in (FEW, MANY))
    assert many.received <= few.received + 3
    # The records of a group name its members.
    assert many.received_bytes - few.received_bytes < 100 * (MANY - FEW)


def test_a_node_that_comes_back_asks_few_others() -> None:
    assert sum(_figures("the node is back", MANY).asked.values()) <= 10


def test_an_election_asks_each_node_a_few_times() -> None:
    title, act = next(iter(scale.ELECTIONS.items()))
    found = scale.simulate(MANY, {"up": scale.Job.up, title: act})[title]
    assert found is not None
    asked, voters = found.asked, MANY - 1
    # A few candidates may begin together, each of which asks first whether it would be elected.
    assert asked["vote"] <= 8 * voters
    assert asked["who"] <= 8 * voters
    assert asked["announce"] <= voters


def test_a_scene_that_does_not_end_fails_with_the_state_of_every_member() -> None:
    with pytest.raises(scale.Stuck) as stuck:
        scale.simulate(FEW, {"up": scale.Job.up, "never": lambda job: job.until(lambda: False)}, seed=7)
    name, seed, *states, tasks = str(stuck.value).splitlines()
    assert name == "never: it has not happened within 600 s"
    assert seed.startswith(f"{FEW} hosts, seed 7, ")
    assert [state.split(" in term 1")[0] for state in states] == [
        "n1: coordinator",
        *(f"n{number}: member" for number in range(2, FEW + 1)),
    ]
    assert f"{FEW} x lease" in tasks


def test_a_scene_ends_although_a_task_goes_on_when_it_is_cancelled() -> None:
    async def goes_on_once(job: scale.Job) -> None:
        async def look() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(scale.LIMIT_S)
            while True:
                await asyncio.sleep(1.0)

        left.append(asyncio.ensure_future(look()))
        await asyncio.sleep(1.0)

    left: list[asyncio.Future[None]] = []
    scale.simulate(2, {"up": scale.Job.up, "a task is left": goes_on_once})
    assert left[0].cancelled()
