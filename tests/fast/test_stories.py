"""Stories of the coordinator, in testdata/*.txt: inputs, then the events and the state that follow from them.

A file is a list of blocks: lines of commands, `----`, and what is expected once every message has arrived.
UPDATE_SNAPSHOTS=1 writes what happens into the files. The commands are the methods of `Story`, and `INPUTS`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from remote_agent.text.names import ranges
from remote_agent.wire import NodeSpec
from supervisor.wording.plan import plan
from tests.fast.test_stalls import Watched, pulse
from tests.fast.world import World, spec

STORIES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))
RULE = "----"
KEPT = ("generation", "members", "restarts", "skipped", "trees", "warnings")
"""What the journal alone gives back of a group that runs."""


# What the coordinator hears at once, most of it for each node that is named.
INPUTS: dict[str, Callable[..., list[inputs.Input]]] = {
    "restart": lambda: [inputs.Restart("me")],
    "stop": lambda: [inputs.Stop()],
    "remove": lambda *nodes: [inputs.Remove(node) for node in nodes],
    "add": lambda *nodes: [inputs.Add(NodeSpec(node, "10.0.0.9", "2")) for node in nodes],
    "cordon": lambda node: [inputs.Cordon(node)],
    "uncordon": lambda node: [inputs.Cordon(node, on=False)],
    "unfit": lambda node, reason: [inputs.Unfit(node, reason)],
    "stepped": lambda node: [inputs.Heartbeat(node, stepped=True)],
}


class Story:
    """One world, and a method for each command."""

    world: World
    shown: list[int]
    """How many events, refusals, handovers and dropped nodes the story has shown."""
    plans: list[str]
    waits = False

    def run(self, command: str) -> None:
        name, *words = shlex.split(command)
        if name in INPUTS:
            for event in INPUTS[name](*words):
                self.world.feed(event)
        else:
            getattr(self, name)(*words)

    def result(self) -> list[str]:
        """Deliver every message, unless the block says `wait`; return what is new, and the state."""
        world = self.world
        if not self.waits:
            world.settle()
        self.waits = False
        if world.state.phase == s.RUNNING and not world.state.spec.endpoint:
            read = replay.fold(world.state.spec, world.records())
            assert [getattr(read, name) for name in KEPT] == [getattr(world.state, name) for name in KEPT]
        told = [
            [_event_line(event) for event in world.events],
            [f"refused: {reply.message}" for reply in world.replies if not reply.accepted],
            [f"hands over to {node}" for node in world.heirs],
            [f"drops {node}" for node in world.dropped],
            self.plans,
        ]
        new = [line for lines, shown in zip(told, self.shown, strict=True) for line in lines[shown:]]
        self.shown = [len(lines) for lines in told]
        return [*new, *_state_lines(world)]

    def wait(self) -> None:
        """What is shown is how things are before any message has arrived."""
        self.waits = True

    def plan(self, op: str, *nodes: str) -> None:
        """An operator is shown what a request leads to."""
        told = plan(op, nodes, document(self.world.state, {}, "n1"), ())
        self.plans.append(f"plan: generation {told.generation}, then {' '.join(told.nodes) or 'no group'}")
        self.plans += [f"plan: {name}: {text}" for name, text in told.facts]

    def settle(self) -> None:
        self.world.settle()

    def job(self, nodes: str, *keys: str) -> None:
        """A job that runs on n1, n2, …; `key=value` sets a key of the job."""
        self.launch(nodes, *keys)
        self.join(*self.world.machines)
        self.result()

    def launch(self, nodes: str, *keys: str) -> None:
        """A job whose nodes have yet to join."""
        changes: Any = {key: json.loads(value) for key, value in (one.split("=") for one in keys)}
        self.world = World(spec(int(nodes), **changes), start=False)
        self.shown, self.plans = [0] * 5, []

    def watched(self, *keys: str) -> None:
        """A job of two ranks whose nodes answer what they are doing: the first waits for the second."""
        self.launch("2", *keys)
        self.world = Watched(**{key: json.loads(value) for key, value in (one.split("=") for one in keys)})

    def pulses(self, n1: str, n2: str) -> None:
        """What the ranks are doing from now on, in the words of `data/stalls.txt`."""
        assert isinstance(self.world, Watched)
        self.world.pulses = {"n1": pulse(n1), "n2": pulse(n2)}

    def live(self, seconds: str) -> None:
        assert isinstance(self.world, Watched)
        self.world.live(float(seconds))

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.world.join(node)

    def new_agent(self, node: str) -> None:
        """An agent is started anew on a node, and joins."""
        self.world.machines[node].lives += 1
        self.world.join(node)

    def fail(self, rank: str, message: str) -> None:
        self.world.fail(int(rank), message)

    def broken(self, node: str, message: str) -> None:
        """No workers can be started on a node any more."""
        self.world.machines[node].broken = message

    def deliver(self, kind: str, node: str) -> None:
        """Deliver the first order to a node, or the first report of one, before anything else happens."""
        self.world.deliver(kind, node)

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

    def agent_dead(self, node: str, *alone: str) -> None:
        """An agent is dead, its workers too; `alone`: the machine itself answers."""
        self.crash(node)
        self.world.feed(inputs.AgentDead(node, "gone", alone=bool(alone)))

    def cut_off(self, node: str) -> None:
        """A node is called dead while its workers go on."""
        self.world.machines[node].connected = False
        self.world.feed(inputs.AgentDead(node, "cut off"))

    def lose_lease(self, node: str) -> None:
        """A node has stopped its workers, since no coordinator answered it."""
        generation, self.world.machines[node].running = self.world.state.generation, None
        self.world.feed(inputs.Idle(node, generation))

    def given_up(self, *nodes: str) -> None:
        """An operator says that these are dead."""
        for node in nodes:
            self.crash(node)
            self.world.feed(inputs.GivenUp(node))

    def stuck(self, node: str) -> None:
        """A node carries out no orders to stop, and says nothing of a start; or it does again."""
        self.world.machines[node].stuck = not self.world.machines[node].stuck

    def cannot_open(self, *nodes: str) -> None:
        for node in nodes:
            self.world.machines[node].cannot_open = "OSError: Too many open files"

    def come(self, *names: str) -> None:
        """Nodes come to an open job that nobody has named, as Role takes them in."""
        world = self.world
        for name in names:
            node = s.Node(NodeSpec(name, f"10.0.0.{name[1:]}"))
            world.state = dataclasses.replace(world.state, nodes={**world.state.nodes, name: node})
            world.join(name)
            world.settle()

    def notice(self, message: str, *nodes: str) -> None:
        """What nodes say of their network when they start workers."""
        for node in nodes:
            self.world.machines[node].notice = {"kind": "interface", "message": message}

    def has(self, node: str, *trees: str) -> None:
        """A node says which work trees it has."""
        self.world.feed(inputs.Ready(node, 2, trees=tuple(letter * 64 for letter in trees)))

    def change(self, tree: str, *without: str) -> None:
        """An operator wants another work tree."""
        told = {"files": 1, "bytes": 9, "paths": ["train.py"]}
        self.world.feed(inputs.Restart("me", tree=tree * 64, change=told, without=without))

    def keeps(self, nodes: str, *snapshots: str) -> None:
        """Nodes have these snapshots, `id:time:step:path`, and say so."""
        found: list[Any] = [_snapshot(*each.split(":")) for each in snapshots]
        for node in nodes.split(","):
            self.world.machines[node].snapshots = found
            self.world.feed(inputs.Heartbeat(node, snapshots=tuple(found)))

    def forgets(self, nodes: str) -> None:
        """Nodes have no snapshots any more, and have not said so."""
        for node in nodes.split(","):
            self.world.machines[node].snapshots = []

    def cannot_place(self, node: str, why: str) -> None:
        self.world.machines[node].cannot_place = why

    def go_back(self, snapshot: str, clock_ns: str) -> None:
        """An operator restarts from a snapshot, at that time of the coordinator's clock."""
        self.world.wall_ns = int(clock_ns)
        self.world.feed(inputs.Restart("me", snapshot=snapshot))

    def ignores(self, node: str, order: str) -> None:
        """The next order of this kind to a node is lost."""
        while not self.world.sent(node, order):
            self.world.deliver(*self.world.waiting()[0])
        self.world.orders[node].clear()

    def sleep(self, seconds: str) -> None:
        """The coordinator's machine stands still."""
        self.world.now += float(seconds)
        self.world.feed(inputs.Tick())

    def grouped(self, *ranks: str) -> None:
        """These ranks have left init_process_group."""
        for rank in map(int, ranks):
            self.world.feed(inputs.Grouped(f"n{rank // 2 + 1}", self.world.state.generation, rank, 0.1))

    def grouping(self, *ranks: str) -> None:
        for rank in map(int, ranks):
            self.world.feed(inputs.Grouping(f"n{rank // 2 + 1}", self.world.state.generation, rank))

    def time(self, seconds: str) -> None:
        self.world.pass_time(float(seconds))

    def take_over(self, node: str, term: str) -> None:
        """Another node becomes coordinator, with the journal alone; the others join it anew."""
        world = self.world
        world.state = replay.take_over(world.state.spec, node, int(term), world.records(), world.now)
        for machine in world.machines.values():
            machine.connected = False


def _snapshot(name: str, time_ns: str, step: str, path: str) -> dict[str, Any]:
    return {
        "id": name, "path": path, "time_ns": int(time_ns), "step": int(step) if step else None, "exact": bool(step),
        "bytes": 1000,
    }  # fmt: skip


def _event_line(event: s.Emit) -> str:
    detail = event.detail
    words = [str(event.type), f"generation {event.generation}"]
    words += [event.node] if event.node else []
    if event.type == "incident":
        where = f"ranks {ranges(detail['culprit_ranks'])} on " if detail["culprit_ranks"] else ""
        words.append(f"{where}{detail['culprit_node']}: {detail['category']}")
        words += ["preliminary"] if detail.get("preliminary") else []
    elif event.type == "snapshots_chosen":
        words.append(" ".join(one["id"] for one in detail["snapshots"]))
        words += [f"{node} from {placed['placed']}" for node, placed in detail["placed"].items() if placed["placed"]]
        words += [f"without {detail['skipped']}"] if detail["skipped"] else []
    elif event.type == "tree_changed":
        words.append(f"{'back to ' if detail.get('rollback') else ''}{detail['digest'][:4]}")
    reason = detail.get("reason") or detail.get("cause") or detail.get("message")
    words += [str(reason)] if reason and event.type != "rank_failed" else []
    return ", ".join(words)


def _state_lines(world: World) -> list[str]:
    state = world.state
    nodes = []
    for name, node in state.nodes.items():
        ranks = [rank for rank, assigned in state.ranks.items() if assigned.node == name]
        nodes.append(f"{name} {node.status}" + (f" (ranks {ranges(ranks)})" if ranks else ""))
    phase = state.ended or state.phase
    found = document(state, {}, "n1")
    if found["condition"] != phase:
        phase += f" ({found['condition']})"
    workers = [machine.name for machine in world.machines.values() if machine.running is not None]
    lines = [f"= {phase}, generation {state.generation}, restarts {state.restarts}: {', '.join(nodes)}"]
    lines.append(f"= workers run on {' '.join(workers) or 'no node'}")
    alive = [rank for rank, assigned in state.ranks.items() if assigned.state in ("starting", "running")]
    lines += [f"= ranks {ranges(alive)} are shown alive in no group"] if alive and state.phase == s.FORMING else []
    if found["tree"]:
        used = {machine.tree for machine in world.machines.values() if machine.running is not None}
        lines.append(
            f"= work tree {found['tree']['digest'][:4]}, ranks from {' '.join(sorted(str(one)[:4] for one in used))}"
        )
    placed = {name: " ".join(world.machines[name].in_place) for name in state.members}
    lines += [
        f"= resumes from {names} on {' '.join(n for n in placed if placed[n] == names)}"
        for names in sorted(set(placed.values()) - {""})
    ]
    hidden = {name: world.machines[name].skipped for name in state.members if world.machines[name].skipped}
    lines += [f"= hidden: {hidden}"] if hidden else []
    gone = [name for name, machine in world.machines.items() if not machine.connected]
    lines += [f"= not connected: {' '.join(gone)}"] if gone else []
    lines += [f"= {name}: {node.reason}" for name, node in state.nodes.items() if node.reason]
    incident = found["incident"]
    lines += [f"= incident {incident['id']} {incident['state']}: {incident['over']}"] if incident else []
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
