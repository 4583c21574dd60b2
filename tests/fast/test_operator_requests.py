"""What operators set while a job runs: for which groups, and what is refused."""

from __future__ import annotations

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from tests.fast.world import World, spec


def test_what_an_operator_sets_holds_from_the_next_group_on_and_outlives_the_coordinator() -> None:
    world = World(spec(3, min_nodes=1))
    world.feed(inputs.Restart("me", {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}, later=True))
    assert world.replies[-1].message == "it applies from generation 1 on"
    assert world.last("environment_set").detail["from_generation"] == 1
    for env, part in (({"TOKEN": "secret"}, "TOKEN: only"), ({"NCCL_DEBUG": "x" * 2000}, "longer than")):
        world.feed(inputs.Restart("me", {"GLOO_X": "1", **env}))
        assert part in world.replies[-1].message
    world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now)
    world.die("n1")
    for name in ("n2", "n3"):
        world.machines[name].connected = False
        world.join(name)
    world.settle()
    assert world.last("generation_started").detail["env"] == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}
    world.feed(inputs.Restart("me", {"NCCL_ALGO": None}))
    world.settle()
    assert world.last("generation_started").detail["env"] == {"NCCL_DEBUG": "INFO"}
    assert document(world.state, {}, "n2")["environment"] == {"env": {"NCCL_DEBUG": "INFO"}, "from_generation": 2}
    assert "secret" not in str(world.records())


def test_restarts_that_arrive_while_one_is_carried_out_are_one() -> None:
    world = World(spec(2))
    for _ in range(50):
        world.feed(inputs.Restart("me"))
        queues = world.waiting()
        if queues:
            world.deliver(*queues[0])
    assert all(reply.accepted for reply in world.replies)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert {reply.generation for reply in world.replies} <= set(range(1, world.state.generation + 1))
    assert world.state.generation < 10


def test_a_group_that_does_not_get_on_with_its_start_is_restarted() -> None:
    world = World(spec(2))
    world.feed(inputs.Restart("me"))
    while world.state.phase != s.STARTING:
        world.deliver(*world.waiting()[0])
    world.now += 6
    world.feed(inputs.Restart("me"))
    assert world.state.phase == s.STOPPING


def test_while_the_coordinator_moves_a_request_is_to_be_made_again() -> None:
    world = World(spec(3, min_nodes=1))
    world.feed(inputs.Remove("n1"))
    world.settle()
    assert world.heirs == ["n2"]
    world.feed(inputs.Cordon("n3"))
    assert (world.replies[-1].accepted, world.replies[-1].kind) == (False, "moved")
