"""The odd one out among many, and the bad node among pairs."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cli.hosts import lines, wrapped
from supervisor.errors import HostFailure
from supervisor.inventory.pattern import expand, fold
from supervisor.link.view import HostView
from supervisor.preflight import probe
from supervisor.preflight.oddities import findings, matrix, quick
from supervisor.preflight.probe import Preflight


def facts(**changes: Any) -> Any:
    return {
        "python": "3.11.7",
        "executable": "/opt/torch/bin/python",
        "torch": {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3", "gpu_names": ["NVIDIA H100"] * 8},
        "driver": "570.1",
        "gpu_processes": [],
        "env": {"NCCL_DEBUG": "WARN"},
        "disk_free": {"/home/u": 10**12},
        "shm": {"total": 10**11, "free": 10**11},
        "memlock": None,
        "open_files": 65536,
        "load": 1.0,
        "cpu_count": 64,
        "live_jobs": [],
        "left_over": [],
        "sockets": {"kind": "", "message": ""},
        "code": None,
        "clock_offset_ms": 0.3,
        "clock_error_ms": 0.4,
        **changes,
    }


def cluster(odd: dict[str, Any], count: int = 64) -> Preflight:
    names = [f"gpu{number:02}" for number in range(1, count + 1)]
    return Preflight(
        facts={name: facts(**odd.get(name, {})) for name in names}, addresses={name: name for name in names}
    )


def test_nodes_that_are_alike_are_fine() -> None:
    found = cluster({})
    assert findings(found) == []
    assert lines(found, matrix(found), [])[-1] == "64 hosts, no problems found"


def test_a_check_ends_with_what_a_launch_would_come_to() -> None:
    def last(found: Preflight) -> list[str]:
        problems = findings(found)
        return lines(found, matrix(found), problems)[-1:] + [line for line in lines(found, [], []) if "refused" in line]

    broken = {"torch": {"error": "No module named 'torch'"}}
    assert last(cluster({"gpu07": {"driver": "535.2"}})) == ["a job on these hosts would start: 1 warning"]
    # What is only worth knowing is no reason.
    assert last(cluster({"gpu07": {"load": 200.0}})) == ["a job on these hosts would start"]
    (failing,) = last(cluster({"gpu07": broken}))
    assert failing.startswith("a job on these hosts would fail: ")
    assert " on gpu07, " in failing
    found = cluster({}, 2)
    for name in ("n1", "n2", "n3"):
        found.unreachable[name] = HostFailure(name, "connect", "connection refused", "is sshd running there?")
    assert last(found) == [
        "a job on these hosts would fail: 3 of 5 hosts unusable (n[1-3])",
        "error    n[1-3]: connect: connection refused (is sshd running there?)",
    ]


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"torch": {"torch": "2.12.0+cu128", "cuda": "12.8", "nccl": "2.27.3", "gpu_names": ["NVIDIA H100"] * 8}},
         "error", "torch is 2.12.0+cu128 on gpu07; gpu[01-06,08-64] have 2.13.0+cu128"),
        ({"torch": {"error": "No module named 'torch'"}}, "error", "torch cannot be imported: No module named 'torch'"),
        ({"driver": "535.2"}, "warning", "driver is 535.2 on gpu07"),
        ({"env": {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}}, "warning", "$NCCL_P2P_DISABLE is 1 on gpu07"),
        ({"env": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib1"}}, "info", "$NCCL_SOCKET_IFNAME is ib1"),
        ({"disk_free": {"/home/u": 10**6}}, "error", "only 1.0 MB free at /home/u"),
        ({"shm": {"total": 64 * 2**20, "free": 64 * 2**20}}, "warning", "only 67.1 MB free in /dev/shm"),
        ({"clock_offset_ms": -4000.0}, "warning", "its clock is -4.0 s off the other nodes'"),
        ({"memlock": 65536}, "warning", "memlock is limited to 65.5 kB"),
        ({"open_files": 1024}, "warning", "at most 1024 open files"),
        ({"gpu_processes": ["4711, python, 9000"]}, "warning", "4711, python, 9000"),
        ({"live_jobs": ["train-k3f9"]}, "info", "other jobs run there: train-k3f9"),
        ({"load": 200.0}, "info", "load is 200 on 64 CPUs"),
        ({"code": "abc"}, "error", "code is abc on gpu07"),
        ({"code": "no directory /w"}, "error", "there is no directory /w"),
        ({"left_over": [{"pid": 4711, "mode": "engine", "job": "train-k3f9"}]}, "warning",
         "processes of train-k3f9 run without an agent: pid 4711"),
        ({"sockets": {"kind": "interface", "message": "use eth0"}}, "info", "use eth0"),
        ({"sockets": {"kind": "host_name", "message": "no interface"}}, "warning", "no interface"),
        ({"disk_free": {"/home/u": None}}, "warning", "/home/u does not exist"),
    ],
)  # fmt: skip
def test_the_odd_one_among_64_is_named(changes: Any, severity: str, words: str) -> None:
    found = cluster({"gpu07": changes})
    said = findings(found)
    match = [one for one in said if words in one.text]
    assert [(one.severity, one.nodes) for one in match] == [(severity, ("gpu07",))]
    assert said[0].severity == max((one.severity for one in said), key=["info", "warning", "error"].index)
    assert all(len(line) <= 150 for line in lines(found, matrix(found), said))


def test_a_launch_warns_of_what_it_sees_anyway() -> None:
    hello: Any = {"python": "3.11.7", "home": "/home/u/.supervisor", "disk_free": 10**12, "shm_free": 10**11}
    hello |= {"clock_offset_ms": 0.2, "clock_error_ms": 0.1}
    engine: Any = {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}
    views = [HostView(f"n{number}", hello=hello, engine=engine) for number in range(1, 5)]
    assert quick(views) == []
    views[1].engine = engine | {"torch": "2.12.0+cpu"}
    views[1].script = "0123456789ab"
    views[2].hello = hello | {"disk_free": 10**8, "shm_free": 64 * 2**20}
    views[3].hello = hello | {"clock_offset_ms": -7000.0}
    assert [(one.fact, one.nodes) for one in quick(views)] == [
        ("torch", ("n2",)), ("code", ("n2",)), ("clock", ("n4",)), ("disk", ("n3",)), ("/dev/shm", ("n3",)),
    ]  # fmt: skip


def test_the_screen_of_64_nodes_is_readable_at_80_columns() -> None:
    path = ":".join(f"/opt/somewhere/lib{number}" for number in range(20))
    found = cluster({"gpu07": {"env": {"LD_LIBRARY_PATH": path}}, "gpu09": {"load": 130.0}})
    out = lines(found, matrix(found), findings(found))
    assert max(len(line) for line in out) > 80
    pieces = [piece for line in out for piece in wrapped(line, 80)]
    assert max(len(piece) for piece in pieces) <= 80
    assert "".join("".join(pieces).split()) == "".join("".join(out).split())
    assert "load 1.0 (gpu01) to 130.0 (gpu09) gpu[01-64]" in [" ".join(piece.split()) for piece in pieces]
    assert len(pieces) < 64


def reach_of(names: list[str], blocked: set[tuple[str, str]], error: str = "no answer within 3 s") -> Preflight:
    found = cluster({}, len(names))
    assert list(found.facts) == names
    found.reach = {
        one: {other: {"error": error} if (one, other) in blocked else {"ms": 0.3} for other in names if other != one}
        for one in names
    }
    return found


def test_a_failed_connection_is_reported_once_with_both_ends() -> None:
    names = [f"gpu{number:02}" for number in range(1, 65)]
    everybody = {(one, other) for one in names for other in names if one != other}
    (only,) = findings(reach_of(names, everybody))
    assert (only.nodes, only.text) == (tuple(names), "no node reaches any other: no answer within 3 s")
    (only,) = findings(reach_of(names, {pair for pair in everybody if pair[1] == "gpu05"}))
    assert only.nodes == ("gpu05",)
    assert only.text.startswith("no other node reaches it at gpu05")
    (only,) = findings(reach_of(names, {pair for pair in everybody if pair[0] == "gpu05"}))
    assert only.nodes == ("gpu05",)
    assert only.text.startswith("it reaches no other node")
    first, second = findings(reach_of(names, {("gpu01", "gpu09"), ("gpu01", "gpu08"), ("gpu09", "gpu01")}))
    assert first.text == "gpu01 does not reach gpu[08-09]: no answer within 3 s"
    assert (second.nodes, second.text) == (
        ("gpu09", "gpu01"),
        "gpu09 does not reach gpu01 at gpu01: no answer within 3 s",
    )
    cut_off = {pair for pair in everybody if "gpu05" in pair}
    (only,) = findings(reach_of(names, cut_off))
    assert only.nodes == ("gpu05",)
    assert only.text == "no other node reaches it at gpu05, and it reaches no other node: no answer within 3 s"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("another machine answers at that address", "leads to another machine"),
        ("Name or service not known", "cannot resolve that name:"),
        ("no answer within 3 s", "a firewall drops the packets"),
        ("No route to host", "a firewall rejects the connection"),
        ("Connection refused", "a firewall rejects the connection, or `address`"),
    ],
)
def test_the_likely_cause_of_a_blocked_connection_is_named(error: str, cause: str) -> None:
    (only,) = findings(reach_of(["gpu01", "gpu02", "gpu03"], {("gpu01", "gpu02")}, error))
    assert cause in only.hint


def test_clocks_are_held_against_the_other_nodes_and_not_against_this_machine() -> None:
    here_is_off = cluster({}, 4)
    for one in here_is_off.facts.values():
        one["clock_offset_ms"] += 90_000.0
    (only,) = findings(here_is_off)
    assert (only.severity, only.text) == ("info", "their clocks are +90.0 s off this machine's")
    two = cluster({"gpu02": {"clock_offset_ms": 2000.0}}, 2)
    (only,) = findings(two)
    assert (only.nodes, only.text) == (("gpu02",), "its clock is +2.0 s off this machine's")


def test_where_half_differ_nobody_is_the_odd_one() -> None:
    found = cluster({"gpu01": {"driver": "535.2"}}, count=2)
    (only,) = findings(found)
    assert set(only.nodes) == {"gpu01", "gpu02"}


FAILS = {"error": "timed out"}
CRAWLS = {"ms": 400.0, "backend": "nccl"}


def play(bad: set[str], names: list[str], how: Any = FAILS) -> list[Any]:
    """Play both rounds: a group with a bad node fails, or crawls."""

    def outcome(number: int, group: list[str]) -> Any:
        return {
            "round": number,
            "nodes": group,
            **(how if bad & set(group) else {"ms": 20.0 + len(group), "backend": "nccl"}),
        }

    first = [outcome(1, group) for group in probe.pairs(names)]
    assert sorted(name for one in first for name in one["nodes"]) == sorted(names)
    suspects = [name for group in probe.bad_groups(first) for name in group["nodes"]]
    batches = probe.again(suspects, [name for name in names if name not in suspects])
    return first + [outcome(2, group) for groups in batches for group in groups]


@pytest.mark.parametrize(("how", "severity"), [(FAILS, "error"), (CRAWLS, "warning")])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 64])
def test_a_bad_node_is_isolated_in_two_rounds(count: int, how: Any, severity: str) -> None:
    names = [f"gpu{number:02}" for number in range(1, count + 1)]
    for bad in names:
        found = cluster({}, count)
        found.collectives = play({bad}, names, how)
        if how is CRAWLS and count == 3:
            # One group, and nothing to compare it with.
            assert findings(found) == []
            continue
        assert [(one.severity, one.nodes) for one in findings(found)] == [(severity, (bad,))]
    fine = cluster({}, count)
    fine.collectives = play(set(), names)
    assert findings(fine) == []


def test_of_two_nodes_the_bad_one_does_not_show() -> None:
    found = cluster({}, 2)
    found.collectives = play({"gpu02"}, ["gpu01", "gpu02"])
    (only,) = findings(found)
    assert only.nodes == ("gpu01", "gpu02")
    assert "unknown which" in only.text


def test_a_bad_link_between_two_good_nodes_is_named() -> None:
    found = cluster({}, 4)
    done = [(1, "gpu01", "gpu02"), (2, "gpu03", "gpu01"), (2, "gpu04", "gpu02")]
    found.collectives = [{"round": at, "nodes": list(pair), "ms": 20.0, "backend": "gloo"} for at, *pair in done]
    found.collectives.append({"round": 1, "nodes": ["gpu03", "gpu04"], **FAILS})
    (only,) = findings(found)
    assert (only.severity, only.nodes) == ("error", ("gpu03", "gpu04"))
    assert "each is fine with other nodes" in only.text


def test_suspects_take_turns_with_few_good_nodes_but_not_for_ever() -> None:
    names = [f"n{number}" for number in range(64)]
    batches = probe.again(names[2:], names[:2])
    assert [len(groups) for groups in batches] == [2] * probe.BATCHES


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["gpu01", "gpu02", "gpu10"], "gpu[01-02,10]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["login", "n3"], "n3,login"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n0", "n1", "n00", "n01"], "n[0-1],n[00-01]"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)
def test_names_are_folded_into_patterns_that_mean_the_same(names: list[str], pattern: str) -> None:
    assert fold(names) == pattern
    assert sorted(expand(pattern)) == sorted(names)
