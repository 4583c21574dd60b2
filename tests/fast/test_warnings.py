"""What a rank's output shows that is no failure: told once, in the journal and in the status, and nothing follows."""

from __future__ import annotations

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from remote_agent.coordinator.transitions import MAX_WARNINGS
from supervisor.cli.status import contract
from supervisor.wording.events import event_text
from supervisor.wording.status import status_lines
from tests.fast.world import World, spec

NAN = "loss is nan, about step 120"


def test_a_rank_is_warned_of_once_and_of_a_few_ranks() -> None:
    world = World(spec(2, nproc=8))
    for _ in range(3):
        world.feed(inputs.Heartbeat("n2", warnings={(9, "nan"): NAN}))
    world.feed(inputs.Heartbeat("n1", warnings={(rank, "nan"): NAN for rank in range(8)}))
    reported = [event for event in world.events if event.type == "warning"]
    assert [event.rank for event in reported] == [9, *range(MAX_WARNINGS - 1)]
    assert (reported[0].node, reported[0].detail) == ("n2", {"kind": "nan", "message": NAN})
    assert (world.state.phase, world.state.incident) == (s.RUNNING, None)
    # Whoever takes the role over does not tell it again.
    assert replay.fold(world.state.spec, world.records()).warnings == world.state.warnings
    status = document(world.state, {}, "n1")
    assert f"warning: rank 9: {NAN}" in status_lines(status)
    assert contract(status)["warnings"][0] == {"kind": "nan", "node": "n2", "rank": 9, "message": NAN}
    record = next(record for record in world.records() if record["type"] == "warning")
    assert event_text(record) == NAN
