"""What operators set while a job runs: for which groups, and what is refused."""

from __future__ import annotations

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator.status import document
from tests.fast.world import World, spec


def test_what_an_operator_sets_holds_from_the_next_group_on_and_outlives_the_coordinator() -> None:
    world = World(spec(3, min_nodes=1))
    world.feed(inputs.Restart("me", {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}, later=True))
    assert world.replies[-1].message == "it holds from generation 1 on"
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
