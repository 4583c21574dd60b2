"""Stories of the coordinator, in testdata/*.txt: inputs, then the events and the state that follow from them.

A file is a list of blocks: lines of commands, `----`, and what is expected once every message has arrived.
UPDATE_SNAPSHOTS=1 writes what happens into the files. The commands are the methods of `Story`.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.text.names import ranges
from remote_agent.wire import NodeSpec
from tests.fast.world import World, spec

STORIES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))
RULE = "----"


class Story:
    """One world, and a method for each command."""

    world: World
    events: int
    replies: int
    handovers: int
    """How many of each the story has shown."""

    def run(self, command: str) -> None:
        name, *words = shlex.split(command)
        getattr(self, name)(*words)

    def result(self) -> list[str]:
        """Deliver every message; return the new events, refusals and handovers, and the state."""
        world = self.world
        world.settle()
        lines = [_event_line(event) for event in world.events[self.events :]]
        lines += [f"refused: {reply.message}" for reply in world.replies[self.replies :] if not reply.accepted]
        lines += [f"hands over to {node}" for node in world.heirs[self.handovers :]]
        self.events, self.replies, self.handovers = len(world.events), len(world.replies), len(world.heirs)
        return [*lines, *_state_lines(world)]

    def job(self, nodes: str, *keys: str) -> None:
        """A job that runs on n1, n2, …; `key=value` sets a key of the job."""
        self.launch(nodes, *keys)
        self.join(*self.world.machines)
        self.result()

    def launch(self, nodes: str, *keys: str) -> None:
        """A job whose nodes have yet to join."""
        changes: Any = {key: json.loads(value) for key, value in (one.split("=") for one in keys)}
        self.world = World(spec(int(nodes), **changes), start=False)
        self.events = self.replies = self.handovers = 0

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.world.join(node)

    def new_agent(self, node: str) -> None:
        """An agent is started anew on a node, and joins."""
        self.world.machines[node].lives += 1
        self.world.join(node)

    def unfit(self, node: str, reason: str) -> None:
        self.world.feed(inputs.Unfit(node, reason))

    def fail(self, rank: str, message: str) -> None:
        self.world.fail(int(rank), message)

    def broken(self, node: str, message: str) -> None:
        """No workers can be started on a node any more."""
        self.world.machines[node].broken = message

    def deliver(self, kind: str, node: str) -> None:
        """Deliver the first order to a node, or the first report of one, before anything else happens."""
        self.world.deliver(kind, node)

    def stepped(self, node: str) -> None:
        """A node's ranks report a step."""
        self.world.feed(inputs.Heartbeat(node, stepped=True))

    def finish(self) -> None:
        self.world.finish()

    def die(self, node: str) -> None:
        self.world.die(node)

    def crash(self, node: str) -> None:
        """A node is gone, and the coordinator has not noticed."""
        machine = self.world.machines[node]
        machine.connected, machine.running = False, None

    def silent(self, *nodes: str) -> None:
        """Nothing is heard of these nodes any more."""
        for node in nodes:
            self.world.machines[node].connected = False

    def time(self, seconds: str) -> None:
        self.world.pass_time(float(seconds))

    def restart(self) -> None:
        self.world.feed(inputs.Restart("me"))

    def remove(self, node: str) -> None:
        self.world.feed(inputs.Remove(node))

    def add(self, node: str) -> None:
        self.world.feed(inputs.Add(NodeSpec(node, "10.0.0.9", "2")))

    def stop(self) -> None:
        self.world.feed(inputs.Stop())

    def take_over(self, node: str, term: str) -> None:
        """Another node becomes coordinator, with the journal alone; the others join it anew."""
        world = self.world
        world.state = replay.take_over(world.state.spec, node, int(term), world.records(), world.now)
        for machine in world.machines.values():
            machine.connected = False


def _event_line(event: s.Emit) -> str:
    detail = event.detail
    words = [str(event.type), f"generation {event.generation}"]
    words += [event.node] if event.node else []
    if event.type == "incident":
        where = f"ranks {ranges(detail['culprit_ranks'])} on " if detail["culprit_ranks"] else ""
        words.append(f"{where}{detail['culprit_node']}: {detail['category']}")
        words += ["preliminary"] if detail.get("preliminary") else []
    reason = detail.get("reason") or detail.get("cause")
    words += [str(reason)] if reason else []
    return ", ".join(words)


def _state_lines(world: World) -> list[str]:
    state = world.state
    nodes = []
    for name, node in state.nodes.items():
        ranks = [rank for rank, assigned in state.ranks.items() if assigned.node == name]
        nodes.append(f"{name} {node.status}" + (f" (ranks {ranges(ranks)})" if ranks else ""))
    phase = state.ended or state.phase
    workers = [machine.name for machine in world.machines.values() if machine.running is not None]
    lines = [f"= {phase}, generation {state.generation}, restarts {state.restarts}: {', '.join(nodes)}"]
    lines.append(f"= workers run on {' '.join(workers) or 'no node'}")
    return [*lines, f"= {state.failure}"] if state.failure else lines


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    blocks = path.read_text().strip().split("\n\n")
    actual = "\n\n".join(_replayed(blocks)) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(actual)
    assert actual == path.read_text()


def _replayed(blocks: list[str]) -> list[str]:
    """Return the blocks with what really follows."""
    story, replayed = Story(), []
    for block in blocks:
        given, rule, _ = block.partition(f"\n{RULE}")
        if not rule:  # a comment of its own
            replayed.append(block)
            continue
        lines = given.splitlines()
        for line in lines:
            if not line.startswith("#"):
                story.run(line)
        replayed.append("\n".join([*lines, RULE, *story.result()]))
    return replayed
