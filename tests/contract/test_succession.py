"""Who coordinates when the coordinator's host is cut off, on real hosts, with nobody attached."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job, journal, until
from tests.cluster.scripts import LIGHT
from tests.examples import nightly

KEYS = {"nproc_per_node": 1, "min_nodes": 1, "node_timeout": 4.0}


hosts = hosts_of(5, stub_torch=True)


def last(cluster: Cluster, node: str, job: str, kind: str, generation: int) -> dict[str, Any] | None:
    """Return the newest event of that type of a generation not older, as that node knows it: nobody is attached."""
    found = [one for one in journal(cluster, node, job) if one["type"] == kind and one["generation"] >= generation]
    return found[-1] if found else None


def workers(cluster: Cluster, node: str) -> list[int]:
    """Return the pids of the script's processes on a host."""
    return [pid for pid, line in cluster.processes(node).items() if line.endswith(" train.py")]


@pytest.mark.parametrize(
    ("away", "stay"),
    [
        pytest.param(["n1"], ["n2", "n3"], marks=nightly),
        pytest.param(["n1"], ["n2", "n3", "n4"], marks=nightly),
        (["n1", "n2"], ["n3", "n4", "n5"]),
    ],
    ids=["1 of 3", "1 of 4", "2 of 5"],
)
def test_the_coordinators_side_is_cut_off(hosts: Cluster, tmp_path: Path, away: list[str], stay: list[str]) -> None:
    size = len(away) + len(stay)
    name = f"cut{size}"
    with Job(hosts, tmp_path / "work", LIGHT, **KEYS).start("--detach", "--nnodes", f"1:{size}", "--job", name) as job:
        try:
            assert job.wait() == 0, job.errors()
            whole = until(
                lambda: (
                    (found := last(hosts, "n1", name, "generation_running", 0))
                    and found["detail"]["world_size"] == size
                    and found
                ),
                "whole group",
            )
            hosts.partition([*away], [*stay])
            started = until(
                lambda: last(hosts, stay[0], name, "generation_started", whole["generation"] + 1), "a group of the rest"
            )
            assert not any(workers(hosts, node) for node in away), "two groups at once"
            assert started["detail"]["world_size"] == len(stay)
            until(lambda: last(hosts, stay[0], name, "generation_running", started["generation"]), "the rest running")
            assert last(hosts, "n1", name, "generation_started", started["generation"]) is None
            assert all(workers(hosts, node) for node in stay)
            hosts.heal()
            again = until(
                lambda: (
                    (found := last(hosts, stay[0], name, "generation_running", started["generation"] + 1))
                    and found["detail"]["world_size"] == size
                    and found
                ),
                "one group again",
            )
            until(lambda: again in journal(hosts, "n1", name), "n1 has the others' journal")
            for node in (*away, *stay):
                seen = [one["seq"] for one in journal(hosts, node, name)]
                assert seen == list(range(1, len(seen) + 1))
                assert len(workers(hosts, node)) == 1
        finally:
            hosts.heal()
            stopped = job.run("stop")
        assert stopped.returncode == 0, stopped.stderr.decode()


@nightly
def test_cuts_one_after_the_other_leave_one_group(hosts: Cluster, tmp_path: Path) -> None:
    """n3 falls out, then n1 and n2 lose each other: n2 and n3 were most of the first group, not of the last."""
    name = "order"
    with Job(hosts, tmp_path / "work", LIGHT, **KEYS).start("--detach", "--nnodes", "1:3", "--job", name) as job:
        try:
            assert job.wait() == 0, job.errors()
            for cut, left in ((None, 3), ("n3", 2), ("n2", 1)):
                if cut is not None:
                    hosts.cut("n1", cut)

                def is_left(size: int = left) -> bool:
                    found = last(hosts, "n1", name, "generation_running", 0)
                    return found is not None and found["detail"]["world_size"] == size

                until(is_left, f"group of {left}")
            # As long as both would need to elect, and to start.
            end = time.monotonic() + 5 * KEYS["node_timeout"]
            while time.monotonic() < end:
                assert not workers(hosts, "n2") + workers(hosts, "n3"), "two groups at once"
                time.sleep(0.2)
            assert len(workers(hosts, "n1")) == 1
        finally:
            hosts.heal()
            stopped = job.run("stop")
        assert stopped.returncode == 0, stopped.stderr.decode()


def test_a_stop_that_does_not_reach_most_nodes_says_so_and_a_second_one_ends_them(
    hosts: Cluster, tmp_path: Path
) -> None:
    name = "part"
    # The command has to reach n1 before the others have a coordinator of their own.
    keys = {**KEYS, "node_timeout": 12.0}
    with Job(hosts, tmp_path / "work", LIGHT, **keys).start("--detach", "--nnodes", "1:3", "--job", name) as job:
        try:
            assert job.wait() == 0, job.errors()
            until(lambda: all(len(workers(hosts, node)) == 1 for node in ("n1", "n2", "n3")), "all nodes")
            hosts.cut("n1", "n2")
            hosts.cut("n1", "n3")
            first = job.run("stop")
            assert (first.returncode, workers(hosts, "n1")) == (1, [])
            assert b"n2 n3 cannot be reached and may continue" in first.stdout

            def is_left() -> bool:
                found = last(hosts, "n2", name, "generation_running", 0)
                return found is not None and found["detail"]["world_size"] == 2

            until(is_left, "group of n2 and n3")
        finally:
            hosts.heal()
            second = job.run("stop")
        assert second.returncode == 0, second.stderr.decode()
        assert not workers(hosts, "n1") + workers(hosts, "n2") + workers(hosts, "n3")


def test_one_of_two_holds_and_promote_lets_it_go_on(hosts: Cluster, tmp_path: Path) -> None:
    name = "pair"
    with Job(hosts, tmp_path / "work", LIGHT, **KEYS).start("--detach", "--nnodes", "1:2", "--job", name) as job:
        try:
            assert job.wait() == 0, job.errors()
            until(
                lambda: (
                    (found := last(hosts, "n1", name, "generation_running", 0)) and found["detail"]["world_size"] == 2
                ),
                "both nodes",
            )
            refused = job.run("promote", "--node", "n2")
            assert refused.returncode == 1
            assert b"n1 is the coordinator" in refused.stderr
            hosts.crash("n1")
            until(lambda: not workers(hosts, "n2"), "end of n2's workers")
            # Every verb looks for n1 for a while first.
            held = job.run("status").stdout
            assert b"degraded" in held
            assert b"if n1 is dead: `supervisor promote` lets the others continue" in held
            done = job.run("promote", timeout_s=WAIT_S)
            assert done.returncode == 0, done.stderr.decode()
            started = until(lambda: last(hosts, "n2", name, "generation_started", 1), "group of n2")["detail"]
            assert (started["world_size"], started["restarts"]) == (1, 0)
            (changed,) = (one for one in journal(hosts, "n2", name) if one["type"] == "coordinator_changed")
            assert changed["node"] == "n2"
        finally:
            if "n1" not in hosts._keepers:
                hosts.boot("n1")
            stopped = job.run("stop")
        assert stopped.returncode == 0, stopped.stderr.decode()
