"""A group that torch's own agents form: who opens the store, where others join, whose ranks are whose."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from remote_agent.coordinator import formation, inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from remote_agent.wire import PORTS, JobSpec, Rendezvous
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import UsageError
from supervisor.inventory import load
from supervisor.launch.specs import make_plan
from tests.fast.world import World, spec


def group(backend: str = "c10d", endpoint: str = "", nodes: int = 2, generation: int = 0, nnodes: str = "") -> s.State:
    """A group that is about to be started."""
    asked = Rendezvous(backend, "job", endpoint, "", nnodes)
    world = World(spec(nodes), start=False)
    return dataclasses.replace(
        world.state,
        spec=dataclasses.replace(world.state.spec, rendezvous=asked),
        generation=generation,
        members=tuple(world.state.nodes),
    )


def test_c10d_meets_on_a_free_port_of_the_first_node() -> None:
    state = group()
    opened = formation.opener_of(state)
    assert opened is not None
    node, order = opened
    assert (node, order["port"], order["hold"]) == ("n1", 0, True)
    found = formation.rendezvous_of(state, 4711)
    assert found is not None
    address = state.nodes["n1"].spec.address
    assert (found["endpoint"], found["nnodes"], found["run_id"]) == (f"{address}:4711", "2", "job")


def test_an_endpoint_on_a_node_of_ours_is_opened_there() -> None:
    state = group(endpoint="n2:4000")
    opened = formation.opener_of(state)
    assert opened is not None
    assert (opened[0], opened[1]["port"]) == ("n2", 4000)
    assert formation.opener_of(group(endpoint="n2")) == ("n2", {**opened[1], "port": PORTS["c10d"]})


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("c10d", "elsewhere:4000"), ("etcd-v2", "etcd:2379"), ("etcd", "e:1")]
)
def test_a_store_that_is_not_ours_gets_another_run_with_each_generation(backend: str, endpoint: str) -> None:
    """torch closes a run for good when one of its agents leaves, and this store remembers it."""
    assert formation.opener_of(group(backend, endpoint)) is None
    names = [formation.rendezvous_of(group(backend, endpoint, generation=number), 0) for number in range(3)]
    assert [found and found["run_id"] for found in names] == ["job", "job.1", "job.2"]


def assigned(node: str, generation: int, ranks: dict[int, int], world_size: int) -> inputs.Assigned:
    """That node's only rank, by number, with its pid."""
    return inputs.Assigned(node, generation, tuple((rank, 0, pid) for rank, pid in ranks.items()), world_size)


def started(nnodes: str = "") -> World:
    """Two nodes of one rank each whose torch agents run, and wait for each other."""
    made = spec(2, nproc=1)
    world = World(dataclasses.replace(made, rendezvous=Rendezvous("c10d", "job", nnodes=nnodes)), start=False)
    for name in ("n1", "n2"):
        world.feed(inputs.Joined(name, f"{name}-1"))
        world.feed(inputs.Ready(name, 1))
    world.feed(inputs.Prepared("n1", 0, 4711))
    world.feed(inputs.Recorded("n1", 0, 1))
    for name in ("n1", "n2"):
        world.feed(inputs.Started(name, 0, ()))
    return world


def test_torch_says_which_ranks_a_node_has() -> None:
    world = started()
    assert world.state.phase == s.STARTING
    world.feed(inputs.Main("n1", 0, 1))
    world.feed(assigned("n1", 0, {1: 101}, 2))
    world.feed(inputs.Main("n2", 0, 0))
    assert world.state.phase == s.STARTING
    world.feed(assigned("n2", 0, {0: 100}, 2))
    assert world.state.phase == s.RUNNING
    assert {rank.rank: (rank.node, rank.pid) for rank in world.state.ranks.values()} == {0: ("n2", 100), 1: ("n1", 101)}


def test_ranks_of_others_are_counted_and_reported() -> None:
    world = started("3")
    for name, rank in (("n1", 0), ("n2", 2)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 3))
        world.feed(inputs.Main(name, 0, rank))
    reported = document(world.state, {}, "n1")
    assert reported["world_size"] == 3
    assert "1 of 3 ranks are outside HOSTS" in str(reported["plan"])
    assert "--rdzv-backend c10d --rdzv-endpoint" in str(reported["plan"])


def test_torch_may_assign_the_ranks_anew_while_the_group_runs() -> None:
    world = started("2:3")
    for name, rank in (("n1", 0), ("n2", 1)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 2))
        world.feed(inputs.Main(name, 0, rank))
    world.feed(assigned("n1", 0, {1: 201}, 3))
    world.feed(assigned("n2", 0, {2: 202}, 3))
    assert {rank.rank: rank.node for rank in world.state.ranks.values()} == {1: "n1", 2: "n2"}
    assert (world.state.phase, world.state.world_size, world.state.generation) == (s.RUNNING, 3, 0)


def test_a_repeated_report_does_not_raise_a_dead_rank() -> None:
    world = started()
    for name, rank in (("n1", 0), ("n2", 1)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 2))
        world.feed(inputs.Main(name, 0, rank))
    ended: Any = {"rank": 1, "local_rank": 0, "pid": 101, "code": 0, "signal": None, "t_ns": 1}
    world.feed(inputs.Exited("n2", 0, ended))
    world.feed(assigned("n2", 0, {1: 101}, 2))
    assert world.state.ranks[1].state == "succeeded"


def test_a_new_coordinator_knows_the_ranks_from_the_journal() -> None:
    made = dataclasses.replace(spec(2), rendezvous=Rendezvous("c10d", "job"))
    members = [{"node": f"n{1 + at}", "group_rank": at, "base_rank": at, "nproc": 1} for at in range(2)]
    meeting = {"backend": "c10d", "endpoint": "n1:1", "run_id": "job", "nnodes": "2", "conf": "", "is_ours": True}
    detail = {"members": members, "restarts": 0, "rendezvous": meeting}
    records: Any = [
        {"type": "generation_started", "generation": 0, "node": None, "rank": None, "detail": detail},
        *(
            {
                "type": "ranks_assigned",
                "generation": 0,
                "node": node,
                "rank": None,
                "detail": {"ranks": [[rank, 0, 100 + rank]], "world_size": 2},
            }
            for node, rank in (("n1", 1), ("n2", 0))
        ),
    ]
    state = replay.fold(made, records)
    assert {rank.rank: (rank.node, rank.pid) for rank in state.ranks.values()} == {0: ("n2", 100), 1: ("n1", 101)}


def test_the_description_of_a_job_keeps_its_rendezvous() -> None:
    made = dataclasses.replace(spec(2), rendezvous=Rendezvous("etcd", "job", "etcd:2379", "a=b", "2:3"))
    assert JobSpec.from_json(made.to_json()) == made


def options(tmp_path: Path, *argv: str) -> JobSpec:
    """The job that this command line describes, on two hosts."""
    (tmp_path / "t.py").write_text("")
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[hosts]]\nname = "n1"\nssh = "10.0.0.1"\n[[hosts]]\nname = "n2"\nssh = "10.0.0.2"\n')
    return make_plan(load(hosts), job_options(parse_up([*argv, "t.py"])), tmp_path).spec


def test_without_a_backend_the_coordinator_forms_the_group(tmp_path: Path) -> None:
    assert options(tmp_path).rendezvous is None
    made = options(tmp_path, "--rdzv-backend", "supervisor", "--rdzv-conf", "join_timeout=7,last_call_timeout=0.5")
    assert (made.rendezvous, made.join_timeout, made.settle_timeout) == (None, 7.0, 0.5)


def test_nodes_that_are_not_in_the_inventory_may_fill_up_nnodes(tmp_path: Path) -> None:
    made = options(tmp_path, "--rdzv-backend", "c10d", "--nnodes", "3", "--rdzv-id", "ours")
    assert made.rendezvous == Rendezvous("c10d", "ours", nnodes="3")
    assert made.min_nodes == 2
    # Where ours are enough, torch waits for exactly the group that the coordinator has chosen.
    assert options(tmp_path, "--rdzv-backend", "c10d", "--nnodes", "1:2", "--job", "j").rendezvous == Rendezvous(
        "c10d", "j"
    )
    with pytest.raises(UsageError, match="has 2 host"):
        options(tmp_path, "--nnodes", "3")


def test_static_takes_its_endpoint_from_master_addr(tmp_path: Path) -> None:
    made = options(tmp_path, "--rdzv-backend", "static", "--master-addr", "10.0.0.1", "--master-port", "4000")
    assert made.rendezvous is not None
    assert made.rendezvous.endpoint == "10.0.0.1:4000"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rdzv-backend", "zookeeper"], "must be supervisor, c10d, etcd-v2, etcd or static"),
        (["--rdzv-backend", "etcd-v2"], "needs --rdzv-endpoint"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:x"], "not HOST:PORT"),
        (["--rdzv-conf", "join_timeout"], "not K=V"),
        (["--rdzv-conf", "join_timeout=soon"], "must be seconds"),
    ],
)
def test_bad_words_are_named(tmp_path: Path, argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(tmp_path, *argv)
