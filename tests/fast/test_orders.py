"""A hostile coordinator: its orders run no program on another node but the one that the operator has brought there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent import orders
from remote_agent.base.paths import Home
from remote_agent.coordinator import environment, formation, quorum
from remote_agent.coordinator import state as s
from remote_agent.coordinator.transitions import Turn
from remote_agent.engine.order import Order
from remote_agent.wire import JobSpec, NodeSpec, Problem, Rendezvous

OWN = {"LR": "0.1", "NCCL_DEBUG": "WARN"}


def context(rendezvous: Rendezvous | None = None) -> Any:
    """Return what this module needs of n1's context."""
    nodes = (NodeSpec("n1", "10.0.0.1", "2", env={"LR": "0.2"}), NodeSpec("n2", "10.0.0.2", "2"))
    spec = JobSpec("job", "train.py", nodes, args=("--lr",), workdir="/", env=OWN, rendezvous=rendezvous)
    files = Home(Path("/home/supervisor")).job("job")
    return SimpleNamespace(spec=spec, node="n1", address="10.0.0.1", workdir="/", files=files)


def ordered(**changes: Any) -> dict[str, Any]:
    """Return a coordinator's `go`."""
    ranks = dict.fromkeys(("generation", "group_rank", "base_rank", "restart_count", "max_restarts"), 0)
    sizes = {"local_world_size": 2, "world_size": 4, "group_world_size": 2, "master_port": 29500}
    return {**ranks, **sizes, "master_addr": "10.0.0.2", "rendezvous": None, "set_env": {}, "tree": None, **changes}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PYTHONWARNINGS",
            "BROWSER",
            "PYTHONPATH",
            "PYTHONSTARTUP",
            "LD_PRELOAD",
            "PATH",
            "BASH_ENV",
            "OMP_NUM_THREADS",
        ),
        *("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "NCCL_DEBUG_FILE", "NCCL_CUDA_PATH"),
        *("TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TORCH_LOGS_OUT", "TORCH_ADDR2LINE_BINARY"),
        *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "NCCL_DEBUG\n", "nccl_debug", "XNCCL_DEBUG"),
    ],
)
def test_a_coordinator_cannot_set_what_may_run_or_name_a_file(name: str) -> None:
    with pytest.raises(Problem, match="the coordinator's order is refused"):
        orders.go(context(), ordered(set_env={name: "1"}))


def test_the_words_that_no_name_may_have_are_those_of_the_architecture() -> None:
    text = " ".join((Path(__file__).parents[2] / "ARCHITECTURE.md").read_text().split())
    listed = re.search(r"no word of it is ([A-Z, ]+) or ([A-Z]+);", text)
    assert listed is not None
    words = {*listed[1].split(", "), listed[2]}
    assert words == environment.FILE_WORDS
    assert all("(" + word + ")" in environment.refusal(f"NCCL_{word}_A", "1") for word in words)


@pytest.mark.parametrize("value", ["/tmp/evil.so", "..\\evil", "x" * 1025, "a\nb"])
def test_a_coordinator_cannot_name_a_file_in_a_value(value: str) -> None:
    with pytest.raises(Problem, match="the coordinator's order is refused"):
        orders.go(context(), ordered(set_env={"NCCL_NET": value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_ALGO", "allreduce:tree,ring;broadcast:ring"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker0"),
        ("TORCH_LOGS", "+dynamo,recompiles"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
    ],
)
def test_what_operators_set_while_a_job_runs_reaches_the_workers(name: str, value: str) -> None:
    assert environment.refusal(name, value) == ""
    assert orders.go(context(), ordered(set_env={name: value}))["env"] == {**OWN, "LR": "0.2", name: value}


def test_program_and_directories_are_those_of_this_node_whatever_is_ordered() -> None:
    evil = {
        "env": {"LD_PRELOAD": "evil.so"}, "script": "evil.py", "args": ["evil"], "kind": "binary", "cwd": "/tmp",
        "log_dir": "/tmp", "links": "/tmp", "role": "evil", "run_id": "evil", "numa_binding": "evil",
        "signals_to_handle": "evil", "shutdown_timeout": 0, "virtual_local_rank": True,
    }  # fmt: skip
    assert orders.go(context(), ordered(**evil)) == orders.go(context(), ordered())


def test_a_store_is_opened_at_the_nodes_own_address() -> None:
    asked = {"generation": 3, "host": "192.0.2.9", "port": 0, "hold": True, "ports": "1-9", "more": "x"}
    wanted = {"generation": 3, "host": "10.0.0.1", "port": 0, "hold": True, "ports": ""}
    assert orders.prepare(context(), asked) == wanted


MEETING = {"backend": "c10d", "endpoint": "10.0.0.2:1", "run_id": "r.1", "nnodes": "2", "conf": "", "is_ours": True}


def test_torchs_agents_meet_as_the_order_says() -> None:
    own = context(Rendezvous("c10d", "r", conf="timeout=5"))
    order = orders.go(own, ordered(rendezvous={**MEETING, "backend": "evil", "conf": "evil=1", "local_addr": "x"}))
    assert order["rendezvous"] == {**MEETING, "conf": "timeout=5", "local_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("described", "ordered_meeting"),
    [
        (None, MEETING),
        (Rendezvous("c10d", "r"), None),
        (Rendezvous("c10d", "r"), {**MEETING, "run_id": "another"}),
        (Rendezvous("c10d", "r"), {**MEETING, "nnodes": "2:x"}),
    ],
)
def test_another_way_to_meet_is_refused(described: Rendezvous | None, ordered_meeting: dict[str, Any] | None) -> None:
    with pytest.raises(Problem, match="the coordinator's order is refused"):
        orders.go(context(described), ordered(rendezvous=ordered_meeting))


def test_what_the_coordinator_really_sends_is_a_whole_order_for_the_engine(tmp_path: Path) -> None:
    own = context()
    members = {node.name: s.Node(node, nproc=2) for node in own.spec.nodes}
    groups = (*quorum.first("n2", ""), quorum.Group(4, 1, {"n1": "", "n2": ""}, ("n2", "")))
    state = s.State(
        own.spec, "n2", term=1, nodes=members, members=("n1", "n2"), generation=4, env={"NCCL_DEBUG": "INFO"},
        groups=groups, recorded=frozenset({"n2"}), port=29500,
    )  # fmt: skip
    turn = Turn(state, 0.0, 0)
    formation.go_when_recorded(turn)
    sent = next(one for one in turn.commands if isinstance(one, s.Send) and one.node == "n1")
    own.workdir = str(tmp_path)
    order = Order.from_args(orders.go(own, dict(sent.args)))
    assert (order.base_rank, order.world_size, order.script, order.env["NCCL_DEBUG"]) == (0, 4, "train.py", "INFO")
